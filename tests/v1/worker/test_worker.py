"""The worker's own decisions; a whole life is in the executor's tests."""

from typing import Any

import pytest
import torch

from vllm.config import (
    CacheConfig,
    ModelConfig,
    VllmConfig,
)
from vllm.exceptions import CheckpointError, ConfigError
from vllm.model_executor.model_loader.resolve import read_hf_config, resolve_checkpoint
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.worker.worker import Worker


class OneThread(CpuPlatform):
    """Asks for a number of threads that no default would be."""

    def default_num_threads(self) -> int | None:
        return 1


def make_config(dtype: str = "float32") -> VllmConfig:
    checkpoint = resolve_checkpoint("deepseek-v4")
    model = ModelConfig(
        "deepseek-v4", path=checkpoint.path, hf_config=read_hf_config(checkpoint.path), dtype=dtype
    )
    return VllmConfig(model_config=model, cache_config=CacheConfig(block_size=32))


def test_specs_are_known_before_the_model_is_loaded() -> None:
    config = make_config("bfloat16")
    specs = Worker(config, CpuPlatform()).get_kv_cache_specs()
    assert specs["layers.0.attn.window"].dtype is torch.bfloat16
    states = [spec for name, spec in specs.items() if name.endswith("state")]
    assert states
    assert all(spec.dtype is torch.float32 for spec in states)
    config.cache_config.cache_dtype = "float16"
    specs = Worker(config, CpuPlatform()).get_kv_cache_specs()
    assert specs["layers.0.attn.window"].dtype is torch.float16
    config.cache_config.cache_dtype = "int8"
    with pytest.raises(ConfigError, match=r"int8 keeps keys and values by head.*latent rows"):
        Worker(config, CpuPlatform()).get_kv_cache_specs()


def test_an_unresolved_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match="'auto'"):
        Worker(make_config("auto"), CpuPlatform())


def test_threads_follow_the_platform() -> None:
    before = torch.get_num_threads()
    try:
        Worker(make_config(), OneThread()).init_device()
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_weights_that_are_not_there_are_named(tmp_path) -> None:
    config = make_config()
    config.model_config.path = str(tmp_path)
    worker = Worker(config, OneThread())
    before = torch.get_num_threads()
    try:
        worker.init_device()
        with pytest.raises(CheckpointError, match=str(tmp_path)):
            worker.load_model()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("said", ["", "Unable to allocate 9 GiB for an array"])
def test_a_host_without_room_is_told_by_the_kind_of_error(
    said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise MemoryError(said)

    worker = Worker(make_config(), CpuPlatform())
    worker.init_device()
    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(ConfigError, match=f"do not fit in the memory of cpu: {said or 'it gives'}"):
        worker.build_model()
