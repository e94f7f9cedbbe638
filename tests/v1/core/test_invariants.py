"""The checker notices every kind of breach, by number."""

import random
from collections.abc import Callable

import pytest

from tests.v1.core.cache_helpers import make_config, make_manager, make_request, start
from tests.v1.core.specs import full
from tests.v1.core.unit_cache_driver import Driver
from tests.v1.core.v4_geometry import v4_config
from vllm.exceptions import InvariantError
from vllm.v1.core.invariants import check_cache
from vllm.v1.core.kv_cache_coordinator import CheckpointCoordinator
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId
from vllm.v1.core.retention.pinning import PinSettings
from vllm.v1.core.retention.tiers import Tier
from vllm.v1.core.values.hit import Checkpoint

# ---- hits at whole blocks ----------------------------------------------------------------------


def used_manager() -> KVCacheManager:
    manager = make_manager(make_config(8, [full()]))
    start(manager, make_request("0", range(40)))
    manager.check_invariants()
    return manager


def lose_a_hold(manager: KVCacheManager) -> None:
    manager.block_pool.blocks[1].ref_cnt += 1


def queue_a_held_block(manager: KVCacheManager) -> None:
    manager.block_pool.free_block_queue.append(manager.block_pool.blocks[1])


def lose_a_free_block(manager: KVCacheManager) -> None:
    manager.block_pool.free_block_queue.popleft()


def miscount(manager: KVCacheManager) -> None:
    queue = manager.block_pool.free_block_queue
    queue.fake_free_list_head.next_free_block = queue.fake_free_list_tail


def hash_the_null_block(manager: KVCacheManager) -> None:
    manager.block_pool.null_block.block_hash = BlockHashWithGroupId(b"x")


def lose_an_index_entry(manager: KVCacheManager) -> None:
    manager.block_pool.cached_block_hash_to_block._cache.popitem()


def lose_a_hash(manager: KVCacheManager) -> None:
    manager.block_pool.blocks[1].reset_hash()


@pytest.mark.parametrize(
    ("breach", "number"),
    [
        (lose_a_hold, "I2"),
        (queue_a_held_block, "I1"),
        (lose_a_free_block, "I1"),
        (miscount, "I3"),
        (hash_the_null_block, "I4"),
        (lose_an_index_entry, "I4"),
        (lose_a_hash, "I4"),
    ],
)
def test_a_breach_is_named(breach: Callable[[KVCacheManager], None], number: str) -> None:
    manager = used_manager()
    breach(manager)
    with pytest.raises(InvariantError, match=number):
        manager.check_invariants()


# ---- hits at one unit --------------------------------------------------------------------------


def running() -> tuple[CheckpointCoordinator, dict[str, int]]:
    """One finished and one running request, so that everything has something in it."""
    driver = Driver(v4_config(32, 400), 2048, seed=0, pinning=PinSettings(0.5))
    rng = random.Random(1)
    tokens = [rng.randrange(1000) for _ in range(500)]
    driver.add(tokens, 2)
    driver.run_all()
    request = driver.add([*tokens[:300], *tokens[:100]], 30)
    driver.step(2048)
    return driver.coordinator, {request.request_id: request.num_computed_tokens}


def lose_a_free_block(c: CheckpointCoordinator, _: dict[str, int]) -> None:
    c.block_pool.tiers[0].popleft()


def count_once_too_often(c: CheckpointCoordinator, computed: dict[str, int]) -> None:
    c.requests[next(iter(computed))].dense[0].blocks[0].ref_cnt += 1


def believe_in_another_tier(c: CheckpointCoordinator, _: dict[str, int]) -> None:
    block = c.block_pool.tiers[0].get_all_free_blocks()[0]
    c.block_pool._tier_of[block.block_id] = Tier.REGULAR


def stand_in_another_tier(c: CheckpointCoordinator, _: dict[str, int]) -> None:
    pool = c.block_pool
    block = pool.tiers[Tier.PINNED].popleft()
    pool.tiers[Tier.REGULAR].append(block)
    pool._tier_of[block.block_id] = Tier.REGULAR


def pin_more_than_the_cap(c: CheckpointCoordinator, _: dict[str, int]) -> None:
    assert c.block_pool.pins is not None
    c.block_pool.pins.max_blocks = 1


def pin_what_is_withdrawn(c: CheckpointCoordinator, _: dict[str, int]) -> None:
    assert c.block_pool.pins is not None
    record = next(iter(c.block_pool.pins))
    assert isinstance(record, Checkpoint)
    c.store.dissolve(record)
    assert c.block_pool.pins.pin({record: [*record.all_blocks()]})


def forget_a_pinned_block(c: CheckpointCoordinator, _: dict[str, int]) -> None:
    assert c.block_pool.pins is not None
    # A held one: where it stands does not tell.
    held = next(i for i in c.block_pool.pins._pins_of if c.block_pool.blocks[i].ref_cnt)
    del c.block_pool.pins._pins_of[held]


def forget_an_index_entry(c: CheckpointCoordinator, _: dict[str, int]) -> None:
    c.index.keys[c.geometry.dense[0].group_id].popitem()


def misfile_a_record(c: CheckpointCoordinator, _: dict[str, int]) -> None:
    record = next(iter(c.index.checkpoints.values()))
    c.index.checkpoints[type(record.prefix_hash)(b"elsewhere")] = record


def shorten_a_record(c: CheckpointCoordinator, _: dict[str, int]) -> None:
    record = next(iter(c.index.checkpoints.values()))
    record.blocks = (record.blocks[0][:-1], *record.blocks[1:])


def lose_a_dense_block(c: CheckpointCoordinator, computed: dict[str, int]) -> None:
    table = c.requests[next(iter(computed))].dense[0]
    c.block_pool.free_blocks([table.blocks.pop()])


def lose_a_window_block(c: CheckpointCoordinator, computed: dict[str, int]) -> None:
    cache = c.requests[next(iter(computed))]
    table = cache.windows[0]
    c._publisher.give_back(cache, [table.blocks[-1]])
    table.blocks[-1] = c.block_pool.null_block


def give_back_without_a_word(c: CheckpointCoordinator, computed: dict[str, int]) -> None:
    """A free block belongs to a checkpoint whose maker never said that it gave it back."""
    tables = [table for name in computed for table in c.requests[name].windows]
    held = [block for record in c.index.members._open for block in record.all_blocks()]
    table, block = next((t, b) for t in tables for b in t.blocks if b in held and b.ref_cnt == 1)
    table.blocks[table.blocks.index(block)] = c.block_pool.null_block
    c.block_pool.free_blocks([block])


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
        (give_back_without_a_word, "I4"),
    ],
)
def test_each_breach_is_named(
    breach: Callable[[CheckpointCoordinator, dict[str, int]], None], number: str
) -> None:
    coordinator, computed = running()
    check_cache(coordinator, computed)
    breach(coordinator, computed)
    with pytest.raises(InvariantError, match=number):
        check_cache(coordinator, computed)


def test_coverage_is_checked_only_when_positions_are_given() -> None:
    coordinator, computed = running()
    lose_a_window_block(coordinator, computed)
    check_cache(coordinator)
