"""Tiers, unit keys and checkpoint records of the pool."""

import pytest
from vllm.v1.core.unit_block_pool import Checkpoint, GhostList, Tier, UnitBlockPool

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash, salt_digest


def h(name: str) -> BlockHash:
    return BlockHash(name.encode())


def make_pool(num_blocks: int = 9) -> UnitBlockPool:
    return UnitBlockPool(num_blocks, dense_group_ids=[0, 1])


def test_the_null_block_is_never_given_out() -> None:
    pool = make_pool()
    assert pool.null_block.block_id == 0
    assert pool.get_num_free_blocks() == 8
    taken = pool.get_new_blocks(8)
    assert all(not block.is_null for block in taken)
    with pytest.raises(ValueError, match="Cannot get 1 blocks: only 0 are free"):
        pool.get_new_blocks(1)
    pool.free_blocks([pool.null_block])
    pool.touch([pool.null_block])
    assert pool.get_num_free_blocks() == 0


def test_scratch_is_reused_before_cached_and_cached_in_lru_order() -> None:
    pool = make_pool()
    a, b, c = pool.get_new_blocks(3)
    for name, block in (("a", a), ("b", b)):
        pool.add_key(block, 0, h(name))
    pool.free_blocks([b, a, c])
    assert [pool.tier_of(x) for x in (a, b, c)] == [Tier.REGULAR, Tier.REGULAR, Tier.SCRATCH]
    taken = pool.get_new_blocks(6)
    assert a not in taken
    assert b not in taken
    assert taken[0] is c
    assert pool.get_new_blocks(1) == [b]
    assert pool.get_cached_block(h("b"), 0) is None
    assert h("b") in pool.ghosts
    assert pool.get_cached_block(h("a"), 0) is a


def test_a_touched_block_leaves_its_tier_and_keeps_its_keys() -> None:
    pool = make_pool()
    (a,) = pool.get_new_blocks(1)
    pool.add_key(a, 1, h("x"))
    pool.add_key(a, 1, h("y"))
    pool.free_blocks([a])
    pool.touch([a])
    assert pool.tier_of(a) is None
    assert a.ref_cnt == 1
    assert list(pool.keys_of(a)) == [h("x"), h("y")]
    assert pool.get_cached_block(h("y"), 1) is a
    assert pool.get_cached_block(h("y"), 0) is None


def test_equal_keys_on_two_blocks_survive_the_loss_of_one() -> None:
    pool = make_pool(3)
    a, b = pool.get_new_blocks(2)
    pool.add_key(a, 0, h("k"))
    pool.add_key(b, 0, h("k"))
    assert pool.num_index_entries() == 2
    pool.free_blocks([a])
    (again,) = pool.get_new_blocks(1)
    assert again is a
    assert pool.get_cached_block(h("k"), 0) is b
    assert pool.holds_key(0, h("k"), b)
    assert not pool.holds_key(0, h("k"), a)


def test_losing_one_block_dissolves_a_checkpoint_and_frees_the_rest_to_scratch() -> None:
    pool = make_pool(5)
    a, b, c, d = pool.get_new_blocks(4)
    both = Checkpoint(h("p"), 64, ((a, b), (c,)))
    shared = Checkpoint(h("q"), 96, ((b,), (d,)))
    assert pool.add_checkpoint(both)
    assert pool.add_checkpoint(shared)
    pool.free_blocks([a, b, c, d])
    assert {pool.tier_of(x) for x in (a, b, c, d)} == {Tier.REGULAR}
    assert pool.get_new_blocks(1) == [a]
    assert h("p") not in pool.checkpoints
    assert h("p") in pool.checkpoint_ghosts
    assert pool.tier_of(c) is Tier.SCRATCH
    assert pool.tier_of(b) is Tier.REGULAR, "another checkpoint still needs it"
    assert pool.get_new_blocks(1) == [c]
    assert pool.checkpoints[h("q")] is shared


def test_the_first_checkpoint_of_a_prefix_stays_and_learns_to_be_kept() -> None:
    pool = make_pool()
    a, b = pool.get_new_blocks(2)
    first = Checkpoint(h("p"), 32, ((a,),))
    assert pool.add_checkpoint(first)
    assert not pool.add_checkpoint(Checkpoint(h("p"), 32, ((b,),), is_kept=True))
    assert pool.checkpoints[h("p")] is first
    assert first.is_kept
    assert not pool.records_of(b)


def test_dissolving_a_record_that_is_gone_changes_nothing() -> None:
    pool = make_pool()
    (a,) = pool.get_new_blocks(1)
    old = Checkpoint(h("p"), 32, ((a,),))
    pool.add_checkpoint(old)
    pool.dissolve(old)
    new = Checkpoint(h("p"), 32, ((a,),))
    pool.add_checkpoint(new)
    pool.dissolve(old)
    assert pool.checkpoints[h("p")] is new


def test_reset_forgets_everything_but_not_under_running_requests() -> None:
    pool = make_pool()
    a, b = pool.get_new_blocks(2)
    pool.add_key(a, 0, h("k"))
    pool.add_checkpoint(Checkpoint(h("k"), 32, ((b,),)))
    assert not pool.reset_prefix_cache()
    assert pool.get_cached_block(h("k"), 0) is a
    pool.free_blocks([a, b])
    assert pool.reset_prefix_cache()
    assert pool.get_cached_block(h("k"), 0) is None
    assert not pool.checkpoints
    assert {pool.tier_of(x) for x in pool.blocks[1:]} == {Tier.SCRATCH}
    assert h("k") not in pool.ghosts


def test_ghosts_are_bounded_and_drop_the_oldest() -> None:
    ghosts = GhostList(capacity=2)
    for name in ("a", "b", "a", "c"):
        ghosts.add(h(name))
    assert h("b") not in ghosts
    assert h("a") in ghosts
    ghosts.discard([h("a")])
    assert h("a") not in ghosts
    ghosts.discard([h("never seen")])


def test_usage_counts_held_blocks_only() -> None:
    pool = make_pool(5)
    a, _ = pool.get_new_blocks(2)
    assert pool.get_usage() == 0.5
    pool.add_key(a, 0, h("k"))
    pool.free_blocks([a])
    assert pool.get_usage() == 0.25


def test_a_reset_is_one_event_after_what_happened_before() -> None:
    pool = UnitBlockPool(9, [0, 1], enable_kv_cache_events=True)
    blocks = pool.get_new_blocks(8)
    for i, block in enumerate(blocks):
        pool.add_key(block, i % 2, h(f"p{i}"))
    pool.record_stored([h("p0")], None, [1, 2], 2, 0)
    pool.free_blocks(blocks)
    pool.get_new_blocks(1)  # takes the first one's key away
    removed = BlockRemoved([maybe_convert_block_hash(h("p0"))], "GPU", 0)
    assert not pool.reset_prefix_cache()
    pool.free_blocks(blocks[:1])
    assert pool.reset_prefix_cache()
    stored, *rest = pool.take_events()
    assert isinstance(stored, BlockStored)
    assert rest == [removed, AllBlocksCleared()]
    assert pool.take_events() == []
    assert all(not index for index in pool.index.values())


def test_a_stored_event_names_a_salt_by_its_digest_beside_the_first_hash() -> None:
    pool = UnitBlockPool(9, [0], enable_kv_cache_events=True)
    pool.record_stored([h("a"), h("b")], None, [1, 2, 3, 4], 2, 0, "secret")
    pool.record_stored([h("c")], h("b"), [5, 6], 2, 0)
    salted, plain = pool.take_events()
    assert isinstance(salted, BlockStored)
    assert isinstance(plain, BlockStored)
    assert salted.extra_keys == [(salt_digest("secret"),), None]
    assert plain.extra_keys is None
