"""Pins: by themselves, of checkpoints, and of single blocks with hits at whole blocks."""

import pytest

from tests.v1.core.cache_helpers import ids
from tests.v1.core.prefix.unit_caches import UnitCache, h, make_cache
from tests.v1.core.specs import swa
from tests.v1.core.whole_block import lookup_table
from vllm.exceptions import InvariantError
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.invariants import check_pool
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock, make_block_hash_with_group_id
from vllm.v1.core.pool.pins import Pins
from vllm.v1.core.retention.tiers import Tier
from vllm.v1.core.values.hit import Checkpoint


def pinning_cache(num_blocks: int = 10, max_pinned: int = 4) -> tuple[UnitCache, Pins]:
    cache = make_cache(num_blocks, [0], [1, 2], max_pinned=max_pinned)
    assert cache.pool.pins is not None
    return cache, cache.pool.pins


def pinning_pool(num_blocks: int = 10, max_pinned: int = 4) -> tuple[BlockPool, Pins]:
    pool = BlockPool(num_blocks, True, 4)
    pool.enable_pinning(max_pinned)
    assert pool.pins is not None
    return pool, pool.pins


def num_pins_by_block(pins: Pins) -> dict[int, int]:
    return {block_id: len(covering) for block_id, covering in pins._pins_of.items()}


# ---- the pins ----------------------------------------------------------------------------------


def test_a_block_is_pinned_while_any_pin_needs_it() -> None:
    cache, pins = pinning_cache(max_pinned=3)
    a, b, c = cache.pool.get_new_blocks(3)
    one, two = Checkpoint(h("1"), 32, ((a, b),)), Checkpoint(h("2"), 64, ((b, c),))
    assert pins.pin({one: (a, b)})
    # Nothing gives way: the two fit together.
    assert pins.pin({two: (b, c)})
    assert list(pins) == [one, two]
    assert pins.pin({two: (b, c)})
    assert num_pins_by_block(pins) == {a.block_id: 1, b.block_id: 2, c.block_id: 1}
    assert one in pins
    pins.unpin(one)
    assert one not in pins
    pins.unpin(one)
    assert [pins.holds(x) for x in (a, b, c)] == [False, True, True]
    assert pins.pin({one: (a, b)})
    assert list(pins) == [two, one]
    pins.unpin(one)
    pins.unpin(two)
    assert num_pins_by_block(pins) == {}
    assert pins.num_blocks == 0


def test_the_cap_counts_a_shared_block_once() -> None:
    cache, pins = pinning_cache(max_pinned=2)
    a, b, c = cache.pool.get_new_blocks(3)
    one, shared = Checkpoint(h("1"), 32, ((a, b),)), Checkpoint(h("2"), 64, ((b,),))
    pins.pin({one: (a, b)})
    assert pins.pin({shared: (b,)})
    assert list(pins) == [one, shared]
    assert not pins.pin({Checkpoint(h("5"), 64, ((a, b, c),)): (a, b, c)})
    assert list(pins) == [one, shared]
    # One block too many: the oldest gives way, and the one that shares a block stays.
    other = Checkpoint(h("3"), 64, ((b, c),))
    assert pins.pin({other: (b, c)})
    assert list(pins) == [shared, other]
    assert pins.pin({Checkpoint(h("4"), 64, ((a, b),)): (a, b)})
    assert pins.num_blocks == 2


# ---- of checkpoints ----------------------------------------------------------------------------


def test_pinned_blocks_are_free_but_reached_last() -> None:
    cache, pins = pinning_cache()
    pool, index = cache.pool, cache.index
    a, b, c = pool.get_new_blocks(3)
    pinned, other = cache.add_record("p", a, b), cache.add_record("o", c)
    assert cache.store.pin(pinned)
    pool.free_blocks([a, b, c])
    assert cache.tiers(a, b, c) == [Tier.PINNED, Tier.PINNED, Tier.REGULAR]
    assert pool.get_num_free_blocks() == 9
    assert pool.get_usage() == 0.0
    taken = pool.get_new_blocks(7)
    assert taken[-1] is c
    assert h("o") not in index.checkpoints
    assert index.checkpoints[h("p")] is pinned
    assert other not in list(pins)
    # Nothing else is left: the pin gives way as a whole.
    assert pool.get_new_blocks(1) == [a]
    assert list(pins) == []
    assert h("p") not in index.checkpoints
    assert cache.tiers(b) == [Tier.SCRATCH]
    with pytest.raises(ValueError, match="only 1 are free"):
        pool.get_new_blocks(2)


def test_the_oldest_pin_gives_way_first_and_only_as_many_as_must() -> None:
    cache, pins = pinning_cache(8, max_pinned=6)
    pool, index = cache.pool, cache.index
    blocks = pool.get_new_blocks(6)
    old, mid, new = (cache.add_record(n, *blocks[2 * i : 2 * i + 2]) for i, n in enumerate("omn"))
    for record in (old, mid, new):
        cache.store.pin(record)
    pool.free_blocks(blocks)
    pool.get_new_blocks(2)
    assert list(pins) == [mid, new]
    assert h("o") not in index.checkpoints
    assert cache.tiers(*blocks[2:]) == [Tier.PINNED] * 4


def test_touch_keeps_the_pin_and_makes_it_young() -> None:
    cache, pins = pinning_cache(5)
    pool = cache.pool
    a, b, c, d = pool.get_new_blocks(4)
    first, second = cache.add_record("1", a, b), cache.add_record("2", c, d)
    cache.store.pin(first)
    cache.store.pin(second)
    pool.free_blocks([a, b, c, d])
    pool.touch([a, b])
    assert cache.tiers(a, b, c) == [None, None, Tier.PINNED]
    assert list(pins) == [first, second]
    pool.touch([a])
    pool.free_blocks([a, b])
    assert cache.tiers(a, b) == [None, Tier.PINNED]
    pool.free_blocks([a])
    # Used last, given up last.
    assert set(pool.get_new_blocks(2)) == {c, d}
    assert list(pins) == [first]


def test_the_cap_demotes_the_oldest() -> None:
    cache, pins = pinning_cache(max_pinned=4)
    pool, index = cache.pool, cache.index
    blocks = pool.get_new_blocks(8)
    free, held, new = (cache.add_record(n, *blocks[2 * i : 2 * i + 2]) for i, n in enumerate("fhn"))
    cache.store.pin(held)
    cache.store.pin(free)
    pool.free_blocks(blocks[:2])
    # Free ones first, though pinned later; they are cached as before, and young.
    cache.store.pin(new)
    assert list(pins) == [held, new]
    assert cache.tiers(*blocks[:2]) == [Tier.REGULAR] * 2
    assert h("f") in index.checkpoints
    # Then pins of blocks that requests hold.
    cache.store.pin(free)
    assert list(pins) == [new, free]
    # One that does not fit as a whole is not pinned, and costs nobody a pin.
    assert not cache.store.pin(cache.add_record("large", *blocks[3:8]))
    assert list(pins) == [new, free]


def test_a_block_of_two_pins_stays_until_both_are_gone() -> None:
    cache, pins = pinning_cache()
    pool = cache.pool
    a, b, c = pool.get_new_blocks(3)
    one, two = cache.add_record("1", a, b), cache.add_record("2", b, c)
    cache.store.pin(one)
    cache.store.pin(two)
    pool.free_blocks([a, b, c])
    pins.unpin(one)
    assert cache.tiers(a, b, c) == [Tier.REGULAR, Tier.PINNED, Tier.PINNED]
    pins.unpin(one)
    cache.store.dissolve(two)
    assert cache.tiers(a, b, c) == [Tier.REGULAR, Tier.REGULAR, Tier.SCRATCH]
    assert list(pins) == []


def test_pinning_a_free_or_cold_checkpoint_moves_it_and_back() -> None:
    cache, pins = pinning_cache()
    pool = cache.pool
    a, b = pool.get_new_blocks(2)
    record = cache.add_record("p", a, b, is_lean=False)
    pool.free_blocks([a, b])
    assert cache.tiers(a, b) == [Tier.COLD] * 2
    cache.store.pin(record)
    assert cache.tiers(a, b) == [Tier.PINNED] * 2
    pins.unpin(record)
    assert cache.tiers(a, b) == [Tier.COLD] * 2
    cache.store.dissolve(record)
    assert not cache.store.pin(record)


def test_reset_unpins() -> None:
    cache, pins = pinning_cache()
    pool = cache.pool
    a, b = pool.get_new_blocks(2)
    cache.store.pin(cache.add_record("p", a, b))
    assert not pool.reset_prefix_cache()
    assert len(list(pins)) == 1
    pool.free_blocks([a, b])
    assert pool.reset_prefix_cache()
    assert list(pins) == []
    assert cache.tiers(a, b) == [Tier.SCRATCH] * 2


def test_without_pins_no_block_stands_in_their_tier() -> None:
    cache = make_cache(10, [0])
    assert cache.pool.pins is None
    blocks = cache.pool.get_new_blocks(9)
    cache.add_record("p", *blocks[:3])
    cache.pool.free_blocks(blocks)
    assert cache.pool.tiers[Tier.PINNED].num_free_blocks == 0
    assert sum(tier.num_free_blocks for tier in cache.pool.tiers[: Tier.PINNED]) == 9


# ---- of single blocks, with hits at whole blocks -----------------------------------------------


def take_hashed(pool: BlockPool, n: int) -> list[KVCacheBlock]:
    blocks = pool.get_new_blocks(n)
    for block in blocks:
        key = make_block_hash_with_group_id(BlockHash(b"%d" % block.block_id), 0)
        block.block_hash = key
        pool.cached_block_hash_to_block.insert(key, block)
    return blocks


def pin_each(pins: Pins, blocks: list[KVCacheBlock]) -> bool:
    return pins.pin({block: (block,) for block in blocks})


def pinned_ids(pins: Pins) -> list[int]:
    """Return the ids of the pinned blocks, the oldest pin first."""
    return [block.block_id for block in pins if isinstance(block, KVCacheBlock)]


def queued(pool: BlockPool) -> tuple[list[int], list[int]]:
    """Return the ids in the free queue and in the pinned queue."""
    return (
        ids(pool.free_block_queue.get_all_free_blocks()),
        ids(pool.tiers[Tier.PINNED].get_all_free_blocks()),
    )


def test_single_pinned_blocks_are_free_but_reached_last() -> None:
    pool, pins = pinning_pool()
    blocks = take_hashed(pool, 3)
    pin_each(pins, blocks[:2])
    pool.free_blocks(blocks)
    assert queued(pool) == ([4, 5, 6, 7, 8, 9, 3], [1, 2])
    assert pool.get_num_free_blocks() == 9
    assert pool.get_usage() == 0.0
    assert ids(pool.get_new_blocks(7)) == [4, 5, 6, 7, 8, 9, 3]
    assert blocks[0].block_hash is not None
    check_pool(pool, pool.blocks[3:])
    # Nothing else is left: the oldest gives way, the other one stays.
    assert ids(pool.get_new_blocks(1)) == [1]
    assert queued(pool) == ([], [2])
    assert blocks[0] not in pins
    with pytest.raises(ValueError, match="only 1 are free"):
        pool.get_new_blocks(2)
    assert ids(pool.get_new_blocks(1)) == [2]
    assert pins.num_blocks == 0
    check_pool(pool, pool.blocks[1:])


def test_touch_keeps_the_pin_of_a_single_block() -> None:
    pool, pins = pinning_pool()
    first, second = take_hashed(pool, 2)
    pin_each(pins, [first, second])
    pool.free_blocks([first, second])
    pool.touch([first])
    assert queued(pool)[1] == [2]
    assert first in pins
    pool.touch([first])
    pool.free_blocks([first])
    assert queued(pool)[1] == [2]
    pool.free_blocks([first])
    # Used last, given up last.
    assert queued(pool)[1] == [2, 1]
    check_pool(pool, [])


def test_only_hashed_blocks_are_pinned() -> None:
    manager, pool = lookup_table.make_manager(swa(), 10)
    pool.enable_pinning(4)
    assert pool.pins is not None
    hashed = take_hashed(pool, 1)
    unhashed = pool.get_new_blocks(1)
    manager._pin([*hashed, *unhashed, pool.null_block])
    assert list(pool.pins) == hashed
    pool.free_unhashed_first([*hashed, *unhashed])
    assert queued(pool) == ([2, 3, 4, 5, 6, 7, 8, 9], [1])


def test_the_cap_demotes_the_oldest_single_blocks() -> None:
    pool, pins = pinning_pool(max_pinned=4)
    old, held, new = take_hashed(pool, 2), take_hashed(pool, 2), take_hashed(pool, 3)
    pin_each(pins, old)
    pool.free_blocks(old)
    pin_each(pins, held)
    pin_each(pins, new)
    # Free ones first, then pins of blocks that requests hold.
    assert pinned_ids(pins) == [4, 5, 6, 7]
    assert queued(pool) == ([8, 9, 1, 2], [])
    pool.free_blocks([*held, *new])
    assert queued(pool) == ([8, 9, 1, 2, 3], [4, 5, 6, 7])
    # A window that does not fit as a whole serves nobody.
    assert not pin_each(pins, take_hashed(pool, 5))
    assert pinned_ids(pins) == [4, 5, 6, 7]


def test_pinning_again_makes_young() -> None:
    pool, pins = pinning_pool(max_pinned=3)
    blocks = take_hashed(pool, 4)
    pin_each(pins, blocks[:3])
    pin_each(pins, blocks[:1])
    pin_each(pins, blocks[3:])
    assert pinned_ids(pins) == [3, 1, 4]


def test_making_room_unpins_no_more_than_it_must() -> None:
    pool, pins = pinning_pool()
    blocks = take_hashed(pool, 3)
    pin_each(pins, blocks)
    pool.free_blocks(blocks)
    # Six are free and not pinned.
    pins.make_room(6)
    assert pins.num_blocks == 3
    pins.make_room(8)
    assert queued(pool) == ([4, 5, 6, 7, 8, 9, 1, 2], [3])
    assert pinned_ids(pins) == [3]
    assert blocks[0].block_hash is not None
    pins.make_room(11)
    assert pins.num_blocks == 0
    pins.make_room(11)
    assert queued(pool) == ([4, 5, 6, 7, 8, 9, 1, 2, 3], [])


def test_evicting_unpins() -> None:
    pool, pins = pinning_pool()
    free, held = take_hashed(pool, 2)
    pin_each(pins, [free, held])
    pool.free_blocks([free])
    pool.evict_blocks([free.block_id, held.block_id])
    assert pins.num_blocks == 0
    # Scratch now, so it is reused first.
    assert queued(pool) == ([1, 3, 4, 5, 6, 7, 8, 9], [])
    pool.free_blocks([held])
    assert queued(pool)[1] == []
    check_pool(pool, [])


def test_reset_unpins_single_blocks() -> None:
    pool, pins = pinning_pool()
    blocks = take_hashed(pool, 2)
    pin_each(pins, blocks)
    assert not pool.reset_prefix_cache()
    assert pins.num_blocks == 2
    pool.free_blocks(blocks)
    assert pool.reset_prefix_cache()
    assert pins.num_blocks == 0
    assert pool.get_num_free_blocks() == 9
    assert queued(pool)[1] == []
    check_pool(pool, [])


def test_invariants_notice_a_broken_tier() -> None:
    pool, pins = pinning_pool()
    blocks = take_hashed(pool, 2)
    pin_each(pins, blocks)
    pool.free_blocks(blocks)
    check_pool(pool, [])
    pool._tier_of[blocks[0].block_id] = Tier.REGULAR
    with pytest.raises(InvariantError, match="I3"):
        check_pool(pool, [])
    pool._tier_of[blocks[0].block_id] = Tier.PINNED
    pins.max_blocks = 1
    with pytest.raises(InvariantError, match="cap"):
        check_pool(pool, [])
    pins.max_blocks = 4
    pool.free_block_queue.append(pool.tiers[Tier.PINNED].popleft())
    with pytest.raises(InvariantError, match="I3"):
        check_pool(pool, [])
