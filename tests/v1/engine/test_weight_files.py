"""What names a checkpoint by its weights, over every kind of file that loads."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.model_executor.model_loader.gguf_files import Type, write_gguf
from tests.model_executor.model_loader.packed_formats import FORMATS, write_quantised
from tests.model_executor.models.decoder.reference import build_hf_model, qwen3
from tests.tokenizers.family_tokenizers import byte_level
from tests.v1.executor.rank_engines import run_engine
from vllm.distributed.kv_transfer.handover.fingerprint import fingerprint_weights
from vllm.exceptions import ConfigError
from vllm.model_executor.model_loader.checkpoint_files import find_weight_files
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.engine.engine_args import EngineArgs

RAW = qwen3(vocab_size=byte_level().vocab_size, hidden_size=256, intermediate_size=256, head_dim=64)
KINDS = ["single", "shards", "bare shards", "gguf", "split gguf", "awq", "fp8", "nf4", "llm-int8"]
TYPES = [Type.Q4_K, Type.Q8_0, Type.Q4_1]


def write_kind(kind: str, folder: Path) -> Path:
    """Write a checkpoint of a kind of file; returns what `vllm serve` is given."""
    state = dict(build_hf_model(RAW, seed=7).state_dict())
    state.pop("lm_head.weight", None)
    folder.mkdir()
    names = list(state)
    if kind == "gguf":
        write_gguf("qwen3", RAW, state, folder / "model.gguf", TYPES, byte_level())
        return folder / "model.gguf"
    if kind == "split gguf":
        parts = [folder / f"model-0000{number}-of-00002.gguf" for number in (1, 2)]
        for part, own in zip(parts, (names[:9], names[9:]), strict=True):
            write_gguf("qwen3", RAW, {n: state[n] for n in own}, part, TYPES, byte_level())
        return parts[0]
    if kind in FORMATS:
        write_quantised(FORMATS[kind], RAW, state, folder)
    else:
        write_plain(kind, state, folder)
    (folder / "tokenizer.json").write_text(byte_level().backend.to_str(), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(byte_level().template_tokens))
    return folder


def write_plain(kind: str, state: dict[str, torch.Tensor], folder: Path) -> None:
    names = list(state)
    (folder / "config.json").write_text(json.dumps(RAW))
    files = {"model.safetensors": names}
    if kind != "single":
        shards = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
        files = dict(zip(shards, (names[:9], names[9:]), strict=True))
    for file, own in files.items():
        save_file({name: state[name].contiguous() for name in own}, folder / file)
    if kind == "shards":
        where = {name: file for file, own in files.items() for name in own}
        index = json.dumps({"metadata": {}, "weight_map": where})
        (folder / "model.safetensors.index.json").write_text(index)


def answer(model: Path, folder: Path | None, **options: Any) -> tuple[list[list[int]], list[int]]:
    """Two prompts' greedy answers and hits, by an engine with or without a folder."""
    rng = random.Random(21)
    prompts = [[rng.randrange(5, RAW["vocab_size"]) for _ in range(n)] for n in (100, 333)]
    arguments: dict[str, Any] = {
        "model": str(model),
        "block_size": 32,
        "max_model_len": 512,
        "kv_cache_memory_bytes": 8 << 20,
        **options,
    }
    if folder is not None:
        tier = {"type": "fs", "root_dir": str(folder), "max_size": "64MiB"}
        arguments["kv_transfer_config"] = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"secondary_tiers": [tier], "always_restore": True},
        }
    return run_engine(prompts, **arguments)


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_on_disk_serves_the_next_engine(kind: str, tmp_path: Path) -> None:
    model = write_kind(kind, tmp_path / "checkpoint")
    expected, _ = answer(model, None)
    for expected_hits in ([0, 0], [96, 320]):
        assert answer(model, tmp_path / "cache") == (expected, expected_hits)


def test_rounded_inputs_have_rows_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, folder = write_kind("gguf", tmp_path / "checkpoint"), tmp_path / "cache"
    assert answer(model, folder)[1] == [0, 0]
    rounded, hits = answer(model, folder, quantized_inputs="int8")
    assert hits == [0, 0]
    monkeypatch.setenv("VLLM_CPU_INT4_W4A8", "1")
    assert answer(model, folder) == (rounded, [96, 320])
    assert answer(model, folder, quantized_inputs="exact")[1] == [96, 320]


@pytest.mark.parametrize("kind", KINDS)
def test_a_fingerprint_tells_weights_apart(kind: str, tmp_path: Path) -> None:
    def take(path: Path) -> str:
        return fingerprint_weights(EngineArgs(model=str(path)).create_vllm_config())

    model = write_kind(kind, tmp_path / "one")
    before = take(model)
    other = tmp_path / "two"
    shutil.copytree(tmp_path / "one", other)
    copy = other if model.is_dir() else other / model.name
    assert take(copy) == before
    last = find_weight_files(copy)[-1]
    data = bytearray(last.read_bytes())
    # Samples are of 4 kB: some lie in the last 64.
    for at in range(len(data) - (64 << 10), len(data), 2048):
        data[at] ^= 1
    last.write_bytes(data)
    assert take(copy) != before


def test_a_split_file_is_taken_from_its_packed_copy(tmp_path: Path) -> None:
    model, cache = write_kind("split gguf", tmp_path / "checkpoint"), tmp_path / "cache"
    expected = answer(model, None)
    written = []
    for _ in range(2):
        assert answer(model, None, weights_cache_dir=str(cache)) == expected
        written.append([path.stat() for path in cache.glob("*.panels")])
    # It is as it was: read, not written anew.
    assert len(written[0]) == 1
    assert [own.st_mtime_ns for own in written[0]] == [own.st_mtime_ns for own in written[1]]


def test_what_cannot_start_is_refused_with_the_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plain = (write_kind(kind, tmp_path / kind) for kind in ("gguf", "single"))
    with pytest.raises(ConfigError, match="weights_cache_dir='packed' keeps the packed weights"):
        EngineArgs(model=str(plain), weights_cache_dir="packed").create_vllm_config()
    monkeypatch.setattr(CpuPlatform, "total_memory_bytes", lambda self: 1000)
    with pytest.raises(
        ConfigError, match=r"model\.gguf take at least .* this machine has 0\.0 GiB"
    ):
        EngineArgs(model=str(model)).create_vllm_config()
