"""The CPU's memory, threads and pool."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf  # an oracle of the tests, in requirements/dev.txt
import numpy as np
import pytest
import torch

from vllm.config import (
    CacheConfig,
    LoadConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.exceptions import ConfigError
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.cuda import CudaReferencePlatform
from vllm_ascend.platform import ReferencePlatform

GIB = 1 << 30


class HostWith(CpuPlatform):
    def __init__(self, free_bytes: int) -> None:
        self._free = free_bytes

    def free_memory_bytes(self) -> int:
        return self._free


@pytest.mark.parametrize(
    ("free", "expected"), [(8 * GIB, 2 * GIB), (16 * GIB, 4 * GIB), (500 * GIB, 4 * GIB)]
)
def test_kv_pool_is_a_quarter_of_free_memory_up_to_4_gib(
    free: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    assert HostWith(free).default_kv_cache_bytes(VllmConfig()) == expected


def test_a_derived_pool_is_shared_by_the_cores_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    pair = VllmConfig(parallel_config=ParallelConfig(data_parallel_size=2))
    assert HostWith(8 * GIB).default_kv_cache_bytes(pair) == GIB
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "0.5")
    assert HostWith(8 * GIB).default_kv_cache_bytes(pair) == GIB // 2


def test_kv_pool_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "0.5")
    assert HostWith(8 * GIB).default_kv_cache_bytes(VllmConfig()) == GIB // 2
    exact = VllmConfig(cache_config=CacheConfig(kv_cache_memory_bytes=77))
    assert HostWith(8 * GIB).default_kv_cache_bytes(exact) == 77


def test_threads_are_left_alone_when_the_user_set_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert CpuPlatform().default_num_threads() is None
    monkeypatch.delenv("OMP_NUM_THREADS")
    threads = CpuPlatform().default_num_threads()
    assert threads is not None
    assert threads >= 1


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_pool_is_zero_aligned_and_costs_nothing_until_written() -> None:
    before = resident_bytes()
    pool = CpuPlatform().allocate_kv_pool(1024, 1 << 20, torch.device("cpu"))
    assert pool.shape == (1024, 1 << 20)
    assert pool.dtype == torch.uint8
    assert pool.data_ptr() % 64 == 0
    assert pool.is_contiguous()
    assert resident_bytes() - before < 64 << 20
    assert not pool[5].any()
    pool[5] = 1
    assert int(pool[5].sum()) == 1 << 20


def write_file(
    path: Path, *values: np.ndarray, kind: gguf.GGMLQuantizationType | None = None
) -> VllmConfig:
    """Write a file of one matrix, and of others that are plain; return what serves it."""
    writer = gguf.GGUFWriter(path, "qwen3")
    for i, each in enumerate(values):
        writer.add_tensor(f"{i}.weight", each, raw_dtype=None if i else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return VllmConfig(model_config=ModelConfig(str(path), hf_config={"model_type": "qwen3"}))


def test_rows_of_a_file_of_codes_are_halves(tmp_path: Path) -> None:
    def choose(config: VllmConfig) -> str:
        return CpuPlatform().check_and_update_config(config).cache_config.cache_dtype

    kind = gguf.GGMLQuantizationType.Q4_0
    codes = np.zeros((8, 18), np.uint8)  # 256 values
    coded = write_file(tmp_path / "a.gguf", codes, np.zeros(255, np.float32), kind=kind)
    assert choose(coded) == "float16"
    assert coded.cache_config.cache_dtype == "auto"
    # As many plain values as coded ones.
    assert choose(write_file(tmp_path / "b.gguf", codes, np.zeros(256, np.float32), kind=kind)) == (
        "auto"
    )
    assert choose(write_file(tmp_path / "c.gguf", np.zeros(256, np.float16))) == "auto"
    said = CacheConfig(cache_dtype="float32")
    assert choose(replace(coded, cache_config=said)) == "float32"
    coded.model_config.dtype = "bfloat16"
    assert choose(coded) == "auto"
    coded.model_config.dtype = "float32"
    assert choose(coded) == "float16"
    assert choose(replace(coded, load_config=LoadConfig(load_format="dummy"))) == "auto"


def test_a_file_that_memory_cannot_hold_is_refused_by_its_header(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # 3 MiB of halves, which are widened.
    config = write_file(tmp_path / "model.gguf", np.zeros((1024, 1536), np.float16))
    platform = CpuPlatform()
    monkeypatch.setattr(CpuPlatform, "total_memory_bytes", lambda self: 6 << 20)
    platform.check_and_update_config(config)
    monkeypatch.setattr(CpuPlatform, "total_memory_bytes", lambda self: (6 << 20) - 1)
    with pytest.raises(ConfigError, match=r"model\.gguf take at least 0\.0 GiB, and this machine"):
        platform.check_and_update_config(config)
    # Random weights come from no file.
    dummy = replace(config, load_config=LoadConfig(load_format="dummy"))
    platform.check_and_update_config(dummy)


def test_prompts_share_a_step_as_long_as_it_stays_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2,1")

    def choose(
        hf_config: dict[str, Any], most: int | None = None, threshold: int = 0
    ) -> int | None:
        model, scheduler = ModelConfig("m", hf_config=hf_config), SchedulerConfig()
        scheduler.joint_prompt_tokens = most
        scheduler.long_prefill_token_threshold = threshold
        config = VllmConfig(model_config=model, scheduler_config=scheduler)
        found = CpuPlatform().check_and_update_config(config).scheduler_config
        assert scheduler.joint_prompt_tokens == most
        return found.joint_prompt_tokens

    assert choose({"model_type": "qwen3"}) == 128
    assert choose({"model_type": "qwen3"}, most=5) == 5
    # Long prompts are cut, so that others go on beside them.
    assert choose({"model_type": "qwen3"}, threshold=256) is None
    # Of a step's tokens each expert gets few.
    assert choose({"model_type": "qwen3_moe", "num_experts": 128}) is None
    assert choose({"text_config": {"num_local_experts": 8}}) is None
    assert choose({"text_config": {"num_local_experts": None}}) == 128


def test_drafts_are_made_unasked_by_one_workers_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(num_workers: int = 1) -> SpeculativeConfig | None:
        parallel = ParallelConfig(tensor_parallel_size=num_workers)
        return CpuPlatform().default_drafts(VllmConfig(parallel_config=parallel))

    monkeypatch.setenv("VLLM_UNASKED_DRAFTS", "1")
    assert choose() == SpeculativeConfig.unasked()
    # What stands in for another device runs none of them.
    for platform in (CudaReferencePlatform(), ReferencePlatform()):
        assert platform.default_drafts(VllmConfig()) is None
    assert choose(num_workers=2) is None
    for name in ("VLLM_NATIVE", "VLLM_UNASKED_DRAFTS"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "0")
            assert choose() is None
