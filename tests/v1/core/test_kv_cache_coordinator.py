"""Coordinators: which one serves what, groups together."""

from dataclasses import replace
from typing import Any

import pytest

from tests.v1.core.cache_helpers import ids, make_config, make_manager, make_request, start
from tests.v1.core.specs import HALF, full, swa
from tests.v1.core.v4_geometry import v4_config
from vllm.exceptions import ConfigError
from vllm.v1.core.kv_cache_coordinator import (
    CheckpointCoordinator,
    HybridKVCacheCoordinator,
    KVCacheCoordinatorNoPrefixCache,
    UnitaryKVCacheCoordinator,
    get_kv_cache_coordinator,
)
from vllm.v1.kv_cache_interface import CrossAttentionSpec, KVCacheConfig


def make_coordinator(config: KVCacheConfig, **kw: Any) -> Any:
    sizes = [group.kv_cache_spec.block_size for group in config.kv_cache_groups] or [16]
    defaults: dict[str, Any] = {
        "max_model_len": 1024,
        "max_num_batched_tokens": 128,
        "use_eagle": False,
        "enable_caching": True,
        "enable_kv_cache_events": False,
        "dcp_world_size": 1,
        "pcp_world_size": 1,
        "scheduler_block_size": max(sizes),
        "hash_block_size": min(sizes),
    }
    return get_kv_cache_coordinator(kv_cache_config=config, **{**defaults, **kw})


def test_which_coordinator() -> None:
    one = make_config(10, [full()])
    two = make_config(10, [full(), swa()])
    assert isinstance(make_coordinator(one), UnitaryKVCacheCoordinator)
    assert isinstance(make_coordinator(two), HybridKVCacheCoordinator)
    for config in (one, two, make_config(10, [])):
        plain = make_coordinator(config, enable_caching=False)
        assert isinstance(plain, KVCacheCoordinatorNoPrefixCache)
        assert plain.find_longest_cache_hit([], 0) == (
            tuple([] for _ in config.kv_cache_groups),
            0,
        )
        assert plain.get_num_common_prefix_blocks("0") == [0] * len(config.kv_cache_groups)


def test_bad_block_sizes_are_bugs() -> None:
    with pytest.raises(AssertionError):
        make_coordinator(make_config(10, [full()]), hash_block_size=8)
    with pytest.raises(AssertionError):
        make_coordinator(make_config(10, [full(block_size=12), swa()]), hash_block_size=8)
    with pytest.raises(AssertionError):
        make_coordinator(make_config(10, [full(), swa(block_size=12)]), hash_block_size=4)
    with pytest.raises(AssertionError, match="two specs"):
        make_coordinator(make_config(10, [full(), full()]))


def test_eagle_groups() -> None:
    specs = [full(), swa(), swa(sliding_window=64)]
    assert make_coordinator(make_config(10, specs)).eagle_group_ids == set()
    assert make_coordinator(make_config(10, specs), use_eagle=True).eagle_group_ids == {0, 1, 2}
    flagged = make_coordinator(make_config(10, specs, [2]), use_eagle=True)
    assert flagged.eagle_group_ids == {2}
    assert [m.use_eagle for m in flagged.single_type_managers] == [False, False, True]


def test_cross_attention_follows_the_encoder() -> None:
    cross = CrossAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=HALF)  # type: ignore[arg-type]
    coordinator = make_coordinator(make_config(50, [full(), cross]), enable_caching=False)
    sized = coordinator.get_num_blocks_to_allocate("0", 33, ((), ()), 100, 0, 33)
    blocks = coordinator.allocate_new_blocks("0", 33, 33, num_encoder_tokens=100)
    assert [len(group) for group in blocks] == [3, 7]
    assert sized == 10
    assert [len(g) for g in coordinator.allocate_new_blocks("0", 49, 49, 0)] == [1, 0]


def test_no_group_evicts_anothers_hits() -> None:
    """A connector's blocks are taken only once every group holds its hits."""
    manager = make_manager(make_config(10, [full(), swa(sliding_window=32)]))
    request = make_request("0", range(48), 16)
    start(manager, request)
    manager.free(request)
    again = make_request("1", range(112), 16)
    hit, num_hit = manager.get_computed_blocks(again)
    assert num_hit == 48
    hits = {block.block_id for group in hit.blocks for block in group if not block.is_null}
    needed = manager.coordinator.get_num_blocks_to_allocate("1", 80, hit.blocks, 0, 80, 80)
    before = manager.block_pool.get_num_free_blocks()
    manager.coordinator.allocate_new_computed_blocks("1", hit.blocks, num_hit, 32)
    assert before - manager.block_pool.get_num_free_blocks() == needed
    held = [block.block_id for group in manager.get_blocks("1").blocks for block in group]
    real = [block_id for block_id in held if block_id]
    assert len(real) == len(set(real))
    assert set(ids(manager.get_blocks("1").blocks[0][:3])) <= hits
    manager.check_invariants()


class OwnCoordinator(CheckpointCoordinator):
    """A platform's class."""


def test_a_platform_names_the_class() -> None:
    config = replace(v4_config(32, 600), coordinator_path=f"{__name__}.OwnCoordinator")
    sizes = {"scheduler_block_size": 32, "hash_block_size": 32}
    assert type(make_coordinator(config, **sizes)) is OwnCoordinator
    config.coordinator_path = None
    assert type(make_coordinator(config, **sizes)) is CheckpointCoordinator


@pytest.mark.parametrize("path", ["", "nothing", "no.such.module.Name", f"{__name__}.Missing"])
def test_a_class_that_is_not_there_is_named(path: str) -> None:
    config = replace(v4_config(32, 600), coordinator_path=path)
    with pytest.raises(ConfigError, match=f"coordinator {path!r} cannot be imported"):
        make_coordinator(config, scheduler_block_size=32, hash_block_size=32)
