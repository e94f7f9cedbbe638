"""The checker notices every kind of breach, by number."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from vllm.v1.core.unit_coordinator import UnitKVCacheCoordinator

from tests.v1.core.unit_cache_driver import Driver
from tests.v1.core.v4_geometry import v4_config
from vllm.exceptions import InvariantError
from vllm.v1.core.invariants import check_unit_cache
from vllm.v1.core.policy.retention import AUTO


def running() -> tuple[UnitKVCacheCoordinator, dict[str, int]]:
    """One finished and one running request, so that everything has something in it."""
    policy = replace(AUTO, pinned_share=0.5)
    driver = Driver(v4_config(32, 400), 2048, seed=0, policy=policy)
    rng = random.Random(1)
    tokens = [rng.randrange(1000) for _ in range(500)]
    driver.add(tokens, 2)
    driver.run_all()
    request = driver.add([*tokens[:300], *tokens[:100]], 30)
    driver.step(2048)
    return driver.manager.coordinator, {request.request_id: request.num_computed_tokens}


def lose_a_free_block(c: UnitKVCacheCoordinator, _: dict[str, int]) -> None:
    c.block_pool.tiers[0].popleft()


def count_once_too_often(c: UnitKVCacheCoordinator, computed: dict[str, int]) -> None:
    c.dense[0].tables[next(iter(computed))][0].ref_cnt += 1


def believe_in_another_tier(c: UnitKVCacheCoordinator, _: dict[str, int]) -> None:
    block = c.block_pool.tiers[0].get_all_free_blocks()[0]
    c.block_pool._tier_of[block.block_id] = 2


def stand_in_another_tier(c: UnitKVCacheCoordinator, _: dict[str, int]) -> None:
    pool = c.block_pool
    block = pool.tiers[3].popleft()
    pool.tiers[2].append(block)
    pool._tier_of[block.block_id] = 2


def pin_more_than_the_cap(c: UnitKVCacheCoordinator, _: dict[str, int]) -> None:
    assert c.block_pool.pinned is not None
    c.block_pool.pinned.max_blocks = 1


def pin_what_is_withdrawn(c: UnitKVCacheCoordinator, _: dict[str, int]) -> None:
    assert c.block_pool.pinned is not None
    record = next(iter(c.block_pool.pinned))
    c.block_pool.dissolve(record)
    c.block_pool.pinned.add(record)


def forget_a_pinned_block(c: UnitKVCacheCoordinator, _: dict[str, int]) -> None:
    assert c.block_pool.pinned is not None
    # A held one: where it stands does not tell.
    held = next(i for i in c.block_pool.pinned._num_pins if c.block_pool.blocks[i].ref_cnt)
    del c.block_pool.pinned._num_pins[held]


def forget_an_index_entry(c: UnitKVCacheCoordinator, _: dict[str, int]) -> None:
    c.block_pool.index[c.dense[0].geometry.group_id].popitem()


def misfile_a_record(c: UnitKVCacheCoordinator, _: dict[str, int]) -> None:
    record = next(iter(c.block_pool.checkpoints.values()))
    c.block_pool.checkpoints[type(record.prefix_hash)(b"elsewhere")] = record


def shorten_a_record(c: UnitKVCacheCoordinator, _: dict[str, int]) -> None:
    record = next(iter(c.block_pool.checkpoints.values()))
    record.blocks = (record.blocks[0][:-1], *record.blocks[1:])


def lose_a_dense_block(c: UnitKVCacheCoordinator, computed: dict[str, int]) -> None:
    table = c.dense[0].tables[next(iter(computed))]
    c.block_pool.free_blocks([table.pop()])


def lose_a_window_block(c: UnitKVCacheCoordinator, computed: dict[str, int]) -> None:
    table = c.windows[0].tables[next(iter(computed))]
    c.block_pool.free_blocks([table.blocks[-1]])
    table.blocks[-1] = c.block_pool.null_block


@pytest.mark.parametrize(
    ("breach", "number"),
    [
        (lose_a_free_block, "I1"),
        (count_once_too_often, "I2"),
        (believe_in_another_tier, "I3"),
        (stand_in_another_tier, "I3"),
        (pin_more_than_the_cap, "I3"),
        (pin_what_is_withdrawn, r"I[34]"),
        (forget_a_pinned_block, "I4"),
        (forget_an_index_entry, "I4"),
        (misfile_a_record, "I4"),
        (shorten_a_record, "I4"),
        (lose_a_dense_block, "I5"),
        (lose_a_window_block, "I5"),
    ],
)
def test_each_breach_is_named(
    breach: Callable[[UnitKVCacheCoordinator, dict[str, int]], None], number: str
) -> None:
    coordinator, computed = running()
    check_unit_cache(coordinator, computed)
    breach(coordinator, computed)
    with pytest.raises(InvariantError, match=number):
        check_unit_cache(coordinator, computed)


def test_coverage_is_checked_only_when_positions_are_given() -> None:
    coordinator, computed = running()
    lose_a_window_block(coordinator, computed)
    check_unit_cache(coordinator)
