"""The block pool: ref counts, tiers of free blocks, eviction, in both kinds of hits."""

from typing import Any

import pytest

from tests.v1.core.cache_helpers import ids, make_request
from tests.v1.core.prefix.unit_caches import h, make_cache
from vllm.distributed.kv_events import AllBlocksCleared
from vllm.exceptions import InvariantError
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.invariants import check_pool
from vllm.v1.core.kv_cache_metrics import KVCacheMetricsCollector
from vllm.v1.core.kv_cache_utils import KVCacheBlock, init_none_hash
from vllm.v1.core.retention.tiers import Tier


@pytest.fixture(autouse=True)
def _none_hash() -> None:
    init_none_hash(sha256)


def cache(pool: BlockPool, request: Any, blocks: Any, done: int, full: int, **kw: Any) -> None:
    pool.cache_full_blocks(
        **{
            "request": request,
            "blocks": blocks,
            "num_cached_blocks": done,
            "num_full_blocks": full,
            "block_size": 4,
            "kv_cache_group_id": 0,
            **kw,
        }
    )


# ---- taking and giving back --------------------------------------------------------------------


def test_a_new_pool() -> None:
    pool = BlockPool(num_gpu_blocks=5, enable_caching=True, hash_block_size=4)
    assert pool.null_block is pool.blocks[0]
    assert pool.null_block.is_null
    assert ids(pool.free_block_queue.get_all_free_blocks()) == [1, 2, 3, 4]
    assert pool.get_num_free_blocks() == 4
    assert pool.get_usage() == 0.0
    assert BlockPool(1, True, 4).get_usage() == 0.0
    with pytest.raises(AssertionError):
        BlockPool(0, True, 4)


@pytest.mark.parametrize("hits_at_one_unit", [False, True])
def test_the_null_block_is_never_given_out(hits_at_one_unit: bool) -> None:
    pool = make_cache().pool if hits_at_one_unit else BlockPool(9, True, 4)
    assert pool.null_block.block_id == 0
    assert pool.get_num_free_blocks() == 8
    taken = pool.get_new_blocks(8)
    assert all(not block.is_null for block in taken)
    with pytest.raises(ValueError, match="Cannot get 1 free blocks from the pool: only 0 are free"):
        pool.get_new_blocks(1)
    pool.free_blocks([pool.null_block])
    pool.touch([pool.null_block])
    assert pool.get_num_free_blocks() == 0


def test_take_and_free() -> None:
    pool = BlockPool(6, True, 4)
    with pytest.raises(ValueError, match="Cannot get 6 free blocks"):
        pool.get_new_blocks(6)
    assert pool.get_new_blocks(0) == []
    blocks = pool.get_new_blocks(3)
    assert ids(blocks) == [1, 2, 3]
    assert [block.ref_cnt for block in blocks] == [1, 1, 1]
    assert pool.get_usage() == pytest.approx(0.6)
    pool.touch(blocks[:1])
    pool.free_blocks(reversed(blocks))
    assert ids(pool.free_block_queue.get_all_free_blocks()) == [4, 5, 3, 2]
    pool.free_blocks(blocks[:1], prepend=True)
    assert ids(pool.free_block_queue.get_all_free_blocks()) == [1, 4, 5, 3, 2]
    taken = pool.get_new_blocks(2)
    pool.free_blocks(taken, prepend=True)
    assert ids(pool.free_block_queue.get_all_free_blocks()) == [1, 4, 5, 3, 2]


def test_touch_takes_a_free_block_out_of_the_queue() -> None:
    pool = BlockPool(4, True, 4)
    blocks = pool.get_new_blocks(2)
    pool.free_blocks(blocks)
    pool.touch(blocks[1:])
    assert ids(pool.free_block_queue.get_all_free_blocks()) == [3, 1]
    assert blocks[1].ref_cnt == 1


def test_null_and_foreign_blocks_join_no_queue() -> None:
    pool = BlockPool(3, True, 4)
    foreign = KVCacheBlock(7)
    pool.touch([pool.null_block])
    pool.free_blocks([pool.null_block, pool.null_block, foreign])
    pool.free_blocks([foreign], prepend=True)
    assert foreign.ref_cnt == -2
    assert pool.get_num_free_blocks() == 2


@pytest.mark.parametrize("hits_at_one_unit", [False, True])
def test_whoever_passes_the_null_block_it_is_not_counted_queued_or_freed(
    hits_at_one_unit: bool,
) -> None:
    pool = make_cache().pool if hits_at_one_unit else BlockPool(9, True, 4)
    null = pool.null_block
    pool.free_blocks([null])
    pool.touch([null, null])
    if isinstance(pool, BlockPool):
        pool.free_blocks([null, null], prepend=True)
        pool.free_unhashed_first([null])
    pool.replace([null], even_if_unchanged=True)
    pool.evict_blocks([0])
    assert (null.ref_cnt, null.block_hash, pool.tier_of(null)) == (0, None, None)
    assert pool.get_num_free_blocks() == 8
    assert null not in pool.get_new_blocks(8)


def test_what_no_hit_can_find_goes_back_in_front_and_the_hashed_behind() -> None:
    pool = BlockPool(6, True, 4)
    blocks = pool.get_new_blocks(4)
    request = make_request("0", range(8), 4)
    cache(pool, request, blocks, 0, 2)
    pool.free_unhashed_first([blocks[3], blocks[1], blocks[2], pool.null_block, blocks[0]])
    order = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    assert order == [blocks[i].block_id for i in (3, 2)] + [5] + [
        blocks[i].block_id for i in (1, 0)
    ]


def test_reserved_blocks_are_not_in_use() -> None:
    pool = BlockPool(5, True, 4)
    pool.reserve_blocks(2)
    assert pool.get_usage() == 0.0
    assert pool.reset_prefix_cache()
    pool.get_new_blocks(1)
    assert pool.get_usage() == pytest.approx(0.5)
    assert not pool.reset_prefix_cache()


# ---- the index through the pool ----------------------------------------------------------------


def test_cache_and_evict() -> None:
    pool = BlockPool(6, True, 4)
    request = make_request("0", range(12), 4)
    blocks = pool.get_new_blocks(3)
    cache(pool, request, blocks, 0, 2)
    cache(pool, request, blocks, 2, 2)
    assert [block.block_hash is not None for block in blocks] == [True, True, False]
    assert pool.get_cached_block(request.block_hashes[0], [0]) == [blocks[0]]
    assert pool.get_cached_block(request.block_hashes[0], [0, 1]) is None
    cache(pool, request, blocks, 2, 3)
    assert pool._maybe_evict_cached_block(blocks[1])
    assert not pool._maybe_evict_cached_block(blocks[1])
    assert blocks[1].block_hash is None
    pool.free_blocks(blocks)
    pool.evict_blocks({blocks[0].block_id})
    assert pool.get_cached_block(request.block_hashes[0], [0]) is None
    assert pool.get_cached_block(request.block_hashes[2], [0]) == [blocks[2]]
    with pytest.raises(ValueError, match="outside the pool"):
        pool.evict_blocks([6])
    pool.get_new_blocks(5)
    assert len(pool.cached_block_hash_to_block) == 0


def test_reset() -> None:
    pool = BlockPool(4, True, 4, enable_kv_cache_events=True)
    request = make_request("0", range(8), 4)
    blocks = pool.get_new_blocks(2)
    cache(pool, request, blocks, 0, 2)
    assert not pool.reset_prefix_cache()
    assert len(pool.cached_block_hash_to_block) == 2
    pool.free_blocks(blocks)
    assert pool.reset_prefix_cache()
    assert len(pool.cached_block_hash_to_block) == 0
    assert all(block.block_hash is None for block in pool.blocks)
    assert isinstance(pool.take_events()[-1], AllBlocksCleared)


def test_metrics_collector_hears_of_blocks() -> None:
    collector = KVCacheMetricsCollector(sample_rate=1.0)
    pool = BlockPool(4, True, 4, metrics_collector=collector)
    (block,) = pool.get_new_blocks(1)
    assert set(collector.block_metrics) == {1}
    pool.touch([block])
    assert len(collector.block_metrics[1].access_history) == 1
    pool.free_blocks([block])
    pool.free_blocks([block])
    pool.get_new_blocks(3)
    assert len(collector.drain_events()) == 1
    pool.free_blocks(pool.blocks[1:])
    assert pool.reset_prefix_cache()
    assert collector.block_metrics == {}


# ---- hits at one unit --------------------------------------------------------------------------


def test_scratch_is_reused_before_cached_and_cached_in_lru_order() -> None:
    cache = make_cache()
    pool = cache.pool
    a, b, c = pool.get_new_blocks(3)
    for name, block in (("a", a), ("b", b)):
        cache.add_key(block, 0, h(name))
    pool.free_blocks([b, a, c])
    assert cache.tiers(a, b, c) == [Tier.REGULAR, Tier.REGULAR, Tier.SCRATCH]
    taken = pool.get_new_blocks(6)
    assert a not in taken
    assert b not in taken
    assert taken[0] is c
    assert pool.get_new_blocks(1) == [b]
    assert cache.get(h("b"), 0) is None
    assert h("b") in cache.index.ghosts
    assert cache.get(h("a"), 0) is a


def test_what_can_be_hit_never_joins_scratch_that_stands_apart() -> None:
    cache = make_cache()
    pool = cache.pool
    a, b = pool.get_new_blocks(2)
    cache.add_key(a, 0, h("a"))
    pool.free_blocks([a, b])
    assert cache.tiers(a, b) == [Tier.REGULAR, Tier.SCRATCH]
    taken = pool.get_new_blocks(8)
    assert taken[0] is b
    assert cache.get(h("a"), 0) is None
    check_pool(pool, taken)


def test_usage_counts_held_blocks_only() -> None:
    cache = make_cache(5)
    a, _ = cache.pool.get_new_blocks(2)
    assert cache.pool.get_usage() == 0.5
    cache.add_key(a, 0, h("k"))
    cache.pool.free_blocks([a])
    assert cache.pool.get_usage() == 0.25


def test_scratch_freed_last_is_taken_first() -> None:
    pool = make_cache().pool
    blocks = pool.get_new_blocks(3)
    pool.free_blocks(blocks)
    assert pool.get_new_blocks(2) == [blocks[2], blocks[1]]


def test_cold_blocks_are_reused_before_regular_ones() -> None:
    cache = make_cache()
    pool = cache.pool
    a, b = pool.get_new_blocks(2)
    cold = cache.add_record("cold", a, is_lean=False)
    cache.add_record("regular", b)
    pool.free_blocks([b, a])
    assert cache.tiers(a, b) == [Tier.COLD, Tier.REGULAR]
    assert pool.get_new_blocks(7)[-1] is a
    assert not cache.index.holds_checkpoint(cold)


def test_an_evicted_block_serves_nothing_wherever_it_is() -> None:
    cache = make_cache()
    pool = cache.pool
    free, other, held = pool.get_new_blocks(3)
    cache.add_record("p", free, other)
    cache.add_key(held, 0, h("k"))
    pool.free_blocks([free, other])
    pool.evict_blocks([free.block_id, held.block_id])
    # The checkpoint's other block is of no use without it.
    assert cache.tiers(free, other, held) == [Tier.SCRATCH, Tier.SCRATCH, None]
    assert cache.get(h("k"), 0) is None
    check_pool(pool, [held])


@pytest.mark.parametrize("at_unit", [False, True])
def test_the_null_block_is_never_counted(at_unit: bool) -> None:
    pool = make_cache(5, windows=(2,)).pool if at_unit else BlockPool(5, True, 16)
    null = pool.null_block
    ways = [pool.free_blocks, *([pool.free_unhashed_first] if isinstance(pool, BlockPool) else [])]
    for free in ways:
        (block,) = pool.get_new_blocks(1)
        pool.touch([null, block])
        free([null, block, null, block])
        assert (null.ref_cnt, block.ref_cnt) == (0, 0)
    assert pool.get_num_free_blocks() == 4
    assert all(null not in queue.get_all_free_blocks() for queue in pool.tiers)
    check_pool(pool, [])


# ---- what is promised when a block is given back is checked when it is taken -------------------


def test_a_block_is_not_given_back_twice() -> None:
    pool = make_cache().pool
    (block,) = pool.get_new_blocks(1)
    pool.free_blocks([block])
    with pytest.raises(InvariantError, match=f"I2 .*block {block.block_id} is given back"):
        pool.free_blocks([block])
    with pytest.raises(InvariantError, match="I2"):
        pool.free_and_age([block], [])


@pytest.mark.parametrize("hits_at_one_unit", [False, True])
@pytest.mark.parametrize("wrong", [0, 2])
def test_a_held_block_among_the_free_ones_is_not_handed_out(
    hits_at_one_unit: bool, wrong: int
) -> None:
    pool = make_cache().pool if hits_at_one_unit else BlockPool(9, True, 4)
    block = pool.free_block_queue.get_all_free_blocks()[wrong]
    block.ref_cnt = 2
    with pytest.raises(InvariantError, match=f"I3 .*block {block.block_id} .*held 2 times"):
        pool.get_new_blocks(3)


def test_a_cached_block_that_is_held_is_not_handed_out() -> None:
    cache = make_cache()
    blocks = cache.pool.get_new_blocks(8)
    cache.add_key(blocks[0], 0, h("a"))
    cache.pool.free_blocks(blocks[:1])
    blocks[0].ref_cnt = 1
    with pytest.raises(InvariantError, match="I3"):
        cache.pool.get_new_blocks(1)


def test_what_holds_nothing_is_not_held_for_its_contents() -> None:
    cache = make_cache()
    blocks = cache.pool.get_new_blocks(2)
    cache.add_key(blocks[0], 0, h("a"))
    cache.pool.free_blocks(blocks)
    cache.pool.touch(blocks[:1])
    with pytest.raises(InvariantError, match=f"I3 .*block {blocks[1].block_id} is held for what"):
        cache.pool.touch(blocks[1:])
