"""Unit keys of dense blocks, which prefixes continue which, and what a lost block takes along."""

from tests.v1.core.prefix.unit_caches import h, make_cache
from vllm.v1.core.block_pool import TieredPool
from vllm.v1.core.pool.events import KVEventWriter
from vllm.v1.core.pool.regular_tier import RegularTier
from vllm.v1.core.prefix.prefix_index import PrefixIndex
from vllm.v1.core.retention.queues import Standing
from vllm.v1.core.retention.tiers import Tier
from vllm.v1.core.values.hit import Checkpoint


def test_a_touched_block_leaves_its_tier_and_keeps_its_keys() -> None:
    cache = make_cache()
    pool, index = cache.pool, cache.index
    (a,) = pool.get_new_blocks(1)
    cache.add_key(a, 1, h("x"))
    cache.add_key(a, 1, h("y"))
    pool.free_blocks([a])
    pool.touch([a])
    assert pool.tier_of(a) is None
    assert a.ref_cnt == 1
    assert list(index.keys_of(a)) == [h("x"), h("y")]
    assert cache.get(h("y"), 1) is a
    assert cache.get(h("y"), 0) is None
    assert index.holds_any(h("y"))
    assert not index.holds_any(h("z"))


def test_equal_keys_on_two_blocks_survive_the_loss_of_one() -> None:
    cache = make_cache(3)
    pool, index = cache.pool, cache.index
    a, b = pool.get_new_blocks(2)
    cache.add_key(a, 0, h("k"))
    cache.add_key(b, 0, h("k"))
    # Both entries are there, and say the same as the blocks.
    assert index.holds_key(0, h("k"), a)
    assert index.holds_key(0, h("k"), b)
    assert list(index.find_faults(pool.blocks)) == []
    pool.free_blocks([a])
    (again,) = pool.get_new_blocks(1)
    assert again is a
    assert cache.get(h("k"), 0) is b
    assert index.holds_key(0, h("k"), b)
    assert not index.holds_key(0, h("k"), a)
    assert list(index.find_faults(pool.blocks)) == []


def test_losing_one_block_dissolves_a_checkpoint_and_frees_the_rest_to_scratch() -> None:
    cache = make_cache(5)
    pool, index = cache.pool, cache.index
    a, b, c, d = pool.get_new_blocks(4)
    both = Checkpoint(h("p"), 64, ((a, b), (c,)))
    shared = Checkpoint(h("q"), 96, ((b,), (d,)))
    assert cache.store.publish(both, "one")
    assert cache.store.publish(shared, "one")
    pool.free_blocks([a, b, c, d])
    assert {pool.tier_of(x) for x in (a, b, c, d)} == {Tier.REGULAR}
    assert pool.get_new_blocks(1) == [a]
    assert h("p") not in index.checkpoints
    assert h("p") in index.checkpoint_ghosts
    assert pool.tier_of(c) is Tier.SCRATCH
    assert pool.tier_of(b) is Tier.REGULAR, "another checkpoint still needs it"
    assert pool.get_new_blocks(1) == [c]
    assert index.checkpoints[h("q")] is shared


def test_reset_forgets_everything_but_not_under_running_requests() -> None:
    cache = make_cache()
    pool, index = cache.pool, cache.index
    a, b = pool.get_new_blocks(2)
    cache.add_key(a, 0, h("k"))
    cache.store.publish(Checkpoint(h("k"), 32, ((b,),)), "one")
    assert not pool.reset_prefix_cache()
    assert cache.get(h("k"), 0) is a
    pool.free_blocks([a, b])
    assert pool.reset_prefix_cache()
    assert cache.get(h("k"), 0) is None
    assert not index.checkpoints
    assert {pool.tier_of(x) for x in pool.blocks[1:]} == {Tier.SCRATCH}
    assert h("k") not in index.ghosts
    assert not any(index.is_cached(block) for block in pool.blocks)
    assert list(index.find_faults(pool.blocks)) == []


def test_continuations_count_while_they_are_cached() -> None:
    cache = make_cache(4, windows=(2,))
    pool, index = cache.pool, cache.index
    root, left, right = pool.get_new_blocks(3)
    cache.add_key(root, 0, h("root"))
    cache.add_key(left, 0, h("left"), h("root"))
    # Another group's keys say nothing about continuations.
    cache.add_key(right, 1, h("right"), h("root"))
    assert index.lineage.parent_of(h("left")) == h("root")
    assert index.lineage.parent_of(h("root")) is None
    assert index.lineage.has_other_continuation(h("root"), h("right"))
    assert index.lineage.has_other_continuation(h("root"), None)
    assert not index.lineage.has_other_continuation(h("root"), h("left"))
    assert not index.lineage.has_other_continuation(h("left"), None)
    pool.free_blocks([left])
    assert pool.get_new_blocks(1) == [left]
    assert not index.lineage.has_other_continuation(h("root"), None)


def test_a_block_stands_as_high_as_what_is_known_of_it() -> None:
    cache = make_cache(ranks=True)
    pool, index = cache.pool, cache.index
    a, b = pool.get_new_blocks(2)
    cache.add_key(a, 0, h("a"))
    assert index.standing(a) is Standing.NEW
    # Computed again while it is still there.
    cache.add_key(b, 0, h("a"))
    assert index.standing(b) is Standing.HIT
    pool.touch([a])
    assert index.standing(a) is Standing.HIT


def test_what_was_evicted_lately_returns() -> None:
    cache = make_cache(ranks=True)
    pool, index = cache.pool, cache.index
    (block,) = pool.get_new_blocks(1)
    cache.add_key(block, 0, h("a"))
    index.forget(block)
    cache.add_key(block, 0, h("a"))
    assert index.standing(block) is Standing.RETURNED
    index.forget(block)
    for number in range(pool.num_gpu_blocks):
        cache.add_key(block, 0, h(f"other {number}"))
        index.forget(block)
    cache.add_key(block, 0, h("a"))
    assert index.standing(block) is Standing.NEW


def test_the_rows_of_a_returned_prefix_stand_alike_in_all_groups() -> None:
    cache = make_cache(windows=(2,), ranks=True)
    pool, index = cache.pool, cache.index
    rows, keys = pool.get_new_blocks(2)
    for block in (rows, keys):
        cache.add_key(block, block.block_id - rows.block_id, h("a"))
    assert [index.standing(rows), index.standing(keys)] == [Standing.NEW, Standing.NEW]
    for block in (rows, keys):
        index.forget(block)
    # Published group by group: the first one is not the only one that knows it was there.
    cache.add_key(rows, 0, h("a"))
    cache.add_key(keys, 1, h("a"))
    assert [index.standing(rows), index.standing(keys)] == [Standing.RETURNED, Standing.RETURNED]


def test_a_free_block_gives_up_a_key_that_a_held_one_computed_again() -> None:
    index = PrefixIndex(10, [0], [1], KVEventWriter(False), ranks_blocks=True)
    ranked = RegularTier(10, index, lambda *_: (Standing.NEW, False))
    pool = TieredPool(10, True, index, ranked)
    a, b = pool.get_new_blocks(2)
    assert index.add_keys([a, a], 0, [h("1"), h("2")], [None, h("1")]) == []
    pool.free_blocks([a])
    assert index.add_keys([b], 0, [h("1")], [None]) == []
    assert (index.keys_of(a), index.keys[0][h("1")]) == ((h("2"),), b)
    assert index.add_keys([b], 0, [h("2")], [h("1")]) == [a]
    assert pool.index.tier(a) is Tier.SCRATCH
    assert list(index.find_faults(pool.blocks)) == []
