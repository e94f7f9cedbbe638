"""DeepSeek-V4 from GGUF: a mix of types is its decoded twin, and a block that drafts comes too."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.model_executor.model_loader.gguf_files import Type, gguf
from tests.model_executor.model_loader.gguf_v4 import YARN, write_v4
from tests.model_executor.models.harness import PagedHarness, build_model, run_with_mtp
from tests.model_executor.models.hf_reference import random_tokens, randomize_
from tests.model_executor.models.tiny_config import tiny_config
from tests.model_executor.published import plain_model
from vllm import LLM, SamplingParams
from vllm.exceptions import ConfigError, UnsupportedModelError
from vllm.model_executor.model_loader import loader
from vllm.model_executor.model_loader.gguf_config import read_gguf_config
from vllm.model_executor.model_loader.gguf_weights import GgufWeights, read_gguf_tensors
from vllm.model_executor.model_loader.loader import load_model_weights
from vllm.model_executor.models.deepseek_v4.config import DeepseekV4Config
from vllm.model_executor.models.deepseek_v4.model import DeepseekV4ForCausalLM
from vllm.native.packing import find_block_packer
from vllm.v1.attention.ops.registry import get_reference_op

# Rows of 32 values and more, which blocks of 32 fill.
RAW: dict[str, Any] = tiny_config(
    hidden_size=64,
    head_dim=32,
    qk_rope_head_dim=8,
    q_lora_rank=32,
    o_lora_rank=32,
    moe_intermediate_size=32,
    index_head_dim=32,
    num_nextn_predict_layers=1,
    rope_scaling=YARN,
)


# The same with rows of 256 values, as low-bit types have them.
WIDE = {**RAW, "hidden_size": 256, "moe_intermediate_size": 256}


def draw(raw: dict[str, Any]) -> dict[str, torch.Tensor]:
    slots = plain_model(raw).weight_slots()
    randomize_(slots, raw["n_routed_experts"], seed=7)
    return {name: slot.clone() for name, slot in slots.items()}


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    return draw(RAW)


def as_floats(name: str) -> Type:
    del name
    return Type.F32


def as_released(name: str) -> Type:
    """The mix of the files that most people have."""
    if "_exps" in name:
        return Type.Q2_K if "down" in name else Type.IQ2_XXS
    if any(part in name for part in ("attn_q", "attn_kv", "attn_output", "shexp", "output.weight")):
        return Type.Q8_0
    return Type.F16


def as_large_mix(name: str) -> Type:
    """Everything in blocks, routers and embeddings too, differing by layer."""
    if "_exps" in name:
        return Type.Q5_0 if "blk.1" in name else Type.IQ4_NL
    if "hc_" in name or "ape" in name:
        return Type.F16
    return Type.BF16 if "compressor" in name and "blk.2" in name else Type.Q8_0


def load(path: Path, drafts: Path | None = None) -> DeepseekV4ForCausalLM:
    """Loads a file as the worker does."""
    weights = GgufWeights(path, drafts, pack=find_block_packer(1))
    model = DeepseekV4ForCausalLM(
        DeepseekV4Config.from_dict(read_gguf_config(path, drafts)),
        ops=get_reference_op,
        dtype=torch.float32,
        device="cpu",
        quantization=weights,
    )
    stored = read_gguf_tensors(path, drafts)
    load_model_weights(model, path, use_tqdm=False, stored=stored)
    weights.finish_loading()
    return model


def run(model: DeepseekV4ForCausalLM, chunks: list[int], native: int = 0) -> torch.Tensor:
    harness = PagedHarness(model, native=native)
    sequence = harness.add(random_tokens(sum(chunks), 11))
    return torch.cat([harness.step([(sequence, count)])[0] for count in chunks])


@pytest.mark.parametrize(
    ("raw", "kinds"), [(RAW, as_floats), (WIDE, as_released), (RAW, as_large_mix)]
)
def test_a_file_is_its_decoded_twin(raw: dict[str, Any], kinds: Any, tmp_path: Path) -> None:
    path, drafts = tmp_path / "v4.gguf", tmp_path / "mtp-v4.gguf"
    twin = write_v4(raw, draw(raw), path, kinds)
    model = load(path, drafts)
    config = DeepseekV4Config.from_dict(raw)
    assert model.config.layers == config.layers
    assert model.config.compress_rope == config.compress_rope
    plain = build_model(config, twin)
    chunks = [129, 1, 4]
    expected = run(plain, chunks)
    found = run(model, chunks)
    if kinds is as_floats:
        assert torch.equal(found, expected)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    native = run(model, chunks, native=1)
    torch.testing.assert_close(native, expected, atol=3e-4, rtol=1e-3)
    assert torch.equal(native, run(model, [134], native=2))
    token_ids = random_tokens(30, 5)
    both = (run_with_mtp(m, token_ids, [20, 9]) for m in (model, plain))
    for ours, theirs in zip(*both, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_without_its_second_file_it_drafts_nothing(
    tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    path, drafts = tmp_path / "v4.gguf", tmp_path / "mtp-v4.gguf"
    write_v4(RAW, tensors, path, as_floats)
    assert read_gguf_config(path)["num_nextn_predict_layers"] == 0
    assert load(path).mtp is None
    assert read_gguf_config(path, drafts)["num_nextn_predict_layers"] == 1
    with pytest.raises(ConfigError, match="holds no block that is served as one"):
        read_gguf_config(path, path)
    other = tmp_path / "other.gguf"
    write_v4({**RAW, "num_hidden_layers": 3}, tensors, other, as_floats)
    with pytest.raises(ConfigError, match=r"a model of 3 layers 64 wide, not of 4 layers 64 wide"):
        read_gguf_config(path, other.with_name("mtp-other.gguf"))


def test_a_block_without_a_number_is_the_same(
    tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    path = tmp_path / "v4.gguf"
    twin = write_v4(RAW, tensors, path, as_floats, is_numbered=False)
    found = load(path, tmp_path / "mtp-v4.gguf").weight_slots()
    assert set(found) == set(twin)
    assert all(torch.equal(slot, twin[name]) for name, slot in found.items())


def write_header(path: Path, architecture: str, **keys: Any) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in keys.items():
        writer.add_key_value(name.replace("__", "."), value, gguf.GGUFValueType.STRING)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_other_kinds_of_files_are_named(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    for kind, named in (("adapter", "LoRA"), ("mmproj", "vision"), ("imatrix", "importance")):
        path = write_header(tmp_path / f"{kind}.gguf", "llama", general__type=kind)
        with pytest.raises(UnsupportedModelError, match=named):
            read_gguf_config(path)
    path = write_header(tmp_path / "v41.gguf", "deepseek41")
    with pytest.raises(UnsupportedModelError, match="'deepseek41', which is not served from GGUF"):
        read_gguf_config(path)
    path = tmp_path / "v4.gguf"
    write_v4(RAW, tensors, path, as_floats)
    dspark = write_header(tmp_path / "dspark.gguf", "dflash")
    with pytest.raises(ConfigError, match="DSpark drafter, which is not served"):
        read_gguf_config(path, dspark)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"compress_ratios": [0, 4, 16, 4]}, r"compress_ratios is \[0, 4, 16, 4\]; allowed: 0, 4"),
        ({"compress_ratios": [0, 4]}, "4 integers of at least 0, one a layer"),
    ],
)
def test_keys_that_no_layer_could_have_are_named(
    change: dict[str, Any], message: str, tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    path = tmp_path / "v4.gguf"
    write_v4({**RAW, **change}, tensors, path, as_floats)
    with pytest.raises(ConfigError, match=message):
        read_gguf_config(path)


def test_an_engine_hits_to_the_unit_drafts_and_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    path, drafts = tmp_path / "v4.gguf", tmp_path / "mtp-v4.gguf"
    own = f"blk.{WIDE['num_hidden_layers']}."

    def with_other_drafts(name: str) -> Type:
        # Of a type that the model's file has not.
        return Type.Q5_0 if own in name and "_exps" in name else as_released(name)

    write_v4(WIDE, draw(WIDE), path, with_other_drafts)
    prompt, cache = random_tokens(150, 3), tmp_path / "cache"
    told, copies, loaded = [], [], []
    mtp = {"method": "mtp", "model": str(drafts)}
    monkeypatch.setattr(logging.getLogger(loader.__name__), "handlers", [caplog.handler])
    for speculative, folder in ((None, None), (None, cache), (mtp, cache), (mtp, cache)):
        caplog.clear()
        with LLM(
            str(path),
            skip_tokenizer_init=True,
            max_model_len=512,
            block_size=32,
            kv_cache_memory_bytes=1 << 25,
            speculative_config=speculative,
            weights_cache_dir=folder,
        ) as llm:
            params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
            first, again = (
                llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0]
                for _ in range(2)
            )
        assert again.num_cached_tokens == 128
        assert again.outputs[0].token_ids == first.outputs[0].token_ids
        told.append(list(first.outputs[0].token_ids))
        copies.append({own.name: own.stat().st_mtime_ns for own in cache.glob("*.panels")})
        (line,) = {line for line in caplog.messages if line.startswith("Loaded ")}
        loaded.append(float(line.split(" (")[1].split()[0]))
    assert told == [told[0]] * 4
    # The third start adds its block's file, and the last one needs neither of both anew.
    assert [len(own) for own in copies] == [0, 1, 2, 2]
    assert copies[1].items() < copies[2].items()
    assert copies[3] == copies[2]
    assert loaded[0] == loaded[1] > loaded[2] > loaded[3]
