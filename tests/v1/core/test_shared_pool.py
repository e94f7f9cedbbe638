"""Tenants' shares of a real cache: a neighbour's flood, and who gives."""

from collections import Counter
from typing import Any

import pytest

from tests.v1.core.sched.builders import answer, make_request, make_v4_scheduler
from vllm.config.tenants import Tenant, TenantsConfig
from vllm.exceptions import ConfigError
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.shared_pool import SharedPool

UNIT = 32
LENGTH = 320


def check_owners(pool: Any) -> None:
    """Compare what a pool counts with what its blocks say."""
    assert isinstance(pool, SharedPool)
    held: Counter[int] = Counter()
    free: Counter[int] = Counter()
    for block in pool.blocks[1:]:
        owner = pool.owner_of(block)
        if owner is None:
            assert not block.ref_cnt
            assert not pool.index.is_cached(block)
        else:
            (held if block.ref_cnt else free)[owner] += 1
    pinned = Counter(map(pool.owner_of, pool.pinned_queue.get_all_free_blocks()))
    for number, owned in enumerate(pool.owned()):
        found = owned.held - pinned[number], owned.free + pinned[number]
        assert found == (held[number], free[number])


def make(*tenants: Tenant, num_blocks: int = 400) -> Scheduler:
    return make_v4_scheduler(
        num_blocks,
        UNIT,
        tenants=TenantsConfig.of(*tenants),
        max_model_len=512,
        max_num_batched_tokens=512,
    )


def add(scheduler: Scheduler, tenant: str, number: int, max_tokens: int = 2) -> None:
    """Queue a prompt of a tenant."""
    first = (ord(tenant[0]) << 32) + number * 1000
    request = make_request(
        f"{tenant}-{number}-{scheduler.kv_cache_manager.block_pool.num_scratch_blocks}",
        range(first, first + LENGTH),
        max_tokens,
        block_size=UNIT,
        tenant=tenant,
    )
    scheduler.add_request(request)


def finish(scheduler: Scheduler) -> int | None:
    """Run what is queued to its end; return the last hit in tokens."""
    hit = None
    while scheduler.has_unfinished_requests():
        output = scheduler.schedule()
        tokens = {
            name: [7]
            for name in output.num_scheduled_tokens
            if not scheduler.requests[name].is_prefill_chunk
        }
        for bundle in scheduler.update_from_output(output, answer(output, tokens)).values():
            for item in bundle.outputs:
                if item.prefill_stats is not None:
                    hit = item.prefill_stats.num_cached_tokens
        check_owners(scheduler.kv_cache_manager.block_pool)
    return hit


def run(scheduler: Scheduler, tenant: str, number: int) -> int:
    """Run a prompt of a tenant; return its hit in tokens."""
    add(scheduler, tenant, number)
    hit = finish(scheduler)
    assert hit is not None
    return hit


def blocks_of(scheduler: Scheduler, tenant: str) -> int:
    pool = scheduler.kv_cache_manager.block_pool
    assert isinstance(pool, SharedPool)
    return sum(pool.owned()[pool.shares.find(tenant)])


@pytest.mark.parametrize(("guaranteed", "hits"), [(0.3, True), (0.0, False)])
def test_a_flood_does_not_flush_what_is_guaranteed(guaranteed: float, hits: bool):
    scheduler = make(Tenant("a", cache_guaranteed=guaranteed), Tenant("c", cache_at_most=0.9))
    run(scheduler, "a", 0)
    assert run(scheduler, "a", 0) > 0.9 * LENGTH - UNIT
    own = blocks_of(scheduler, "a") if guaranteed else 0
    assert own <= 0.3 * 399
    for number in range(40):
        run(scheduler, "flood", number)
    assert (run(scheduler, "a", 0) > 0.9 * LENGTH - UNIT) is hits


def test_requests_wait_rather_than_take_what_is_guaranteed():
    """Many at a time want more than there is beside it: they wait, and give way to each other."""
    scheduler = make(Tenant("a", cache_guaranteed=0.3))
    run(scheduler, "a", 0)
    held: list[int] = []
    for number in range(12):
        add(scheduler, "flood", number, max_tokens=100)
    pool = scheduler.kv_cache_manager.block_pool
    while scheduler.has_unfinished_requests():
        output = scheduler.schedule()
        held.append(399 - pool.get_num_free_blocks())
        tokens = {
            name: [7]
            for name in output.num_scheduled_tokens
            if not scheduler.requests[name].is_prefill_chunk
        }
        scheduler.update_from_output(output, answer(output, tokens))
    # There was a time when all that others may have was held.
    assert max(held) > 0.8 * (399 - blocks_of(scheduler, "a"))
    assert run(scheduler, "a", 0) > 0.9 * LENGTH - UNIT


def test_a_guarantee_is_no_limit():
    scheduler = make(Tenant("a", cache_guaranteed=0.1))
    for number in range(40):
        run(scheduler, "a", number)
    assert blocks_of(scheduler, "a") > 0.9 * 399
    # What is above it goes when others want it.
    for number in range(40):
        run(scheduler, "flood", number)
    assert 0.1 * 399 - 1 <= blocks_of(scheduler, "a") < 0.55 * 399


def test_one_at_its_most_flushes_itself():
    scheduler = make(Tenant("c", cache_at_most=0.25))
    run(scheduler, "flood", 0)
    for number in range(40):
        run(scheduler, "c", number)
    assert blocks_of(scheduler, "c") <= 0.25 * 399 + 1
    assert run(scheduler, "flood", 0) > 0.9 * LENGTH - UNIT


def test_guarantees_must_leave_room_for_the_longest_request():
    with pytest.raises(
        ConfigError, match=r"guaranteed 379 of 399 blocks .* lower cache_guaranteed"
    ):
        make(Tenant("a", cache_guaranteed=0.95))


def test_a_reset_leaves_nobody_anything():
    scheduler = make(Tenant("a", cache_guaranteed=0.3))
    run(scheduler, "a", 0)
    scheduler.kv_cache_manager.new_step_starts()
    assert scheduler.reset_prefix_cache()
    check_owners(scheduler.kv_cache_manager.block_pool)
    assert blocks_of(scheduler, "a") == 0


def test_partitions_are_counted_again_only_where_something_changed(monkeypatch) -> None:
    counted: list[int] = []
    count, take = SharedPool._count_owned, SharedPool._take_from

    def note(pool: SharedPool, partition: int) -> Any:
        counted.append(partition)
        return count(pool, partition)

    def compare(pool: SharedPool, owned: Any) -> Any:
        assert owned == [count(pool, i) for i in range(pool.num_partitions)]
        before = len(counted)
        block = take(pool, owned)
        assert len(counted) == before
        return block

    monkeypatch.setattr(SharedPool, "_count_owned", note)
    monkeypatch.setattr(SharedPool, "_take_from", compare)
    others = [Tenant(f"t{i}", cache_guaranteed=0.02) for i in range(12)]
    scheduler = make(*others, Tenant("a", cache_guaranteed=0.2), Tenant("b", cache_at_most=0.5))
    for number in range(6):
        run(scheduler, "b", number)
        run(scheduler, "a", number)
        run(scheduler, "t", number)
    pool = scheduler.kv_cache_manager.block_pool
    num_taken = 40
    counted.clear()
    pool.free_blocks(reversed(pool.get_new_blocks(num_taken)))
    # All once, and then for each block who takes and who gives.
    assert len(counted) <= pool.num_partitions + 3 * num_taken
