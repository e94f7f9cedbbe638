"""Pinned checkpoints: the pins by themselves, in the pool, and through the unit manager."""

import logging
import random
from dataclasses import replace

import pytest
from vllm.v1.core.pinned_checkpoints import PinnedCheckpoints
from vllm.v1.core.unit_block_pool import Checkpoint, Tier, UnitBlockPool
from vllm.v1.core.unit_coordinator import UnitKVCacheCoordinator

from tests.v1.core.unit_cache_driver import Driver
from tests.v1.core.v4_geometry import v4_config
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock
from vllm.v1.core.policy.geometry import CacheGeometry
from vllm.v1.core.policy.retention import AUTO, RetentionPolicy, parse_retention
from vllm.v1.core.policy.sizes import max_checkpoint_blocks

NONE = RetentionPolicy("ends only", supersedes=False, keeps_coarse=False)


def h(name: str) -> BlockHash:
    return BlockHash(name.encode())


def make_pool(num_blocks: int = 10, max_pinned: int = 4) -> UnitBlockPool:
    return UnitBlockPool(num_blocks, [0], window_group_ids=[1, 2], max_pinned=max_pinned)


def add_record(pool: UnitBlockPool, name: str, *blocks: KVCacheBlock) -> Checkpoint:
    record = Checkpoint(h(name), 32, (blocks[:1], blocks[1:]))
    assert pool.add_checkpoint(record)
    return record


def tiers(pool: UnitBlockPool, *blocks: KVCacheBlock) -> list[Tier | None]:
    return [pool.tier_of(block) for block in blocks]


def pins_of(pool: UnitBlockPool) -> list[Checkpoint]:
    assert pool.pinned is not None
    return list(pool.pinned)


# ---- the pins ----------------------------------------------------------------------------------


def test_a_block_is_pinned_while_any_pin_needs_it() -> None:
    a, b, c = (KVCacheBlock(i) for i in range(3))
    one, two = Checkpoint(h("1"), 32, ((a, b),)), Checkpoint(h("2"), 64, ((b, c),))
    pins = PinnedCheckpoints(max_blocks=3)
    pins.add(one)
    assert pins.num_excess(two) == 0
    pins.add(two)
    pins.add(two)
    assert pins.num_pins_by_block() == {0: 1, 1: 2, 2: 1}
    assert pins.discard(one)
    assert not pins.discard(one)
    assert [pins.holds(x) for x in (a, b, c)] == [False, True, True]
    assert pins.num_excess(one) == 0
    assert pins.discard(two)
    assert pins.num_pins_by_block() == {}


def test_the_cap_counts_a_shared_block_once() -> None:
    a, b, c = (KVCacheBlock(i) for i in range(3))
    pins = PinnedCheckpoints(max_blocks=2)
    pins.add(Checkpoint(h("1"), 32, ((a, b),)))
    assert pins.num_excess(Checkpoint(h("2"), 64, ((b,),))) == 0
    assert pins.num_excess(Checkpoint(h("3"), 64, ((b, c),))) == 1
    assert pins.can_hold(Checkpoint(h("4"), 64, ((a, b),)))
    assert not pins.can_hold(Checkpoint(h("5"), 64, ((a, b, c),)))


# ---- the pool ----------------------------------------------------------------------------------


def test_pinned_blocks_are_free_but_reached_last() -> None:
    pool = make_pool()
    a, b, c = pool.get_new_blocks(3)
    pinned, other = add_record(pool, "p", a, b), add_record(pool, "o", c)
    assert pool.pin(pinned)
    pool.free_blocks([a, b, c])
    assert tiers(pool, a, b, c) == [Tier.PINNED, Tier.PINNED, Tier.REGULAR]
    assert pool.get_num_free_blocks() == 9
    assert pool.get_usage() == 0.0
    taken = pool.get_new_blocks(7)
    assert taken[-1] is c
    assert h("o") not in pool.checkpoints
    assert pool.checkpoints[h("p")] is pinned
    assert other not in pins_of(pool)
    # Nothing else is left: the pin gives way as a whole.
    assert pool.get_new_blocks(1) == [a]
    assert pins_of(pool) == []
    assert h("p") not in pool.checkpoints
    assert tiers(pool, b) == [Tier.SCRATCH]
    with pytest.raises(ValueError, match="only 1 are free"):
        pool.get_new_blocks(2)


def test_the_oldest_pin_gives_way_first_and_only_as_many_as_must() -> None:
    pool = make_pool(8, max_pinned=6)
    blocks = pool.get_new_blocks(6)
    old, mid, new = (add_record(pool, n, *blocks[2 * i : 2 * i + 2]) for i, n in enumerate("omn"))
    for record in (old, mid, new):
        pool.pin(record)
    pool.free_blocks(blocks)
    pool.get_new_blocks(2)
    assert pins_of(pool) == [mid, new]
    assert h("o") not in pool.checkpoints
    assert tiers(pool, *blocks[2:]) == [Tier.PINNED] * 4


def test_touch_keeps_the_pin_and_makes_it_young() -> None:
    pool = make_pool(5)
    a, b, c, d = pool.get_new_blocks(4)
    first, second = add_record(pool, "1", a, b), add_record(pool, "2", c, d)
    pool.pin(first)
    pool.pin(second)
    pool.free_blocks([a, b, c, d])
    pool.touch([a, b])
    assert tiers(pool, a, b, c) == [None, None, Tier.PINNED]
    assert pins_of(pool) == [first, second]
    pool.touch([a])
    pool.free_blocks([a, b])
    assert tiers(pool, a, b) == [None, Tier.PINNED]
    pool.free_blocks([a])
    # Used last, given up last.
    assert set(pool.get_new_blocks(2)) == {c, d}
    assert pins_of(pool) == [first]


def test_the_cap_demotes_the_oldest() -> None:
    pool = make_pool(max_pinned=4)
    blocks = pool.get_new_blocks(8)
    free, held, new = (add_record(pool, n, *blocks[2 * i : 2 * i + 2]) for i, n in enumerate("fhn"))
    pool.pin(held)
    pool.pin(free)
    pool.free_blocks(blocks[:2])
    # Free ones first, though pinned later; they are cached as before, and young.
    pool.pin(new)
    assert pins_of(pool) == [held, new]
    assert tiers(pool, *blocks[:2]) == [Tier.REGULAR] * 2
    assert h("f") in pool.checkpoints
    # Then pins of blocks that requests hold.
    pool.pin(free)
    assert pins_of(pool) == [new, free]
    # One that does not fit as a whole is not pinned, and costs nobody a pin.
    assert not pool.pin(add_record(pool, "large", *blocks[3:8]))
    assert pins_of(pool) == [new, free]


def test_a_block_of_two_pins_stays_until_both_are_gone() -> None:
    pool = make_pool()
    a, b, c = pool.get_new_blocks(3)
    one, two = add_record(pool, "1", a, b), add_record(pool, "2", b, c)
    pool.pin(one)
    pool.pin(two)
    pool.free_blocks([a, b, c])
    pool.unpin(one)
    assert tiers(pool, a, b, c) == [Tier.REGULAR, Tier.PINNED, Tier.PINNED]
    pool.unpin(one)
    pool.dissolve(two)
    assert tiers(pool, a, b, c) == [Tier.REGULAR, Tier.REGULAR, Tier.SCRATCH]
    assert pins_of(pool) == []


def test_pinning_a_free_or_cold_checkpoint_moves_it_and_back() -> None:
    pool = make_pool()
    a, b = pool.get_new_blocks(2)
    record = add_record(pool, "p", a, b)
    pool.set_cold(record, True)
    pool.free_blocks([a, b])
    assert tiers(pool, a, b) == [Tier.COLD] * 2
    pool.pin(record)
    assert tiers(pool, a, b) == [Tier.PINNED] * 2
    pool.unpin(record)
    assert tiers(pool, a, b) == [Tier.COLD] * 2
    pool.dissolve(record)
    assert not pool.pin(record)


def test_reset_unpins() -> None:
    pool = make_pool()
    a, b = pool.get_new_blocks(2)
    pool.pin(add_record(pool, "p", a, b))
    assert not pool.reset_prefix_cache()
    assert len(pins_of(pool)) == 1
    pool.free_blocks([a, b])
    assert pool.reset_prefix_cache()
    assert pins_of(pool) == []
    assert tiers(pool, a, b) == [Tier.SCRATCH] * 2


def test_without_pins_there_is_no_tier() -> None:
    pool = UnitBlockPool(10, [0])
    assert pool.pinned is None
    assert len(pool.tiers) == Tier.PINNED


# ---- the manager -------------------------------------------------------------------------------


def tokens_of(seed: int, n: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(n)]


def make_driver(
    unit: int = 32,
    *,
    share: float | None = 0.25,
    min_drop: int = 16,
    blocks: int = 2000,
    policy: RetentionPolicy = NONE,
) -> Driver:
    policy = replace(policy, pinned_share=share, pin_min_drop_blocks=min_drop)
    return Driver(v4_config(unit, blocks), 8192, seed=0, policy=policy)


def pinned_positions(driver: Driver) -> list[int]:
    return [record.position for record in driver.manager.block_pool.pinned or ()]


@pytest.mark.parametrize("unit", [32, 64, 128])
def test_a_prompt_is_pinned_where_its_chunks_end(unit: int) -> None:
    driver = make_driver(unit)
    driver.manager.new_step_starts()
    request = driver.add(tokens_of(1, 2500), 1)
    for start, end in ((0, 1024), (1024, 2048), (2048, 2500)):
        request.num_computed_tokens = start
        assert driver.manager.allocate_slots(request, end - start) is not None
        driver.manager.commit_step()
    assert pinned_positions(driver) == [1024, 2048, 2500 // unit * unit]
    driver.manager.check_invariants()
    driver.manager.free(request)
    driver.manager.check_invariants()
    # An interval or a junction would keep them too, but nothing else asked for 1,024 here.
    for cut in (1100, 2100):
        follower = driver.add([*tokens_of(1, 2500)[:cut], *tokens_of(2, 50)], 1)
        assert driver.manager.get_computed_blocks(follower)[1] == cut // 1024 * 1024
    blocks = [b for r in driver.manager.block_pool.pinned or () for b in r.all_blocks()]
    assert {driver.manager.block_pool.tier_of(b) for b in blocks} == {Tier.PINNED}


def test_without_pins_nothing_is_kept_where_chunks_end() -> None:
    driver = make_driver(share=None)
    driver.add(tokens_of(1, 2500), 1)
    driver.run_all(budget=1024)
    follower = driver.add([*tokens_of(1, 2500)[:1100], *tokens_of(2, 50)], 1)
    assert driver.manager.get_computed_blocks(follower)[1] == 0
    assert driver.manager.block_pool.pinned is None


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [31, 200, 1000])
def test_decode_steps_pin_nothing(num_tokens: int) -> None:
    driver = make_driver(blocks=400)
    request = driver.add(tokens_of(1, num_tokens), 150)
    driver.step(2048)
    pins = pinned_positions(driver)
    assert pins == [p for p in (num_tokens // 32 * 32,) if p]
    while request.num_output_tokens < 140:
        driver.step(2048)
    assert pinned_positions(driver) == pins


def test_short_prompts_pin_nothing() -> None:
    # Blocks of 2 tokens in the smallest group, and 4 tokens are kept: 60 drop 28 of them.
    for min_drop, expected in ((28, [32]), (29, [])):
        driver = make_driver(min_drop=min_drop)
        driver.add(tokens_of(1, 60), 1)
        driver.run_all()
        assert pinned_positions(driver) == expected


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "unpinned_hit"), [(NONE, 256), (AUTO, 96)])
def test_a_pinned_window_outlives_a_flood(policy: RetentionPolicy, unpinned_hit: int) -> None:
    """A conversation keeps its dense rows in use, but not the window at which it began."""

    def hit_after_flood(share: float | None) -> int:
        policy_with_pins = replace(policy, pinned_share=share, pin_min_drop_blocks=64)
        driver = Driver(v4_config(32, 200), 1024, seed=0, policy=policy_with_pins)
        history = tokens_of(1, 300)
        for turn in range(6):
            request = driver.add(history, 2)
            driver.run_all(budget=2048)
            history = [*driver.finished[request.request_id], *tokens_of(100 + turn, 60)]
            # Short prompts pin nothing and leave their checkpoints behind.
            for seed in range(3):
                driver.add(tokens_of(1000 * turn + seed, 100), 1)
                driver.run_all(budget=2048)
        assert len(pinned_positions(driver)) == (share is not None)
        again = driver.add(tokens_of(1, 300), 1)
        return driver.manager.get_computed_blocks(again)[1]

    assert hit_after_flood(None) == unpinned_hit
    assert hit_after_flood(0.25) == 288


@pytest.mark.slow
def test_pins_give_way_to_admission() -> None:
    driver = make_driver(share=1.0, blocks=400)
    for seed in range(8):
        driver.add(tokens_of(seed, 1000), 1)
        driver.run_all(budget=256)
    many = pinned_positions(driver)
    assert len(many) > 10
    long = driver.add(tokens_of(99, 8000), 1)
    driver.step(8192)
    assert driver.finished[long.request_id]
    assert 0 < len(pinned_positions(driver)) < len(many)


@pytest.mark.slow
def test_a_pin_outranks_being_superseded() -> None:
    driver = make_driver(policy=AUTO, blocks=600)
    history = tokens_of(1, 640)
    for turn in range(4):
        request = driver.add(history, 40)
        driver.run_all(budget=2048)
        history = [*driver.finished[request.request_id], *tokens_of(50 + turn, 200)]
    pool = driver.manager.block_pool
    at_640 = next(r for r in pool.checkpoints.values() if r.position == 640)
    assert at_640.is_cold
    assert {pool.tier_of(block) for block in at_640.all_blocks()} == {Tier.PINNED}


@pytest.mark.parametrize("unit", [32, 64, 128])
def test_the_largest_checkpoint(unit: int) -> None:
    geometry = CacheGeometry.from_config(v4_config(unit, 10))
    sizes = {
        sum(len(g.block_range(g.first_needed(p), p)) for g in geometry.windows)
        for p in range(unit, 5000, unit)
    }
    assert max_checkpoint_blocks(geometry) == max(sizes)


@pytest.fixture
def pinning(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("VLLM_PIN_SWA_TOKENS", "1")
    monkeypatch.delenv("VLLM_PREFIX_CACHE_RETENTION_INTERVAL", raising=False)
    return monkeypatch


def test_the_variables_reach_the_unit_cache(pinning: pytest.MonkeyPatch) -> None:
    config = v4_config(32, 401)
    pinning.setenv("VLLM_PIN_MIN_DROP_SIZE", "7")
    pinning.setenv("VLLM_PIN_MAX_SHARE", "0.1")
    pinning.setenv("VLLM_PREFIX_CACHE_RETENTION_INTERVAL", "256")
    coordinator = UnitKVCacheCoordinator(config, True)
    geometry = coordinator.geometry
    expected = replace(parse_retention(256, geometry), pinned_share=0.1, pin_min_drop_blocks=7)
    assert coordinator.policy == expected
    assert coordinator.block_pool.pinned is not None
    assert coordinator.block_pool.pinned.max_blocks == 40
    flagged = UnitKVCacheCoordinator(replace(config, prefix_cache_pinned_share=0.5), True)
    assert flagged.policy.pinned_share == 0.5
    assert UnitKVCacheCoordinator(config, False).block_pool.pinned is None
    pinning.delenv("VLLM_PIN_SWA_TOKENS")
    assert UnitKVCacheCoordinator(config, True).block_pool.pinned is None


@pytest.mark.parametrize(("share", "expected"), [("0.25", 100 // 22), ("0", 0)])
def test_start_up_says_how_many_prefixes_fit(
    share: str, expected: int, pinning: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pinning.setenv("VLLM_PIN_MAX_SHARE", share)
    pinning.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.INFO, logger="vllm.v1.core.unit_coordinator"):
        UnitKVCacheCoordinator(v4_config(32, 401), True)
    assert [f"room for {expected} prefixes" in r.getMessage() for r in caplog.records] == [True]
