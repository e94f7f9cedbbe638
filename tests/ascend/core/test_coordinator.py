"""Registration, keyword arguments and refusals of Ascend's coordinator and manager."""

from dataclasses import replace

import pytest
import torch

from tests.ascend.v4_models import DEVICE_PAGES, v4_config
from vllm.exceptions import ConfigError
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_coordinator import CheckpointCoordinator, get_kv_cache_coordinator
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


def make_config() -> KVCacheConfig:
    """Groups as the worker has them: C4 and its state hold layers of unequal pages."""
    specs = ascend_kv_cache_specs(v4_config([0, 4, 128, 4]), 32, DEVICE_PAGES)
    groups = group_hybrid_mla_specs(specs)
    blocks, tensors = build_packed_tensors(groups, 0, 200)
    return KVCacheConfig(blocks, tensors, groups, hit_unit=32)


def test_groups_are_unpacked_dense_and_sparse() -> None:
    coordinator = get_kv_cache_coordinator(kv_cache_config=make_config(), **ARGUMENTS)
    assert isinstance(coordinator, CheckpointCoordinator)
    geometry = coordinator.geometry
    assert [group.block_size for group in geometry.dense] == [128, 4096]
    assert [group.block_size for group in geometry.windows][-2:] == [2, 8]
    assert geometry.unit == 32


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
    with pytest.raises(ConfigError, match="24 rows"):
        replace(group.kv_cache_spec, block_size=24 * 128)


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
