"""Defaults that hold on any platform."""

from dataclasses import replace

import pytest

from vllm.config import CacheConfig, DeviceConfig, ModelConfig, VllmConfig
from vllm.exceptions import ConfigError
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.cuda import CudaPlatform, CudaReferencePlatform
from vllm.platforms.interface import Platform
from vllm_ascend.platform import NPUPlatform, ReferencePlatform

GIB = 1 << 30


class SizedPlatform(Platform):
    """A device of 80 GiB with 70 free."""

    device_type = "sized"
    device_name = "sized"

    def make_device(self, local_rank: int):
        raise AssertionError("not asked for here")

    def total_memory_bytes(self) -> int:
        return 80 * GIB

    def free_memory_bytes(self) -> int:
        return 70 * GIB


def test_ops_come_from_the_reference_and_unknown_ones_are_named() -> None:
    platform = CpuPlatform()
    assert platform.get_op("rms_norm").__name__ == "rms_norm"
    with pytest.raises(ConfigError, match="flash_everything"):
        platform.get_op("flash_everything")


def test_config_is_filled_in_without_touching_the_argument() -> None:
    config = VllmConfig(model_config=ModelConfig("m", dtype="auto", max_model_len=-1))
    updated = CpuPlatform().check_and_update_config(config)
    assert updated.model_config.dtype == "float32"
    assert updated.device_config.device == "cpu"
    assert updated.model_config.original_max_model_len == -1
    assert config.model_config.dtype == "auto"
    assert config.device_config.device == "auto"
    assert updated.cache_config is config.cache_config
    again = CpuPlatform().check_and_update_config(updated)
    assert again.model_config is updated.model_config


def test_an_explicit_dtype_stays() -> None:
    config = VllmConfig(model_config=ModelConfig("m", dtype="bfloat16"))
    assert CpuPlatform().check_and_update_config(config).model_config.dtype == "bfloat16"


def test_a_default_is_asked_for_only_where_it_counts() -> None:
    class Asked(SizedPlatform):
        def default_dtype(self, config: VllmConfig) -> str:
            raise AssertionError("a card may be looked at, and a warning logged")

    config = VllmConfig(model_config=ModelConfig("m", dtype="bfloat16"))
    assert Asked().check_and_update_config(config).model_config.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("option", "variable", "expected"),
    [
        ("auto", None, "exact"),
        ("auto", "1", "int8"),
        ("auto", "0", "exact"),
        ("exact", "1", "exact"),
        ("int8", "0", "int8"),
        ("int16", "1", "int16"),
        ("int8", None, "int8"),
    ],
)
def test_the_variable_says_what_automatic_inputs_are_and_a_flag_outdoes_it(
    option: str, variable: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_CPU_INT4_W4A8", raising=False)
    if variable is not None:
        monkeypatch.setenv("VLLM_CPU_INT4_W4A8", variable)
    config = VllmConfig(model_config=ModelConfig("m", quantized_inputs=option))
    for platform in (CpuPlatform(), SizedPlatform()):
        updated = platform.check_and_update_config(
            replace(config, device_config=DeviceConfig("auto"))
        )
        assert updated.model_config.quantized_inputs == expected


def test_another_device_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'cuda' was asked for.*'cpu'"):
        CpuPlatform().check_and_update_config(VllmConfig(device_config=DeviceConfig("cuda")))


@pytest.mark.parametrize(
    ("declared", "expected"),
    [("bfloat16", "bfloat16"), ("float16", "float16"), (None, "bfloat16"), ("fp8", "bfloat16")],
)
def test_auto_dtype_off_the_cpu_follows_the_checkpoint(declared, expected) -> None:
    model = ModelConfig("m", hf_config={"torch_dtype": declared})
    assert SizedPlatform().default_dtype(VllmConfig(model_config=model)) == expected


def test_kv_memory_is_the_share_less_what_is_used() -> None:
    platform = SizedPlatform()
    half = VllmConfig(cache_config=CacheConfig(gpu_memory_utilization=0.5))
    assert platform.default_kv_cache_bytes(half) == 30 * GIB
    tiny = VllmConfig(cache_config=CacheConfig(gpu_memory_utilization=0.1))
    assert platform.default_kv_cache_bytes(tiny) == 0
    exact = VllmConfig(cache_config=CacheConfig(kv_cache_memory_bytes=123))
    assert platform.default_kv_cache_bytes(exact) == 123


def test_kernels_of_accelerators_read_no_panels_in_reference_mode_either() -> None:
    assert CpuPlatform.reads_panels
    for platform in (CudaPlatform, CudaReferencePlatform, NPUPlatform, ReferencePlatform):
        assert not platform.reads_panels
