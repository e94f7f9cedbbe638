"""Checkpoints from publication to eviction."""

from typing import Any

from tests.v1.core.prefix.unit_caches import UnitCache, h, make_cache
from vllm.v1.core.retention.standing import CheckpointStanding as Standing
from vllm.v1.core.retention.tiers import Tier
from vllm.v1.core.values.hit import Checkpoint


def freed(cache: UnitCache, name: str, **fields: Any) -> Checkpoint:
    """A checkpoint of two blocks that nobody holds any more."""
    blocks = cache.pool.get_new_blocks(2)
    record = cache.add_record(name, *blocks, **fields)
    cache.pool.free_blocks(blocks)
    return record


def tier(cache: UnitCache, record: Checkpoint) -> Tier | None:
    (found,) = set(cache.tiers(*record.all_blocks()))
    return found


def test_the_first_checkpoint_of_a_prefix_stays_and_learns_to_be_kept() -> None:
    cache = make_cache()
    a, b = cache.pool.get_new_blocks(2)
    first = Checkpoint(h("p"), 32, ((a,),))
    assert cache.store.publish(first, "one")
    kept_by_b = Checkpoint(h("p"), 32, ((b,),), standing=Standing.KEPT)
    assert not cache.store.publish(kept_by_b, "other")
    assert cache.index.checkpoints[h("p")] is first
    assert cache.store.get(h("p")) is first
    assert first.standing is Standing.KEPT
    assert not cache.index.checkpoints_of(b)


def test_dissolving_a_record_that_is_gone_changes_nothing() -> None:
    cache = make_cache()
    (a,) = cache.pool.get_new_blocks(1)
    old = Checkpoint(h("p"), 32, ((a,),))
    cache.store.publish(old, "one")
    cache.store.dissolve(old)
    new = Checkpoint(h("p"), 32, ((a,),))
    cache.store.publish(new, "two")
    cache.store.dissolve(old)
    assert cache.index.checkpoints[h("p")] is new


def test_a_cold_checkpoint_is_warmed_by_a_second_that_is_not() -> None:
    cache = make_cache()
    record = freed(cache, "p", is_lean=False)
    assert tier(cache, record) is Tier.COLD
    assert not cache.store.publish(Checkpoint(h("p"), 32, ((), ()), is_lean=False), "other")
    assert tier(cache, record) is Tier.COLD
    assert not cache.store.publish(
        Checkpoint(h("p"), 32, ((), ()), standing=Standing.JUNCTION), "other"
    )
    assert record.standing is Standing.JUNCTION
    assert tier(cache, record) is Tier.REGULAR


def test_a_junction_is_warm() -> None:
    cache = make_cache()
    record = freed(cache, "p", is_lean=False)
    cache.store.mark_junction(record)
    assert tier(cache, record) is Tier.REGULAR


def test_spare_checkpoints_go_before_all_others_until_they_are_hit_or_asked_for() -> None:
    cache = make_cache(ranks=True)
    end = freed(cache, "e", standing=Standing.SPARE)
    filler = freed(cache, "f", standing=Standing.FILLER)
    lean = freed(cache, "l", standing=Standing.SPARE)
    assert [tier(cache, r) for r in (end, filler, lean)] == [Tier.SPARE, Tier.FILLER, Tier.SPARE]
    cache.store.hit(end, lean, "next")
    assert (end.standing, lean.standing) == (Standing.LEFT, Standing.LEFT)
    assert [tier(cache, r) for r in (end, lean)] == [Tier.LIVE, Tier.REGULAR]
    assert (end.num_hits, end.users, lean.num_hits, lean.users) == (1, ("next",), 0, ())
    block = cache.pool.get_new_blocks(1)
    assert not cache.store.publish(
        Checkpoint(h("f"), 32, (tuple(block),), standing=Standing.KEPT), "other"
    )
    assert tier(cache, filler) is Tier.REGULAR
    assert filler.standing is Standing.KEPT


def test_a_spare_checkpoint_changes_nothing_where_one_stands() -> None:
    cache = make_cache(ranks=True)
    record = freed(cache, "p", is_lean=False)
    block = cache.pool.get_new_blocks(1)
    assert not cache.store.publish(
        Checkpoint(h("p"), 32, (tuple(block),), standing=Standing.SPARE), "other"
    )
    assert tier(cache, record) is Tier.COLD


def test_those_of_running_requests_are_the_last_to_go() -> None:
    cache = make_cache(ranks=True)
    store = cache.store
    (block,) = cache.pool.get_new_blocks(1)
    record = Checkpoint(h("p"), 32, ((block,),), standing=Standing.KEPT)
    store.publish(record, "one")
    cache.pool.free_blocks([block])
    assert tier(cache, record) is Tier.LIVE
    store.leave([record], [], "one", again=False)
    assert tier(cache, record) is Tier.REGULAR
    store.hit(record, None, "two")
    cache.pool.touch([block])
    cache.pool.free_blocks([block])
    assert tier(cache, record) is Tier.LIVE
    store.leave([], [record], "two", again=False)
    assert tier(cache, record) is Tier.REGULAR


def test_what_is_cold_for_good_stays_cold_when_hit() -> None:
    cache = make_cache()
    record = freed(cache, "p", is_lean=False)
    cache.store.hit(record, None, "one")
    assert tier(cache, record) is Tier.COLD


def conversation(cache: UnitCache) -> tuple[Checkpoint, Checkpoint, Checkpoint]:
    """Two turns that ended: the second resumed where the first had ended, and made a third."""
    first, second, third = (freed(cache, name) for name in "123")
    cache.store.leave([first], [], "one", again=False)
    cache.store.hit(first, None, "one")
    cache.store.leave([second], [first], "one", again=False)
    cache.store.hit(second, None, "one")
    return first, second, third


def test_the_turn_before_last_is_superseded() -> None:
    cache = make_cache()
    first, second, third = conversation(cache)
    assert tier(cache, first) is Tier.REGULAR
    cache.store.leave([third], [second], "one", again=False)
    assert [tier(cache, r) for r in (first, second, third)] == [
        Tier.COLD,
        Tier.REGULAR,
        Tier.REGULAR,
    ]
    assert second.older == ()
    assert third.older == (second,)


def test_a_preempted_request_goes_on_with_its_turn() -> None:
    cache = make_cache()
    first, second, third = conversation(cache)
    cache.store.leave([third], [second], "one", again=True)
    assert tier(cache, first) is Tier.REGULAR
    assert third.older == (first,)


def test_junctions_running_origins_and_other_policies_are_not_superseded() -> None:
    for spare in ("junction", "live", "policy"):
        cache = make_cache(supersedes=spare != "policy")
        first, second, third = conversation(cache)
        if spare == "junction":
            cache.store.mark_junction(first)
        if spare == "live":
            cache.store.hit(first, None, "one")
        cache.store.leave([third], [second], "one", again=False)
        assert tier(cache, first) is Tier.REGULAR, spare


def test_what_a_request_leaves_behind_ages_from_then() -> None:
    cache = make_cache(5, windows=[1, 2])
    old, young = freed(cache, "o"), freed(cache, "y")
    cache.store.leave([old], [], "one", again=False)
    assert set(cache.pool.get_new_blocks(2)) == set(young.all_blocks())


def test_a_session_supersedes_its_own_alone() -> None:
    for own, after in ((7, Tier.COLD), (8, Tier.REGULAR), (None, Tier.REGULAR)):
        cache = make_cache()
        first, second, third = (freed(cache, name, session=own) for name in "123")
        cache.store.leave([first], [], "one", again=False, session=own)
        cache.store.hit(first, None, "one", own)
        cache.store.leave([second], [first], "one", again=False, session=own)
        cache.store.hit(second, None, "two", 7)
        cache.store.leave([third], [second], "two", again=False, session=7)
        assert tier(cache, first) is after, own


def test_the_end_of_a_session_makes_spare_what_only_it_used() -> None:
    cache = make_cache(32)
    alone, shared, other, unnamed, running = (
        freed(cache, name, session=session)
        for name, session in zip("asour", (7, 7, 8, None, 7), strict=True)
    )
    for record in (alone, running):
        cache.store.hit(record, None, "one", 7)
        cache.store.leave([], [record], "one", again=False, session=7)
    cache.store.hit(shared, None, "two", None)
    cache.store.leave([], [shared], "two", again=False)
    cache.store.hit(running, None, "three", 7)
    assert cache.store.end_session(7) == [alone]
    assert alone.standing is Standing.SPARE
    assert cache.store.end_session(7) == [alone]
    for record in (shared, other, unnamed, running):
        assert record.standing is not Standing.SPARE
    assert cache.store.end_session(9) == []
