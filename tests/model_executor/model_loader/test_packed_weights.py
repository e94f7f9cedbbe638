"""compressed-tensors, AWQ and GPTQ: exact values, whole models against their decoded twins."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.model_executor.model_loader.packed_formats import (
    FORMATS,
    Format,
    encode,
    write_quantised,
)
from tests.model_executor.models.decoder.building import build_model, make_harness
from tests.model_executor.models.decoder.reference import (
    PARITY_CONFIGS,
    build_hf_model,
    glm5_next,
    glm_moe_dsa,
    kimi_linear,
    published_tensors,
)
from tests.model_executor.models.decoder.test_gated_delta import OTHERS
from tests.model_executor.models.hf_reference import random_tokens
from vllm import LLM
from vllm.exceptions import CheckpointError, ConfigError, UnsupportedFeatureError
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.quantization import MatrixSpec
from vllm.model_executor.layers.quantization.packing_storage import PackingStorage
from vllm.model_executor.model_loader.loader import (
    load_model_weights,
    read_stored_tensors,
    take_shard,
)
from vllm.model_executor.model_loader.packed_weights import PackedWeights
from vllm.model_executor.model_loader.quantization_config import read_quantization
from vllm.model_executor.model_loader.resolve import read_hf_config
from vllm.model_executor.model_loader.shards import Shard
from vllm.model_executor.models.decoder.model import DecoderForCausalLM
from vllm.model_executor.models.registry import resolve_model
from vllm.v1.attention.ops.registry import get_reference_op
from vllm.v1.attention.ops.stored import Inputs, RowSource
from vllm.v1.attention.ops.stored_products import parts_by_inputs

CPU = torch.device("cpu")
SIZES = {"hidden_size": 64, "intermediate_size": 96}


def load(folder: Path, *, inputs: Inputs = "whole") -> DecoderForCausalLM:
    """Loads a folder as the worker does."""
    raw = read_hf_config(folder)
    described = read_quantization(raw, folder)
    assert described is not None
    config = resolve_model(raw["architectures"]).parse_config(raw)
    stored = [own for own in read_stored_tensors(folder) if not described.leaves_out(own.name)]
    weights = PackedWeights(stored, described, config.names.translate, inputs=inputs)
    model = DecoderForCausalLM(
        config, ops=get_reference_op, dtype=torch.float32, device="cpu", quantization=weights
    )
    load_model_weights(model, folder, use_tqdm=False, stored=stored)
    weights.finish_loading()
    return model


def load_one(
    form: Format, folder: Path, weight: torch.Tensor, shard: Shard | None = None
) -> tuple[Any, torch.Tensor]:
    """Stores one matrix, loads it or a part alone; returns its storage and the whole's values."""
    tensors, expected = encode(form, weight, seed=3)
    save_file(
        {f"a.b.{k}": v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors"
    )
    described = read_quantization({"quantization_config": form.config()})
    assert described is not None
    weights = PackedWeights(
        read_stored_tensors(folder),
        described,
        find_shard=lambda name: shard if name == "a.b.weight" else None,
    )
    rows, columns = weight.shape if shard is None else shard.cut_shape(weight.shape)
    made = weights.make_matrix(MatrixSpec("a.b", columns, rows, torch.float32, CPU))
    assert made is not None
    slots = made.slots("a.b")
    stored = load_file(folder / "model.safetensors")
    assert set(slots) == {name for name in stored if not described.leaves_out(name)}
    for name, slot in slots.items():
        part = take_shard(stored[name], weights.find_shard(name))
        if slot.dtype == torch.float8_e8m0fnu:
            slot = slot.view(torch.uint8)  # bytes of exponents, never numbers
        slot.copy_(part)
    weights.finish_loading()
    return made.row_source, expected


@pytest.mark.parametrize("name", list(FORMATS))
def test_values_are_exactly_those_of_the_format(name: str, tmp_path: Path) -> None:
    form = FORMATS[name]
    weight = torch.randn(72, 96, generator=torch.Generator().manual_seed(2))
    source, expected = load_one(form, tmp_path, weight)
    rows = torch.empty(72, 96)
    source.write_rows(0, rows)
    assert torch.equal(rows, expected)
    assert (rows - weight).abs().max() < 0.5, "the values are far from what was rounded"
    assert isinstance(source, PackingStorage)
    assert source.slots("a.b") == {}, "the file's layout is kept beside the panels"
    if form.method in ("nvfp4", "modelopt", "mxfp4", "mxfp8"):
        assert source.packed.scales.values.itemsize == 1, "scales take more than in the file"
    is_four = form.method != "fp8" and form.bits == 4 and form.scale_type != torch.float32
    assert source.packed.codes.nbytes == 128 * 96 * (0.5 if is_four else 1)


@pytest.mark.parametrize("name", list(FORMATS))
@pytest.mark.parametrize("axis", [0, 1])
def test_ranks_hold_parts_of_the_values(name: str, axis: int, tmp_path: Path) -> None:
    form = FORMATS[name]
    weight = torch.randn(192, 192, generator=torch.Generator().manual_seed(2))
    if form.has_order and axis == 1:
        with pytest.raises(ConfigError, match="desc_act"):
            load_one(form, tmp_path, weight, Shard(1, 0, 2))
        return
    if form.by_bitsandbytes:
        with pytest.raises(UnsupportedFeatureError, match="--tensor-parallel-size 1"):
            load_one(form, tmp_path, weight, Shard(axis, 0, 2))
        return
    for rank in range(2):
        source, expected = load_one(form, tmp_path, weight, Shard(axis, rank, 2))
        part = expected.chunk(2, axis)[rank]
        rows = torch.empty(part.shape)
        source.write_rows(0, rows)
        assert torch.equal(rows, part)


def test_ranks_that_would_cut_a_group_are_refused(tmp_path: Path) -> None:
    weight = torch.randn(24, 96, generator=torch.Generator().manual_seed(2))
    with pytest.raises(ConfigError, match="runs of 32 inputs, and 2 ranks would get 48 each"):
        load_one(FORMATS["w4a16"], tmp_path, weight, Shard(1, 0, 2))
    with pytest.raises(ConfigError, match="runs of 8 outputs, and 2 ranks would get 12 each"):
        load_one(FORMATS["awq"], tmp_path, weight, Shard(0, 1, 2))


@pytest.mark.parametrize(
    ("name", "leaf", "value", "error", "message"),
    [
        (
            "nf4",
            "weight.quant_map",
            torch.linspace(-1, 1, 16),
            UnsupportedFeatureError,
            "other values",
        ),
        ("nf4", "weight.absmax", torch.ones(3), CheckpointError, "has 3 scales for 8 x 64 values"),
        ("nf4", "weight.quant_state.bitsandbytes__nf4", b"{", CheckpointError, "is no JSON"),
        (
            "nf4",
            "weight.quant_state.bitsandbytes__nf4",
            b"[1]",
            CheckpointError,
            r"shape \[8, 64\]",
        ),
        (
            "nf4",
            "weight.quant_state.bitsandbytes__nf4",
            b'{"shape": [8, 64], "blocksize": 0}',
            CheckpointError,
            "'blocksize' is 0",
        ),
        (
            "nf4",
            "weight.quant_state.bitsandbytes__nf4",
            b'{"shape": [8, 64], "blocksize": 128}',
            UnsupportedFeatureError,
            "not whole blocks of 128",
        ),
        (
            "nf4",
            "weight.quant_state.bitsandbytes__nf4",
            b'{"shape": 8, "blocksize": 32}',
            CheckpointError,
            r"shape \[8, 64\]",
        ),
        (
            "nf4",
            "weight.absmax",
            b"0123456789012345",
            CheckpointError,
            "nested_absmax is not there",
        ),
        ("nf4-nested", "weight.absmax", torch.ones(32), CheckpointError, "nested_absmax is there"),
        ("nf4-nested", "weight.nested_absmax", torch.ones(1), CheckpointError, "10 a scale"),
        ("nf4-nested", "weight.nested_quant_map", torch.ones(9), CheckpointError, "9 have a value"),
        ("llm-int8", "weight_format", torch.tensor(2).byte(), UnsupportedFeatureError, "is 2"),
    ],
)
def test_wrong_tensors_of_bitsandbytes_are_named(
    name: str,
    leaf: str,
    value: torch.Tensor | bytes,
    error: type[Exception],
    message: str,
    tmp_path: Path,
) -> None:
    form = FORMATS[name]
    tensors, _ = encode(form, torch.randn(8, 64))
    given = torch.tensor(list(value), dtype=torch.uint8) if isinstance(value, bytes) else value
    tensors[leaf] = given
    save_file({f"a.b.{k}": v for k, v in tensors.items()}, tmp_path / "model.safetensors")
    described = read_quantization({"quantization_config": form.config()})
    assert described is not None
    weights = PackedWeights(read_stored_tensors(tmp_path), described, inputs="bytes by group")
    made = weights.make_matrix(MatrixSpec("a.b", 64, 8, torch.float32, CPU))
    assert made is not None
    for slot_name, slot in made.slots("a.b").items():
        slot.copy_(tensors[slot_name.removeprefix("a.b.")])
    with pytest.raises(error, match=message):
        weights.finish_loading()


def test_sizes_that_end_within_a_word(tmp_path: Path) -> None:
    weight = torch.randn(13, 36, generator=torch.Generator().manual_seed(2))
    for name in ("w4a16", "w4a16-asymmetric", "w4a16-channel", "w8a16"):
        source, expected = load_one(FORMATS[name], tmp_path, weight)
        rows = torch.empty(13, 36)
        source.write_rows(0, rows)
        assert torch.equal(rows, expected), name


def test_a_zero_point_of_fifteen_wraps_in_the_first_layout(tmp_path: Path) -> None:
    form = Format("gptq", group=8, is_symmetric=False)
    tensors, _ = encode(form, torch.randn(8, 8))
    # Stored 15 stands for 16, of which four bits keep 0.
    tensors["qzeros"].fill_(-1)
    save_file({f"a.b.{k}": v for k, v in tensors.items()}, tmp_path / "model.safetensors")
    described = read_quantization({"quantization_config": form.config()})
    assert described is not None
    weights = PackedWeights(read_stored_tensors(tmp_path), described)
    made = weights.make_matrix(MatrixSpec("a.b", 8, 8, torch.float32, CPU))
    assert made is not None
    assert made.row_source is not None
    for name, slot in made.slots("a.b").items():
        slot.copy_(tensors[name.removeprefix("a.b.")])
    weights.finish_loading()
    rows = torch.empty(8, 8)
    made.row_source.write_rows(0, rows)
    codes = torch.stack([(tensors["qweight"][0] >> 4 * k) & 15 for k in range(8)], 1)
    assert torch.equal(rows, codes * tensors["scales"][0].float()[:, None])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "name"),
    [
        *(("llama", name) for name in FORMATS),
        ("qwen3", "w4a16"),
        ("qwen3-moe", "awq"),
        ("qwen3-moe", "gptq-order"),
        ("qwen3-moe", "nvfp4"),
        ("gemma3", "w4a16-asymmetric"),
        ("mistral", "gptq"),
        ("qwen3.5", "awq"),
        ("qwen3.5", "w8a16"),
        ("qwen3.5", "nvfp4-modelopt"),
        ("kimi-linear", "w4a16"),
        ("kimi-linear", "gptq-order"),
        ("glm", "w4a16"),
        *((name, "fp8-blocks") for name in ("qwen3.5", "qwen3-next", "kimi-linear", "glm 5")),
        ("gemma4-small", "w4a16"),
        ("gemma4-moe", "w8a16"),
        ("gemma4-moe", "nvfp4-modelopt"),
        ("gemma4-moe", "gptq-order"),
    ],
)
def test_a_model_is_its_decoded_twin(family: str, name: str, tmp_path: Path) -> None:
    own = {
        **PARITY_CONFIGS,
        **OTHERS,
        "kimi-linear": kimi_linear(),
        "glm": glm5_next(),
        "glm 5": glm_moe_dsa(num_nextn_predict_layers=0),
    }
    raw = {**own[family], **SIZES}
    if family == "qwen3-moe":
        raw["moe_intermediate_size"] = 32
    if family == "qwen3.5":
        raw["linear_num_value_heads"] = 8  # codes of eight outputs lie in a word
    if family == "kimi-linear":
        # Groups of 32 inputs, and codes of eight outputs to a word.
        raw |= {"kv_lora_rank": 32, "v_head_dim": 16}
        raw["linear_attn_config"] |= {"head_dim": 32, "num_heads": 8}
    if family == "glm":
        raw = glm5_next(
            **{**SIZES, "kv_lora_rank": 32, "q_lora_rank": 32, "v_head_dim": 16},
            linear_head_dim=32,
            linear_num_heads=8,
            index_topk=32,
        )
    state = published_tensors(build_hf_model(raw, seed=7))
    # transformers has another name for the dense layer, which no quantised release uses.
    state = {k.replace("layers.0.block_sparse_moe.", "layers.0.mlp."): v for k, v in state.items()}
    twin = write_quantised(FORMATS[name], raw, state, tmp_path)
    model, plain = load(tmp_path), build_model(raw, twin)
    token_ids = random_tokens(70, 3)
    expected = make_harness(plain).run(token_ids, [70])
    torch.testing.assert_close(
        make_harness(model).run(token_ids, [70]), expected, atol=1e-4, rtol=1e-4
    )
    native = make_harness(model, native=1).run(token_ids, [70])
    torch.testing.assert_close(native, expected, atol=1e-3, rtol=1e-3)
    assert torch.equal(native, make_harness(model, native=2).run(token_ids, [1, 30, 2, 37]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "inputs", "expected"),
    [
        (
            Format("int8", 8, 0, scale_type=torch.float32, rounds_inputs=True),
            "whole",
            "bytes by row",
        ),
        (Format("packed", 4, 32, rounds_inputs=True), "whole", "bytes by row"),
        (FORMATS["gptq-order"], "bytes by group", "bytes by group"),
        (FORMATS["awq"], "bytes by group", "bytes by group"),
        (FORMATS["awq"], "two bytes by group", "two bytes by group"),
    ],
    ids=["w8a8", "w4a8", "gptq-order", "awq", "w4a16"],
)
def test_rounded_inputs(form: Format, inputs: Inputs, expected: Inputs, tmp_path: Path) -> None:
    raw = {**PARITY_CONFIGS["llama"], **SIZES}
    state = published_tensors(build_hf_model(raw, seed=7))
    twin = write_quantised(form, raw, state, tmp_path)
    model, plain = load(tmp_path, inputs=inputs), build_model(raw, twin)
    linears = [m for m in model.modules() if isinstance(m, ReplicatedLinear)]
    found = {part.inputs for own in linears for part in parts_by_inputs(_rows_of(own))}
    assert found == {expected}
    token_ids = random_tokens(70, 3)
    exact = make_harness(plain).run(token_ids, [70])
    by_torch = make_harness(model).run(token_ids, [70])
    native = make_harness(model, native=1).run(token_ids, [70])
    assert not torch.allclose(by_torch, exact, atol=1e-4), "inputs are not rounded"
    for got in (by_torch, native):
        assert torch.nn.functional.cosine_similarity(got, exact).median() > 0.99
    assert torch.nn.functional.cosine_similarity(native, by_torch).median() > 0.9999
    assert torch.equal(native, make_harness(model, native=2).run(token_ids, [1, 30, 2, 37]))


def _rows_of(layer: ReplicatedLinear) -> RowSource:
    rows = layer.find_rows()
    assert rows is not None
    return rows


def change_one(name: str, leaf: str, value: torch.Tensor, folder: Path, columns: int = 64) -> None:
    """Loads a matrix of which one tensor is another; raises what loading does."""
    form = FORMATS[name]
    tensors, _ = encode(form, torch.randn(8, 64, generator=torch.Generator().manual_seed(1)))
    tensors[leaf] = value
    save_file({f"a.b.{k}": v for k, v in tensors.items()}, folder / "model.safetensors")
    described = read_quantization({"quantization_config": form.config()})
    assert described is not None
    weights = PackedWeights(read_stored_tensors(folder), described)
    made = weights.make_matrix(MatrixSpec("a.b", columns, 8, torch.float32, CPU))
    assert made is not None
    for slot_name, slot in made.slots("a.b").items():
        stored = tensors[slot_name.removeprefix("a.b.")]
        slot.view(torch.uint8 if slot.itemsize == 1 else slot.dtype).copy_(
            stored.view(torch.uint8) if stored.itemsize == 1 else stored
        )
    weights.finish_loading()


@pytest.mark.parametrize(
    ("name", "leaf", "value", "reason"),
    [
        (
            "nvfp4",
            "weight_global_scale",
            torch.zeros(1),
            r"a\.b\.weight_global_scale is 0\.0, and must be finite and above zero.*divided by it",
        ),
        (
            "nvfp4-modelopt",
            "weight_scale_2",
            torch.tensor(torch.inf),
            r"a\.b\.weight_scale_2 is inf.*multiplied by it: download the checkpoint again",
        ),
        (
            "nvfp4",
            "weight_scale",
            torch.full((8, 4), 127, dtype=torch.uint8).view(torch.float8_e4m3fn),
            r"a\.b: 32 scales are no number, the first in row 0, group 0: download",
        ),
        (
            "mxfp4",
            "weight_scale",
            torch.full((8, 2), 255, dtype=torch.uint8),
            "16 scales are no number",
        ),
        (
            "mxfp8",
            "weight",
            torch.full((8, 64), 255, dtype=torch.uint8).view(torch.float8_e4m3fn),
            r"a\.b\.weight holds NaN",
        ),
    ],
)
def test_small_floats_that_are_no_numbers_are_named(
    name: str, leaf: str, value: torch.Tensor, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=reason):
        change_one(name, leaf, value, tmp_path)


def test_small_floats_stored_otherwise_than_the_config_says(tmp_path: Path) -> None:
    eight = torch.zeros(8, 64).to(torch.float8_e4m3fn)
    with pytest.raises(
        UnsupportedFeatureError,
        match=r"a\.b\.weight of model\.safetensors is of type F8_E4M3.*a weight of U8/I8/F4",
    ):
        change_one("nvfp4-modelopt", "weight", eight, tmp_path)
    with pytest.raises(CheckpointError, match="72 inputs, which are not whole groups of 16"):
        change_one("nvfp4", "weight_global_scale", torch.ones(1), tmp_path, columns=72)


def test_parts_of_one_product_have_scales_of_their_own(tmp_path: Path) -> None:
    """Queries, keys and values are one product, each under a scale of its whole matrix."""
    raw = {**PARITY_CONFIGS["llama"], **SIZES}
    state = published_tensors(build_hf_model(raw, seed=7))
    for name, factor in (("q_proj", 1.0), ("k_proj", 30.0), ("v_proj", 0.01)):
        for key in state:
            if name in key:
                state[key] = state[key] * factor
    twin = write_quantised(FORMATS["nvfp4"], raw, state, tmp_path)
    model, plain = load(tmp_path), build_model(raw, twin)
    stored = load_file(tmp_path / "model.safetensors")
    scales = [stored[f"model.layers.0.self_attn.{p}_proj.weight_global_scale"] for p in "qkv"]
    assert len({float(scale) for scale in scales}) == 3
    found = _decoded(model)
    wanted = {f"{p}_proj": twin[f"model.layers.0.self_attn.{p}_proj.weight"] for p in "qkv"}
    for key, values in wanted.items():
        assert any(torch.equal(values, own) for own in found), key
    token_ids = random_tokens(9, 3)
    torch.testing.assert_close(
        make_harness(model).run(token_ids, [9]),
        make_harness(plain).run(token_ids, [9]),
        atol=1e-4,
        rtol=1e-4,
    )


def _decoded(model: DecoderForCausalLM) -> list[torch.Tensor]:
    """Returns the values of every stored matrix."""
    found = []
    for layer in (m for m in model.modules() if isinstance(m, ReplicatedLinear)):
        for leaf in _rows_of(layer).leaves():
            rows = torch.empty(leaf.num_rows, leaf.num_columns)
            leaf.write_rows(0, rows)
            found.append(rows)
    return found


def test_other_groups_than_the_config_says_are_refused(tmp_path: Path) -> None:
    form = FORMATS["gptq-order"]
    tensors, _ = encode(form, torch.randn(16, 32), seed=1)
    tensors["g_idx"][0] = 1 - tensors["g_idx"][0]
    described = read_quantization({"quantization_config": form.config()})
    assert described is not None
    save_file({f"a.b.{k}": v for k, v in tensors.items()}, tmp_path / "model.safetensors")
    weights = PackedWeights(read_stored_tensors(tmp_path), described)
    made = weights.make_matrix(MatrixSpec("a.b", 32, 16, torch.float32, CPU))
    assert made is not None
    for name, slot in made.slots("a.b").items():
        slot.copy_(tensors[name.removeprefix("a.b.")])
    with pytest.raises(CheckpointError, match="g_idx gives the groups of 32 inputs other sizes"):
        weights.finish_loading()


@pytest.mark.slow
def test_what_is_typed_is_held_against_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    raw = {**PARITY_CONFIGS["llama"], **SIZES}
    state = build_hf_model(raw, seed=7).state_dict()
    write_quantised(FORMATS["nvfp4-modelopt"], raw, dict(state), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for part in "kv":
        # Scales of the quantised cache that it asks for.
        tensors[f"model.layers.0.self_attn.{part}_proj.{part}_scale"] = torch.tensor(0.5)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="'gptq', but the checkpoint holds weights quantised by"):
        LLM(model=str(tmp_path), quantization="gptq", skip_tokenizer_init=True)
    with pytest.raises(ConfigError, match="is quantised already: leave it out"):
        LLM(model=str(tmp_path), quantization="int8", skip_tokenizer_init=True)
    with pytest.raises(ConfigError, match="'awq', but the checkpoint holds plain weights"):
        LLM(model="deepseek-v4", quantization="awq", skip_tokenizer_init=True)
    answers = LLM(model=str(tmp_path), quantization="modelopt_fp4", skip_tokenizer_init=True)
    assert answers.generate([{"prompt_token_ids": [1, 2, 3]}])
