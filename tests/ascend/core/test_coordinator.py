"""Registration, keyword arguments and refusals of Ascend's coordinator and manager."""

from dataclasses import replace

import pytest
import torch
from vllm.v1.core.coordinator_registry import find_coordinator
from vllm.v1.core.unit_groups import DenseGroup, WindowGroup
from vllm_ascend.core.coordinator import AscendHybridKVCacheCoordinator

from tests.ascend.v4_models import DEVICE_PAGES, v4_config
from vllm.exceptions import ConfigError
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_coordinator import get_kv_cache_coordinator
from vllm.v1.core.layout.packing import build_packed_tensors, group_hybrid_mla_specs
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import KVCacheConfig, MLAAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm_ascend.core.managers import CompressAttentionManager
from vllm_ascend.core.specs import CompressAttentionSpec, ascend_kv_cache_specs
from vllm_ascend.platform import ReferencePlatform

ARGUMENTS = {
    "max_model_len": 1024,
    "max_num_batched_tokens": 256,
    "use_eagle": False,
    "enable_caching": True,
    "enable_kv_cache_events": False,
    "dcp_world_size": 1,
    "pcp_world_size": 1,
    "scheduler_block_size": 32,
    "hash_block_size": 32,
}


@pytest.fixture(autouse=True)
def _registered() -> None:
    register_all_kvcache_specs(None)
    platform = ReferencePlatform()
    for _ in range(2):  # equal registrations repeat without harm
        platform.register_custom_kv_cache_specs(None)
        platform.register_kv_cache_coordinators()


def make_config() -> KVCacheConfig:
    """Groups as the worker has them: C4 and its state hold layers of unequal pages."""
    specs = ascend_kv_cache_specs(v4_config([0, 4, 128, 4]), 32, DEVICE_PAGES)
    groups = group_hybrid_mla_specs(specs)
    blocks, tensors = build_packed_tensors(groups, 0, 64)
    return KVCacheConfig(blocks, tensors, groups, hit_unit=32)


def test_groups_are_unpacked_dense_and_sparse() -> None:
    coordinator = get_kv_cache_coordinator(kv_cache_config=make_config(), **ARGUMENTS)
    assert isinstance(coordinator, AscendHybridKVCacheCoordinator)
    assert [g.geometry.block_size for g in coordinator.dense] == [128, 4096]
    assert all(isinstance(g, DenseGroup) for g in coordinator.dense)
    assert [g.geometry.block_size for g in coordinator.windows][-2:] == [2, 8]
    assert all(isinstance(g, WindowGroup) for g in coordinator.windows)
    assert coordinator.geometry.unit == 32
    assert coordinator.kept_block_mask(0, 352) == [True] * 3
    window = coordinator.windows[0].geometry.group_id
    assert coordinator.kept_block_mask(window, 352) == [False] * 4 + [True] * 7
    assert not coordinator.use_mtp


def test_mtp_keeps_more_window_blocks() -> None:
    with_mtp = get_kv_cache_coordinator(
        kv_cache_config=make_config(), **{**ARGUMENTS, "use_eagle": True}
    )
    window = with_mtp.windows[0].geometry.group_id
    assert with_mtp.kept_block_mask(window, 352) == [False] * 3 + [True] * 8


def test_the_retention_interval_reaches_the_masks() -> None:
    config = replace(make_config(), prefix_cache_retention_interval="128")
    coordinator = get_kv_cache_coordinator(kv_cache_config=config, **ARGUMENTS)
    c4, *_, c4_state, _ = range(len(coordinator.geometry.groups))
    assert coordinator.kept_block_mask(c4, 640) == [True] * 5
    window = coordinator.windows[0].geometry.group_id
    assert coordinator.kept_block_mask(window, 640) == [True] * 20
    kept = [i for i, is_kept in enumerate(coordinator.kept_block_mask(c4_state, 640)) if is_kept]
    # 608 is the resend's boundary; below each the four rows of the window before.
    ends = (128, 256, 384, 512, 608, 640)
    assert kept == [block for end in ends for block in range(end // 2 - 2, end // 2)]


def test_other_configurations_keep_the_cores_coordinators() -> None:
    config = make_config()
    assert find_coordinator(config, True).name == "ascend_hybrid"
    assert find_coordinator(replace(config, hit_unit=None), True).name != "ascend_hybrid"
    windows_only = replace(config, kv_cache_groups=config.kv_cache_groups[2:])
    assert find_coordinator(windows_only, True).name == "unit"


@pytest.mark.parametrize(
    ("name", "message"), [("use_eagle", "'use_eagle'"), ("max_model_len", "arguments: renamed")]
)
def test_a_renamed_keyword_is_an_error(name: str, message: str) -> None:
    """Whether the coordinator reads it or not: a renamed one must not be swallowed."""
    arguments = {**ARGUMENTS, "kv_cache_config": make_config()}
    arguments["renamed"] = arguments.pop(name)
    with pytest.raises(TypeError, match=message):
        AscendHybridKVCacheCoordinator(**arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dcp_world_size": 2}, "2 ranks"),
        ({"hash_block_size": 64}, "hash_block_size=64 and the hit unit 32"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        get_kv_cache_coordinator(kv_cache_config=make_config(), **{**ARGUMENTS, **change})


def test_pages_without_kernels_are_refused() -> None:
    config = make_config()
    group = config.kv_cache_groups[1]
    spec = replace(group.kv_cache_spec, block_size=24 * 128)
    config.kv_cache_groups[1] = replace(group, kv_cache_spec=spec)
    with pytest.raises(ConfigError, match="24 rows"):
        get_kv_cache_coordinator(kv_cache_config=config, **ARGUMENTS)


def test_compressed_specs_have_their_manager() -> None:
    spec = CompressAttentionSpec(
        block_size=128, num_kv_heads=1, head_size=512, dtype=torch.bfloat16, compress_ratio=4
    )
    assert KVCacheSpecRegistry.get_manager_class(spec) is CompressAttentionManager
    core = MLAAttentionSpec(block_size=128, num_kv_heads=1, head_size=512, dtype=torch.bfloat16)
    assert KVCacheSpecRegistry.get_manager_class(core) is not CompressAttentionManager


def test_the_manager_unpacks_unequal_pages() -> None:
    uniform = make_config().kv_cache_groups[0].kv_cache_spec
    pool = BlockPool(
        num_gpu_blocks=8, enable_caching=True, hash_block_size=32, enable_kv_cache_events=False
    )
    manager = CompressAttentionManager(
        uniform,
        block_pool=pool,
        enable_caching=True,
        kv_cache_group_id=0,
        scheduler_block_size=4096,
    )
    assert manager.block_size == 128
    assert isinstance(manager.kv_cache_spec, CompressAttentionSpec)
