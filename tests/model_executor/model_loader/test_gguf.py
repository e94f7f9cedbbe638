"""GGUF: every type exactly, whole models against their decoded twins, hostile files."""

import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.model_executor.model_loader.gguf_files import (
    GGML_QUANT_SIZES,
    SCALES_AT,
    Type,
    dequantize,
    gguf,
    random_blocks,
    write_gguf,
)
from tests.model_executor.model_loader.hostile_gguf import (
    BlockTrial,
    damage_header,
    find_header_end,
)
from tests.model_executor.models.decoder.building import build_model, make_harness
from tests.model_executor.models.decoder.reference import PARITY_CONFIGS, build_hf_model, qwen3_5
from tests.model_executor.models.hf_reference import random_tokens
from vllm.exceptions import CheckpointError, ConfigError, UnsupportedFeatureError, VllmError
from vllm.model_executor.layers.quantization.gguf_blocks import BLOCK_FORMS, read_blocks
from vllm.model_executor.layers.quantization.gguf_low_bits import LOW_BIT_FORMS
from vllm.model_executor.layers.quantization.interface import MatrixSpec
from vllm.model_executor.layers.quantization.panels import PackedRows
from vllm.model_executor.model_loader.gguf_config import read_gguf_config
from vllm.model_executor.model_loader.gguf_weights import GgufWeights
from vllm.model_executor.model_loader.loader import load_model_weights, read_stored_tensors
from vllm.model_executor.model_loader.mapped_file import MappedFile
from vllm.model_executor.models.decoder.config import DecoderConfig
from vllm.model_executor.models.decoder.model import DecoderForCausalLM
from vllm.model_executor.models.registry import resolve_model
from vllm.native.packing import find_block_packer
from vllm.utils.gguf_file import read_gguf
from vllm.v1.attention.ops.registry import get_reference_op

# Rows of 256 values suit every type.
SIZES = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 64}
CONFIGS = PARITY_CONFIGS | {
    "qwen3.5-moe": qwen3_5(
        architectures=["Qwen3_5MoeForCausalLM"],
        model_type="qwen3_5_moe_text",
        num_experts=8,
        num_experts_per_tok=2,
    )
}
SMALL = [Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.IQ4_NL, Type.MXFP4]
LARGE = [Type.Q4_K, Type.Q6_K, Type.Q5_K, Type.IQ4_XS]
LOW = [Type[name] for name in LOW_BIT_FORMS if name != "Q2_0"]
PLAIN = [Type.F32, Type.F16, Type.BF16]


def make_raw(family: str) -> dict[str, Any]:
    raw = {**CONFIGS[family], **SIZES}
    if family == "qwen3-moe":
        raw |= {"moe_intermediate_size": 256, "mlp_only_layers": []}
    if family == "qwen3.5-moe":
        raw |= {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 256}
    if family.startswith("qwen3.5"):
        raw |= {"num_hidden_layers": 4, "linear_num_value_heads": 6, "linear_value_head_dim": 128}
        rope = raw["rope_parameters"] | {"mrope_section": [4, 2, 2]}
        raw |= {"rope_parameters": rope, "rope_theta": rope["rope_theta"]}
    if family.startswith("gemma4"):
        raw |= {"num_hidden_layers": 4, "global_head_dim": 128, "num_kv_shared_layers": 0}
        raw["layer_types"] = ["sliding_attention", "full_attention"] * 2
        raw["rms_norm_eps"] = 1e-6
        if family == "gemma4-small":
            raw |= {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 64}
        if family == "gemma4-moe":
            raw["moe_intermediate_size"] = 256
    if family == "gpt-oss":
        raw["num_hidden_layers"] = 2
        raw["layer_types"] = ["sliding_attention", "full_attention"]
    if family == "gemma3":
        raw["num_hidden_layers"] = 6
        raw["layer_types"] = ["sliding_attention"] * 5 + ["full_attention"]
        raw["query_pre_attn_scalar"] = raw["head_dim"]
    return raw


def load(path: Path, *, drafts: bool = False) -> DecoderForCausalLM:
    """Loads a file as the worker does."""
    raw = read_gguf_config(path)
    config = resolve_model(raw["architectures"]).parse_config(raw).for_drafts(drafts)
    weights = GgufWeights(path, pack=find_block_packer(1))
    model = DecoderForCausalLM(
        config, ops=get_reference_op, dtype=torch.float32, device="cpu", quantization=weights
    )
    load_model_weights(model, path, use_tqdm=False, stored=read_stored_tensors(path))
    weights.finish_loading()
    return model


# The package does not know it.
KNOWN = [name for name in BLOCK_FORMS if name != "Q2_0"]
KEPT_AS_DIGITS = {"IQ2_XS": 1.55, "IQ2_S": 1.4, "IQ3_S": 1.26, "IQ1_S": 2.13, "IQ1_M": 2.04}
KEPT_AS_DIGITS |= {"TQ1_0": 1.23, "Q1_0": 1.89}


@pytest.mark.parametrize("name", KNOWN)
def test_every_type_has_the_values_of_its_definition(name: str) -> None:
    kind = Type[name]
    width = 2 * GGML_QUANT_SIZES[kind][0]
    blocks = random_blocks(kind, 70, width, 3, 1.0)
    packed = PackedRows(read_blocks(name, torch.from_numpy(blocks)), name)
    rows = torch.empty(70, width)
    packed.write_rows(0, rows)
    assert torch.equal(rows, torch.from_numpy(dequantize(blocks, kind)))
    # What is kept is little more than the file has (a code of five bits takes six); of some types
    # the digits that indexes stand for are kept.
    most = {"Q5_0": 1.19, "Q5_1": 1.17, "Q5_K": 1.21} | KEPT_AS_DIGITS
    assert packed.nbytes * 70 / 128 <= blocks.nbytes * most.get(name, 1.04)


def test_accelerators_get_the_same_values_in_codes_that_they_take() -> None:
    for name in KNOWN:
        kind = Type[name]
        blocks = random_blocks(kind, 3, 2 * GGML_QUANT_SIZES[kind][0], 3, 1.0)
        coded = read_blocks(name, torch.from_numpy(blocks)).for_accelerators()
        packed = PackedRows(coded, name)
        assert packed.find_stack() is not None
        rows = torch.empty(3, packed.num_columns)
        packed.write_rows(0, rows)
        assert torch.equal(rows, torch.from_numpy(dequantize(blocks, kind)))


def test_numbers_that_share_their_bytes_are_kept_once() -> None:
    blocks = torch.from_numpy(random_blocks(Type.Q2_K, 130, 512, 3, 1.0))
    for order in (torch.arange(130), torch.arange(130).flip(0)):
        rows = read_blocks("Q2_K", blocks).take_rows(order)
        packed = PackedRows(rows, "w")
        assert packed.offsets is not None
        assert packed.offsets.values.data_ptr() == packed.scales.values.data_ptr()
        assert packed.nbytes == 192 * 2 * 84


def test_codes_of_two_bits_are_read_lowest_first() -> None:
    blocks = torch.zeros(1, 18, dtype=torch.uint8)
    blocks[0, :2] = torch.tensor([0.5]).half().view(torch.uint8)
    blocks[0, 2:4] = torch.tensor([0b11_10_01_00, 0b00_00_00_11], dtype=torch.uint8)
    packed, rows = PackedRows(read_blocks("Q2_0", blocks), "w"), torch.empty(1, 64)
    packed.write_rows(0, rows)
    assert rows[0].tolist() == [-0.5, 0, 0.5, 1, 1, *[-0.5] * 59]


def test_all_negative_extremes_and_small_scales() -> None:
    for name in (
        "Q8_0",
        "Q6_K",
        "Q4_K",
        "Q4_0",
        *(name for name in LOW_BIT_FORMS if name in KNOWN),
    ):
        kind = Type[name]
        per_block, num_bytes = GGML_QUANT_SIZES[kind]
        for byte in (0x00, 0x80, 0xFF, 0x7F):
            blocks = np.full((1, num_bytes), byte, np.uint8)
            # The smallest subnormal scale.
            smallest = np.array([1], np.uint16).view(np.uint8)
            if name == "IQ1_M":
                words = blocks[:, 48:].view(np.uint16)
                words[:] = words & 0xFFF | np.array([0x1000, 0, 0, 0], np.uint16)
            else:
                for at in SCALES_AT.get(kind, (0,)):
                    blocks[:, at : at + 2] = smallest
            packed = PackedRows(read_blocks(name, torch.from_numpy(blocks)), name)
            rows = torch.empty(1, per_block)
            packed.write_rows(0, rows)
            assert torch.equal(rows, torch.from_numpy(dequantize(blocks, kind)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "kinds"),
    [
        ("llama", [*SMALL, Type.NVFP4]),
        ("llama", LARGE),
        ("llama", PLAIN),
        ("qwen2", [*SMALL, *LARGE]),
        ("qwen3", LARGE),
        ("qwen3", [Type.Q4_K]),
        ("llama", LOW),
        ("qwen3-moe", [*SMALL, Type.NVFP4]),
        ("qwen3-moe", [Type.IQ2_XXS, Type.Q8_0, *LOW]),
        ("gemma3", [*SMALL, *PLAIN]),
        ("gemma4-small", [*SMALL, *PLAIN]),
        ("gemma4-small", [Type.Q6_K, Type.Q4_K]),
        ("gemma4-moe", SMALL),
        ("qwen3.5", [*SMALL, *PLAIN]),
        ("qwen3.5", [Type.Q4_K, Type.Q6_K]),
        ("qwen3.5-moe", SMALL),
        ("gpt-oss", [Type.MXFP4]),
        ("gpt-oss", [Type.Q8_0]),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(kind.name for kind in value),
)
def test_a_file_is_its_decoded_twin(family: str, kinds: list[Type], tmp_path: Path) -> None:
    raw = make_raw(family)
    state = dict(build_hf_model(raw, seed=7).state_dict())
    if raw.get("tie_word_embeddings") or family.startswith("gemma"):
        state.pop("lm_head.weight", None)
    path = tmp_path / "model.gguf"
    twin = write_gguf("gemma4" if "gemma4" in family else family, raw, state, path, kinds)
    model, plain = load(path), build_model(raw, twin)
    token_ids = random_tokens(60, 3)
    expected = make_harness(plain).run(token_ids, [60])
    scale = float(expected.abs().max())
    torch.testing.assert_close(
        make_harness(model).run(token_ids, [60]), expected, atol=2e-5 * scale, rtol=1e-4
    )
    native = make_harness(model, native=1).run(token_ids, [60])
    torch.testing.assert_close(native, expected, atol=2e-4 * scale, rtol=1e-3)
    assert torch.equal(native, make_harness(model, native=2).run(token_ids, [1, 20, 2, 37]))


def test_plain_experts_that_would_be_interleaved_are_named(tmp_path: Path) -> None:
    raw, path = make_raw("gpt-oss"), tmp_path / "model.gguf"
    state = dict(build_hf_model(raw, seed=7).state_dict())
    write_gguf("gpt-oss", raw, state, path, [Type.F16])
    with pytest.raises(UnsupportedFeatureError, match=r"mlp\.experts\.\d are stored as F16: both"):
        load(path)


def test_tables_of_integers_are_read(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_block_count(1)
    table = np.arange(12, dtype=np.int32).reshape(4, 3)
    writer.add_tensor("blk.0.table.weight", table)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (stored,) = read_stored_tensors(path)
    with MappedFile(path) as mapped:
        assert torch.equal(mapped.read(stored), torch.from_numpy(table))


def read_llama(
    path: Path, keys: dict[str, Any], tensors: dict[str, np.ndarray], arch: str = "llama"
) -> DecoderConfig:
    """Returns the config of a file of keys, and of tensors that say something of it."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_token_list(["a"])
    own = {"context_length": 64, "embedding_length": 256, "block_count": 2}
    own |= {"feed_forward_length": 256, "attention.head_count": 4, **keys}
    for name, value in own.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add.get(type(value), writer.add_array)(f"{arch}.{name}", value)
    writer.add_layer_norm_rms_eps(1e-5)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    raw = read_gguf_config(path)
    config: DecoderConfig = resolve_model(raw["architectures"]).parse_config(raw)
    return config


FACTORS = np.linspace(1, 8, 32, dtype=np.float32)


def test_rotary_divisors_are_read_from_their_tensors(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    config = read_llama(path, {}, {"rope_freqs.weight": FACTORS})
    rope = config.layers[0].rope
    assert rope.kind == "divided"
    assert rope.divisors == tuple(FACTORS.tolist())
    assert config.norm.eps == 1e-5, "an fp32 key is read as the number it was written as"
    both = {f"rope_factors_{name}.weight": FACTORS * i for i, name in ((2, "long"), (1, "short"))}
    keys = {"rope.scaling.original_context_length": 32, "rope.scaling.attn_factor": 1.25}
    rope = read_llama(path, keys, both, "qwen2").layers[0].rope
    assert (rope.kind, rope.magnitude) == ("divided", 1.25)
    assert rope.divisors == tuple((2 * FACTORS).tolist())


@pytest.mark.parametrize(
    ("keys", "kind", "factor", "length"),
    [
        ({}, "default", 1, 0),
        ({"rope.scaling.type": "none", "rope.scale_linear": 4.0}, "default", 1, 0),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, "linear", 4, 0),
        ({"rope.scale_linear": 4.0}, "linear", 4, 0),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, "yarn", 4, 64),
        # One number of each layer, all alike, is one number.
        ({"feed_forward_length": [256, 256], "attention.head_count_kv": [2, 2]}, "default", 1, 0),
    ],
)
def test_rotary_kinds_and_old_keys(
    keys: dict[str, Any], kind: str, factor: float, length: int, tmp_path: Path
) -> None:
    rope = read_llama(tmp_path / "model.gguf", keys, {}).layers[0].rope
    assert (rope.kind, rope.factor, rope.original_length) == (kind, factor, length)


def test_what_is_made_for_each_layer_or_expert_is_in_the_file(tmp_path: Path) -> None:
    tensors = {f"blk.{i}.attn_norm.weight": FACTORS for i in range(2)}
    with pytest.raises(ConfigError, match=r"block_count is 65538; allowed: at most the 2 blocks"):
        read_llama(tmp_path / "a.gguf", {"block_count": 65_538}, tensors)
    tensors["blk.0.ffn_gate_exps.weight"] = np.zeros((2, 8, 256), np.float32)
    keys = {"expert_count": 2**31 - 1, "expert_used_count": 2, "expert_feed_forward_length": 8}
    read_llama(tmp_path / "b.gguf", keys, tensors, "qwen3moe")
    with pytest.raises(CheckpointError, match=r"is of 2 experts, and the file's keys say 2147483"):
        read_stored_tensors(tmp_path / "b.gguf")


def test_memory_is_asked_for_after_sizes_are_compared(whole_file: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(whole_file)
    weights = GgufWeights(path)
    name = "model.layers.0.self_attn.q_proj"
    spec = MatrixSpec(name, 256, 2**40, torch.float32, torch.device("cpu"))
    with pytest.raises(CheckpointError, match=rf"needs {2**40} rows of 256 for {name}"):
        weights.make_matrix(spec)


def test_the_first_files_of_gemma2_lack_what_all_have(tmp_path: Path) -> None:
    config = read_llama(tmp_path / "model.gguf", {}, {}, "gemma2")
    assert [layer.window for layer in config.layers] == [4096, 0]
    assert (config.final_soft_cap, config.attention.soft_cap) == (30.0, 50.0)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rope.scaling.type": "longrope"}, "'longrope'; allowed: none, linear, yarn"),
        ({"rope.scaling.type": "yarn", "rope.scaling.attn_factor": 1.5}, "attn_factor is 1.5"),
        ({"rope.scaling.type": "yarn", "rope.scaling.yarn_ext_factor": 0.5}, "ext_factor is 0.5"),
        ({"attention.head_count": [4, 8]}, r"head_count is \[4, 8\]; allowed: an integer"),
        ({"feed_forward_length": [0, 0]}, "feed_forward_length is 0; allowed: an integer"),
        ({"expert_count": 8}, "expert_count is 8; allowed: none, as in Llama"),
        ({"block_count": 2**31}, "block_count is 2147483648; allowed: at most 4096"),
    ],
)
def test_keys_that_would_answer_wrongly_are_named(
    keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_llama(tmp_path / "model.gguf", keys, {})


_NEXTN = {
    "mtp.fc.": "nextn.eh_proj.",
    "mtp.pre_fc_norm_embedding.": "nextn.enorm.",
    "mtp.pre_fc_norm_hidden.": "nextn.hnorm.",
    "mtp.norm.": "nextn.shared_head_norm.",
    "mtp.layers.0.": "",
}


@pytest.mark.parametrize("family", ["qwen3.5", "qwen3.5-moe"])
def test_a_block_that_drafts_is_read_where_it_runs(family: str, tmp_path: Path) -> None:
    raw, path = make_raw(family) | {"mtp_num_hidden_layers": 1}, tmp_path / "model.gguf"
    config = resolve_model(raw["architectures"]).parse_config(raw)
    expected = DecoderForCausalLM(config, ops=get_reference_op, dtype=torch.float32, device="cpu")
    generator = torch.Generator().manual_seed(7)
    state = {}
    for name, slot in expected.weight_slots().items():
        # Sums of ones and of halves are exact, as norms are stored with one added.
        slot.copy_(torch.randint(-8, 8, slot.shape, generator=generator) / 8)
        layers = raw["num_hidden_layers"]
        own = next((new for new in _NEXTN if name.startswith(new)), None)
        if own is not None:
            name = f"model.layers.{layers}.{_NEXTN[own]}{name.removeprefix(own)}"
        if ".experts." in name:
            continue
        state[name] = slot.clone()
    for layer in range(layers + 1) if "moe" in family else ():
        prefix = "mtp.layers.0" if layer == layers else f"model.layers.{layer}"
        slots = expected.weight_slots()
        parts = {
            leaf: torch.stack(
                [
                    slots[f"{prefix}.mlp.experts.{e}.{leaf}.weight"]
                    for e in range(raw["num_experts"])
                ]
            )
            for leaf in ("gate_proj", "up_proj", "down_proj")
        }
        stem = f"model.layers.{layer}.mlp.experts"
        state[f"{stem}.gate_up_proj"] = torch.cat([parts["gate_proj"], parts["up_proj"]], 1)
        state[f"{stem}.down_proj"] = parts["down_proj"]
    write_gguf(family, raw | {"num_hidden_layers": layers + 1}, state, path, [Type.F32])
    assert read_gguf_config(path)["mtp_num_hidden_layers"] == 1
    assert read_gguf_config(path)["num_hidden_layers"] == layers
    found = load(path, drafts=True)
    slots = expected.weight_slots()
    for name, slot in found.weight_slots().items():
        # Logarithms are of what was exponentiated.
        atol = 1e-6 if name.endswith("A_log") else 0.0
        # Norms are kept as they are multiplied by.
        added = 1.0 if "norm" in name and "linear_attn" not in name else 0.0
        torch.testing.assert_close(slot, slots[name] + added, atol=atol, rtol=0)
    assert not any(name.startswith("mtp.") for name in load(path).weight_slots())


def test_blocks_without_drafts_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_block_count(3)
    writer.add_nextn_predict_layers(1)
    for block in range(3):
        writer.add_tensor(f"blk.{block}.attn_norm.weight", np.ones(8, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    names = [tensor.name for tensor in read_stored_tensors(path)]
    assert names == [f"model.layers.{index}.input_layernorm.weight" for index in range(2)]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("head_count_kv", [1, 2, 1], "head_count_kv is .1, 2, 1.; allowed: 4 integers"),
        ("sliding_window_pattern", [1, 1, 1, 0], "allowed: 4 booleans, one a layer"),
        ("sliding_window_pattern", [True] * 5, "allowed: 4 booleans, one a layer"),
        ("feed_forward_length", [256, 300, 256, 256], "twice as much in the layers that share"),
        ("embedding_length_per_layer_input", 0, "if and only if there is a tensor per_layer"),
    ],
)
def test_gemma4s_keys_by_layer_are_checked(
    name: str, value: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw, path = make_raw("gemma4-small"), tmp_path / "model.gguf"
    add = getattr(gguf.GGUFWriter, f"add_{name}")
    monkeypatch.setattr(gguf.GGUFWriter, f"add_{name}", lambda writer, _: add(writer, value))
    state = dict(build_hf_model(raw, seed=7).state_dict())
    write_gguf("gemma4", raw, state, path, [Type.F32])
    with pytest.raises(ConfigError, match=message):
        read_gguf_config(path)


# ---- files that are not what they say ---------------------------------------------------------


@pytest.fixture(scope="module")
def whole_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    raw = make_raw("qwen3")
    state = dict(build_hf_model(raw, seed=7).state_dict())
    state.pop("lm_head.weight", None)
    write_gguf("qwen3", raw, state, path, [Type.Q8_0])
    return path.read_bytes()


def read_all(data: bytes, path: Path) -> None:
    path.write_bytes(data)
    read_gguf_config(path)
    read_stored_tensors(path)


def test_a_file_cut_anywhere_is_named(whole_file: bytes, tmp_path: Path) -> None:
    rng = random.Random(1)
    path = tmp_path / "model.gguf"
    read_all(whole_file, path)
    for size in (0, 3, 8, 23, *(rng.randrange(24, len(whole_file)) for _ in range(40))):
        with pytest.raises(CheckpointError, match=r"model\.gguf (is not a readable|cannot)"):
            read_all(whole_file[:size], path)


@pytest.mark.slow
def test_no_header_crashes_or_hangs_the_reader(whole_file: bytes, tmp_path: Path) -> None:
    rng = random.Random(2)
    path = tmp_path / "model.gguf"
    path.write_bytes(whole_file)
    end, refused = find_header_end(path), 0
    for _ in range(1500):
        try:
            read_all(damage_header(rng, whole_file, end), path)
        except VllmError:
            refused += 1
    assert refused > 300


def test_no_blocks_crash_what_loads_and_multiplies_them() -> None:
    trial = BlockTrial(3)
    tried = [
        trial.run(name, is_extreme=turn == 1, inputs="whole" if turn % 2 else "bytes by group")
        for turn in range(4)
        for name in BLOCK_FORMS
    ]
    assert 0 < tried.count(False) < 3 * len(BLOCK_FORMS)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (b"GGUF", b"GGML", "begins with b'GGML'"),
        (b"GGUF\x03\0\0\0", b"GGUF\0\0\0\x03", "big-endian"),
        (b"GGUF\x03", b"GGUF\x09", "its version is 9"),
        (b"qwen3.block_count\x04", b"qwen3.block_count\x63", "is of type 99, which is none"),
    ],
)
def test_what_is_wrong_is_named(
    old: bytes, new: bytes, reason: str, whole_file: bytes, tmp_path: Path
) -> None:
    assert old in whole_file
    with pytest.raises(CheckpointError, match=reason):
        read_all(whole_file.replace(old, new, 1), tmp_path / "model.gguf")


def test_tensors_that_are_not_served_or_overlap_are_named(
    whole_file: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    name = b"blk.0.attn_q.weight"
    at = whole_file.index(name) + len(name)
    # Number of sizes, two of them, then the type and the place.
    kind = at + 4 + 16
    data = bytearray(whole_file)
    for number, spelled in ((9, r"9 \(Q8_1\)"), (36, r"36 \(IQ4_NL_4_4\)"), (250, "250")):
        data[kind : kind + 4] = struct.pack("<I", number)
        expected = rf"attn_q\.weight .* is of type number {spelled}, which is not served"
        with pytest.raises(UnsupportedFeatureError, match=expected):
            read_all(bytes(data), path)
    data = bytearray(whole_file)
    data[kind + 4 : kind + 12] = struct.pack("<Q", 0)
    with pytest.raises(CheckpointError, match=r"begins at byte [0-9,]+, within"):
        read_all(bytes(data), path)
    data = bytearray(whole_file)
    data[at + 4 : at + 12] = struct.pack("<Q", 250)
    with pytest.raises(CheckpointError, match=r"rows of 250 values, no multiple of the 32"):
        read_all(bytes(data), path)


def test_parts_of_a_split_file(whole_file: bytes, tmp_path: Path) -> None:
    raw = make_raw("qwen3")
    state = dict(build_hf_model(raw, seed=7).state_dict())
    state.pop("lm_head.weight", None)
    names = list(state)
    first = tmp_path / "model-00001-of-00002.gguf"
    second = tmp_path / "model-00002-of-00002.gguf"
    twin = write_gguf("qwen3", raw, {n: state[n] for n in names[:9]}, first, [Type.Q8_0])
    with pytest.raises(CheckpointError, match=r"lacks 1 of the 2 parts .* model-00002-of-00002"):
        read_gguf(first)
    twin |= write_gguf("qwen3", raw, {n: state[n] for n in names[9:]}, second, [Type.Q8_0])
    with pytest.raises(CheckpointError, match="is part 2 of 2: give the first"):
        read_gguf(second)
    model, plain = load(first), build_model(raw, twin)
    token_ids = random_tokens(20, 3)
    torch.testing.assert_close(
        make_harness(model).run(token_ids, [20]),
        make_harness(plain).run(token_ids, [20]),
        atol=1e-4,
        rtol=1e-4,
    )
    first.write_bytes(second.read_bytes())
    with pytest.raises(CheckpointError, match=r"tensor '.*' is in model-00001-of-00002\.gguf too"):
        read_gguf(first)


def test_other_architectures_and_shapes_are_refused(whole_file: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    with pytest.raises(VllmError, match="architecture 'qwen4', which is not served from GGUF"):
        read_all(whole_file.replace(b"qwen3", b"qwen4"), path)
    with pytest.raises(ConfigError, match=r"lacks the key qwen3\.block_count"):
        read_all(whole_file.replace(b"qwen3.block_count", b"qwen3.block_cOunt"), path)


@pytest.mark.parametrize(
    ("tokens", "kinds", "ids", "ends"),
    [
        (["a", "<|im_end|>"], [1, 3], {"eos": 0}, [0, 1]),
        # Text that only looks like an end is none.
        (["a", "<|im_end|>"], [1, 1], {"eos": 0}, [0]),
        (["a", "b", "<|eot_id|>"], [1, 1, 3], {"eos": 2, "fim_pad": 1}, [2, 1]),
        (["a", "b", "c"], [1, 1, 1], {"eot": 1, "fim_rep": 2, "fim_sep": 2}, [1, 2]),
        (["a"], [1], {}, None),
    ],
)
def test_answers_end_by_all_that_the_file_ends_by(
    tokens: list[str], kinds: list[int], ids: dict[str, int], ends: list[int] | None, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    for name, number in ids.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", number)
    for name, value in (("context_length", 64), ("embedding_length", 32), ("block_count", 1)):
        writer.add_uint32(f"llama.{name}", value)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert read_gguf_config(path).get("eos_token_id") == ends
