"""The CUDA platform, as far as a machine without a GPU can show it."""

import pytest
import torch

from vllm.config import CacheConfig, VllmConfig
from vllm.exceptions import ConfigError
from vllm.platforms.cuda import CudaPlatform

GIB = 1 << 30


def test_a_worker_without_its_gpu_is_refused() -> None:
    rank = torch.cuda.device_count()
    with pytest.raises(ConfigError, match=f"worker {rank} needs its own GPU, but {rank} are"):
        CudaPlatform().make_device(rank)


def test_memory_that_torch_holds_unused_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (60 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 15 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 5 * GIB)
    platform = CudaPlatform()
    assert platform.total_memory_bytes() == 80 * GIB
    assert platform.free_memory_bytes() == 70 * GIB
    config = VllmConfig(cache_config=CacheConfig(gpu_memory_utilization=0.5))
    assert platform.default_kv_cache_bytes(config) == 30 * GIB
