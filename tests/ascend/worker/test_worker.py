"""Ascend's worker: pages, names, the profile run, and what a fake ``torch.npu`` is asked."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ascend.rounding import round_key
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.exceptions import ConfigError
from vllm.model_executor.model_loader.resolve import read_hf_config, resolve_checkpoint
from vllm.v1.attention.ops.registry import get_reference_op
from vllm.v1.core.layout.packing import build_packed_tensors, group_for_packing
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheTensor
from vllm.v1.worker.kv_cache_tensors import allocate_kv_cache
from vllm_ascend.core.specs import Generation
from vllm_ascend.envs import GRAPH_VARIABLE
from vllm_ascend.ops.row_formats import E4M3
from vllm_ascend.platform import NPUPlatform, ReferencePlatform
from vllm_ascend.worker.decode_graphs import DecodeGraphs
from vllm_ascend.worker.worker import NPUWorker

CPU = torch.device("cpu")
GIB = 1 << 30


class FakeDevice:
    """Plays the memory part of ``torch.npu`` and records what it is asked."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def mem_get_info(self) -> tuple[int, int]:
        self.calls.append("mem_get_info")
        return 3 * GIB, 4 * GIB

    def memory_reserved(self) -> int:
        return GIB // 2

    def memory_stats(self) -> dict[str, Any]:
        self.calls.append("memory_stats")
        return {"allocated_bytes.all.peak": GIB}

    def reset_peak_memory_stats(self) -> None:
        self.calls.append("reset_peak_memory_stats")

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    def empty_cache(self) -> None:
        self.calls.append("empty_cache")


class HalfNPU(ReferencePlatform):
    """CPU tensors under the name of an NPU, so that the worker takes the device's ways.

    Args:
        device: Plays ``torch.npu``.
    """

    device_type = "npu"

    def __init__(self, device: Any) -> None:
        self._device = device

    def device_api(self) -> Any:
        return self._device


class A5(ReferencePlatform):
    def generation(self) -> Generation:
        return Generation.A5


def make_worker(
    platform: ReferencePlatform, cache_dtype: str = "auto", changes: dict[str, Any] | None = None
) -> NPUWorker:
    checkpoint = resolve_checkpoint("deepseek-v4")
    model = ModelConfig(
        "deepseek-v4",
        path=checkpoint.path,
        hf_config=read_hf_config(checkpoint.path) | (changes or {}),
        dtype="float32",
        max_model_len=512,
    )
    return NPUWorker(
        VllmConfig(
            model_config=model,
            cache_config=CacheConfig(
                block_size=32, cache_dtype=cache_dtype, gpu_memory_utilization=0.8
            ),
            scheduler_config=SchedulerConfig(
                max_model_len=512, max_num_batched_tokens=300, max_num_seqs=4
            ),
        ),
        platform,
    )


def test_two_byte_pages_are_the_devices() -> None:
    specs = make_worker(ReferencePlatform(), "bfloat16").get_kv_cache_specs()
    indexer = specs["layers.2.attn.indexer"]
    # 32 rows of 32 int8 values and an fp16 scale.
    assert (indexer.dtype, indexer.page_size_bytes) == (torch.int8, 32 * (32 + 2))
    assert specs["layers.2.attn.mla"].dtype is torch.bfloat16
    assert specs["layers.2.attn.indexer_state"].page_size_bytes == indexer.page_size_bytes
    floats = make_worker(ReferencePlatform()).get_kv_cache_specs()
    assert floats["layers.2.attn.indexer"].dtype is torch.float32


def test_a5_pages_are_fp8() -> None:
    specs = make_worker(A5(), "fp8").get_kv_cache_specs()
    indexer, window = specs["layers.2.attn.indexer"], specs["layers.0.attn.window"]
    # 32 rows of 32 values and an fp32 scale; of 64 bytes and 16 rotary values in bf16.
    assert (indexer.dtype, indexer.page_size_bytes) == (E4M3, 32 * (32 + 4))
    assert (window.dtype, window.page_size_bytes) == (E4M3, 32 * (64 + 2 * 16))
    assert specs["layers.2.attn.mla"].page_size_bytes == window.page_size_bytes
    # The C128 state's block is half of an A3's.
    assert specs["layers.3.attn.state"].block_size == 32 // 8


def test_an_a5s_model_gets_its_page_ops() -> None:
    worker = make_worker(A5(), "fp8")
    resolve = worker._make_op_resolver()
    cache = torch.zeros(2, 32, 96, dtype=torch.int8).view(E4M3)
    values = torch.randn(1, 64)
    assert torch.equal(resolve("round_rows")(cache, values), round_key(values, 16).float())
    assert resolve("attend") is get_reference_op("attend")


def test_float_pages_suit_models_that_fp8_pages_do_not() -> None:
    def make(cache_dtype: str) -> NPUWorker:
        # Keys have 64 + 2 * 16 bytes, index keys as many: 92 + 4.
        return make_worker(A5(), cache_dtype, {"index_head_dim": 92})

    with pytest.raises(ConfigError, match="--kv-cache-dtype float32"):
        make("fp8")._make_op_resolver()
    make("float32")._make_op_resolver()


def test_pages_are_strided_views_of_raw_int8() -> None:
    platform = ReferencePlatform()
    specs = make_worker(platform, "bfloat16").get_kv_cache_specs()
    groups = group_for_packing(specs)
    num_blocks, tensors = build_packed_tensors(groups, 0, 5)
    config = KVCacheConfig(num_blocks, tensors, groups)
    pool = allocate_kv_cache(config, specs, platform, CPU)
    (raw,) = pool.tensors
    assert raw.dtype is torch.int8
    (tensor,) = tensors
    for name, view in pool.layers.items():
        raw.zero_()
        view[3] = 1
        row = raw[3].nonzero().flatten()
        begin = tensor.offsets[name]
        page = specs[name].real_page_size_bytes
        assert begin <= int(row.min()) <= int(row.max()) < begin + page, name
        assert not raw[[0, 1, 2, 4]].any()
        assert view.stride(0) * view.element_size() == tensor.block_stride
    platform.copy_blocks(pool.tensors, [(3, 1), (1, 3)])
    assert raw[1].any()
    assert not raw[3].any()


def test_names_that_do_not_match_are_listed() -> None:
    platform = ReferencePlatform()
    specs = make_worker(platform).get_kv_cache_specs()
    groups = group_for_packing(specs)
    num_blocks, tensors = build_packed_tensors(groups, 0, 3)
    expected = [*list(specs)[1:], "layers.9.attn.window"]
    with pytest.raises(
        ConfigError,
        match=r"1 missing: layers\.9\.attn\.window; 1 extra: layers\.0\.attn\.window",
    ):
        allocate_kv_cache(KVCacheConfig(num_blocks, tensors, groups), expected, platform, CPU)


def test_a_tensor_that_nobody_shares_takes_no_memory() -> None:
    platform = ReferencePlatform()
    specs = make_worker(platform).get_kv_cache_specs()
    groups = group_for_packing(specs)
    num_blocks, tensors = build_packed_tensors(groups, 0, 3)
    config = KVCacheConfig(num_blocks, [*tensors, KVCacheTensor(3 << 40, [])], groups)
    assert len(allocate_kv_cache(config, specs, platform, CPU).tensors) == 1


@pytest.mark.slow
def test_available_memory_by_a_profile_run() -> None:
    npu = FakeDevice()
    threads = torch.get_num_threads()
    try:
        worker = make_worker(HalfNPU(npu), "bfloat16")
        worker.init_device()
        assert npu.calls == ["mem_get_info"]  # the snapshot, before anything is loaded
        worker.load_model()
        npu.calls.clear()
        available = worker.determine_available_memory()
    finally:
        torch.set_num_threads(threads)
    assert npu.calls == [
        "reset_peak_memory_stats",
        "synchronize",
        "memory_stats",
        "empty_cache",
        "mem_get_info",
    ]
    # 0.8 of 4 GiB, less a peak of 1 GiB and the half GiB that others hold.
    assert available == int(0.8 * 4 * GIB) - GIB - GIB // 2


@pytest.mark.slow
def test_graphs_behind_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    try:
        for platform, eager in (
            (HalfNPU(FakeDevice()), False),
            (HalfNPU(FakeDevice()), True),
            (ReferencePlatform(), False),
        ):
            worker = make_worker(platform, "bfloat16")
            worker._config.model_config.enforce_eager = eager
            worker.init_device()
            worker.load_model()
            groups = group_for_packing(worker.get_kv_cache_specs())
            num_blocks, tensors = build_packed_tensors(groups, 0, 9)
            config = KVCacheConfig(num_blocks, tensors, groups)
            monkeypatch.setenv(GRAPH_VARIABLE, "1")
            if platform.device_type == "npu":
                worker.initialize_from_config(config)
                assert isinstance(worker._model, DecodeGraphs) is not eager
            else:
                with pytest.raises(ConfigError, match=GRAPH_VARIABLE):
                    worker.initialize_from_config(config)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.slow
def test_selecting_a_device_in_order() -> None:
    """In a process of its own: torch's name for the device cannot be given back."""
    code = """
import torch
from vllm.exceptions import ConfigError
from vllm_ascend.ops.row_formats import E4M3
from vllm_ascend.platform import NPUPlatform
torch.utils.rename_privateuse1_backend("npu")
calls = []
class Fake:
    device_count = staticmethod(lambda: 2)
    set_device = staticmethod(lambda device: calls.append(f"set_device {device}"))
    empty_cache = staticmethod(lambda: calls.append("empty_cache"))
torch.npu = Fake
assert NPUPlatform().make_device(1) == torch.device("npu", 1)
assert calls == ["set_device npu:1", "empty_cache"], calls
try:
    NPUPlatform().make_device(2)
except ConfigError as error:
    assert "ASCEND_RT_VISIBLE_DEVICES" in str(error), error
else:
    raise AssertionError
"""
    root = Path(__file__).parents[3]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root, timeout=60)


class Driver:
    """Plays what ``torch.npu`` tells without touching a device."""

    def __init__(self, name: str, count: int) -> None:
        self._name, self._count = name, count

    def device_count(self) -> int:
        return self._count

    def get_device_name(self, index: int) -> str:
        assert 0 <= index < self._count
        return self._name


class DrivenNPU(NPUPlatform):
    """The NPU's platform over a pretended driver."""

    def __init__(self, name: str, count: int = 1) -> None:
        self._driver = Driver(name, count)

    def device_api(self) -> Any:
        return self._driver


def test_the_npus_names_and_limits() -> None:
    platform = DrivenNPU("Ascend910B3")
    assert platform.device_type == "npu"
    assert (platform.ray_device_key, platform.dist_backend) == ("NPU", "hccl")
    assert platform.device_control_env_var == "ASCEND_RT_VISIBLE_DEVICES"
    assert platform.generation() is Generation.A2_A3
    assert DrivenNPU("Ascend950DT").generation() is Generation.A5
    assert not platform.has_float_pages


def test_no_visible_npu_is_said_before_anything_else() -> None:
    with pytest.raises(ConfigError, match=r"worker 0 .* 0 are visible .*ASCEND_RT_VISIBLE_DEVICES"):
        DrivenNPU("", count=0).generation()


def test_worker_starts_need_a_device_of_their_own() -> None:
    with pytest.raises(ConfigError, match="worker 1 needs its own NPU, but 1 are visible"):
        DrivenNPU("Ascend910B3").make_device(1)
