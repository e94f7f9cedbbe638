"""DeepSeek-V4's groups in the whole-block cache: dense groups stay dense, windows are sparse."""

import random
from typing import Any

import pytest

from tests.v1.core.cache_helpers import cached_indices, make_request, run_prompt
from tests.v1.core.v4_geometry import SMALL, v4_config
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config
from vllm.v1.kv_cache_interface import KVCacheConfig, SlidingWindowSpec

ENV = "VLLM_PREFIX_CACHE_RETENTION_INTERVAL"
SCHEDULER_BLOCK = 4096
HASH_BLOCK = 2


def v4_manager(num_blocks: int = 12_000, eagle: bool = False, **kw: Any) -> KVCacheManager:
    packed = v4_config(32, num_blocks, SMALL)
    packed.hit_unit = None
    config: KVCacheConfig = generate_scheduler_kv_cache_config([packed])
    if eagle:
        for group in config.kv_cache_groups:
            group.is_eagle_group = isinstance(group.kv_cache_spec, SlidingWindowSpec)
    return KVCacheManager(
        config,
        max_model_len=20_000,
        scheduler_block_size=SCHEDULER_BLOCK,
        hash_block_size=HASH_BLOCK,
        max_num_batched_tokens=8192,
        **kw,
    )


def window_ids(manager: KVCacheManager) -> list[int]:
    return [
        i
        for i, group in enumerate(manager.kv_cache_config.kv_cache_groups)
        if isinstance(group.kv_cache_spec, SlidingWindowSpec)
    ]


def tails(block_size: int, window: int, boundaries: list[int]) -> set[int]:
    """Return, by the definition of a window, the blocks a request reads to resume at boundaries."""
    return {
        row // block_size
        for boundary in boundaries
        for row in range(boundary - window + 1, boundary)
    }


@pytest.mark.parametrize(
    ("interval", "boundaries"),
    [
        ("none", [4096, 8192, 12_288]),
        ("0", [8192]),
        ("auto", [8192]),
        ("8192", [8192]),
        ("4096", [4096, 8192, 12_288]),
    ],
)
def test_dense_groups_stay_dense_while_windows_are_sparse(
    interval: str, boundaries: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENV, interval)
    manager = v4_manager()
    request = make_request("0", range(3 * SCHEDULER_BLOCK), HASH_BLOCK)
    run_prompt(manager, request, 8192)
    windows = window_ids(manager)
    assert len(windows) >= 3
    for group_id, single in enumerate(manager.coordinator.single_type_managers):
        cached = cached_indices(manager, request, group_id)
        size = single.block_size
        if group_id not in windows:
            assert cached == set(range(request.num_tokens // size)), group_id
            continue
        spec: Any = single.kv_cache_spec
        assert cached == tails(size, spec.sliding_window, boundaries), group_id
    manager.free(request)
    again = make_request("1", range(3 * SCHEDULER_BLOCK), HASH_BLOCK)
    assert manager.get_computed_blocks(again)[1] == 8192


@pytest.mark.parametrize("interval", ["none", "0"])
def test_a_drafter_costs_at_most_one_more_block(
    interval: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENV, interval)
    manager = v4_manager(eagle=True)
    request = make_request("0", range(9000), HASH_BLOCK)
    run_prompt(manager, request, 8192)
    for group_id in window_ids(manager):
        single = manager.coordinator.single_type_managers[group_id]
        cached = cached_indices(manager, request, group_id)
        boundary_block = 8192 // single.block_size
        assert boundary_block in cached
        assert boundary_block + 1 not in cached
    manager.free(request)
    again = make_request("1", range(9000), HASH_BLOCK)
    assert manager.get_computed_blocks(again)[1] == 8192


def test_the_null_block_is_never_counted_queued_or_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV, "0")
    manager = v4_manager(num_blocks=11_000)
    null_block = manager.block_pool.null_block
    rng = random.Random(0)
    live: list[Any] = []
    for i in range(12):
        length = rng.choice([5000, 8193, 9000])
        request = make_request(str(i), range(i % 3 * 50_000, i % 3 * 50_000 + length), HASH_BLOCK)
        hit, num_hit = manager.get_computed_blocks(request)
        new = min(4096, length - num_hit)
        if manager.allocate_slots(request, new, num_hit, hit) is None:
            manager.free(live.pop(0))
            continue
        request.num_computed_tokens = num_hit + new
        live.append(request)
        request = rng.choice(live)
        left = request.num_tokens - request.num_computed_tokens
        if left and manager.allocate_slots(request, min(4096, left)) is not None:
            request.num_computed_tokens += min(4096, left)
        manager.check_invariants()
        queue = manager.block_pool.free_block_queue.get_all_free_blocks()
        assert null_block not in queue
        assert null_block.prev_free_block is None
        assert null_block.next_free_block is None
        held = {
            block
            for request in live
            for table in manager.get_blocks(request.request_id).blocks
            for block in table
        } - {null_block}
        assert len(queue) + len(held) + 1 == manager.block_pool.num_gpu_blocks
        assert manager.usage == pytest.approx(len(held) / 10_999)
    for request in live:
        manager.free(request)
    assert manager.usage == 0.0
    assert null_block.block_hash is None
    assert manager.reset_prefix_cache()
