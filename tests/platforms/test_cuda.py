"""The CUDA platform, as far as a machine without a GPU can show it."""

import pytest
import torch
from triton.runtime import driver

from vllm.config import CacheConfig, ModelConfig, VllmConfig
from vllm.exceptions import ConfigError
from vllm.platforms.cuda import CudaPlatform
from vllm.v1.attention.ops.registry import get_reference_op

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


def test_inputs_of_two_bytes_are_told_as_what_they_are(caplog: pytest.LogCaptureFixture) -> None:
    model = ModelConfig("m", dtype="float16", quantized_inputs="int16")
    updated = CudaPlatform().check_and_update_config(VllmConfig(model_config=model))
    assert updated.model_config.quantized_inputs == "exact"
    assert "on a GPU inputs stay exact" in caplog.text


def test_without_a_compiler_of_c_the_log_says_what_kernels_need(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Driver:
        @property
        def utils(self) -> None:
            raise RuntimeError("Failed to find C compiler.")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(driver, "_active", Driver())
    platform = CudaPlatform()
    assert platform.get_op("rms_norm") is get_reference_op("rms_norm")
    assert "Failed to find C compiler." in caplog.text
    assert "gcc and python3-dev" in caplog.text
