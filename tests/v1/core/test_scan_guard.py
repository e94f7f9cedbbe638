"""The guard against scans: when it starts, what it saves, when it stops."""

import random

import pytest
from vllm.v1.core.unit_block_pool import Tier

from tests.v1.core.unit_cache_driver import Driver
from tests.v1.core.v4_geometry import v4_config
from vllm.v1.core.policy.geometry import CacheGeometry
from vllm.v1.core.policy.retention import AUTO, RetentionPolicy, parse_retention
from vllm.v1.core.policy.scan_guard import ENTER_AFTER, REVIEW_EVERY, ScanGuard

GEOMETRY = CacheGeometry.from_config(v4_config(128, 10))


def tokens_of(seed: int, n: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(n)]


def active_guard() -> ScanGuard:
    guard = ScanGuard()
    for _ in range(ENTER_AFTER):
        guard.observe(0, 100)
    assert guard.is_active
    return guard


def test_it_takes_many_useless_admissions_in_a_row() -> None:
    guard = ScanGuard()
    for hit in (0, 24):  # less than a fifth counts as nothing
        for _ in range(ENTER_AFTER - 1):
            guard.observe(hit, 100)
        assert not guard.is_active
        guard.observe(25, 100)
    for _ in range(ENTER_AFTER - 1):
        guard.observe(0, 100)
        guard.observe(0, 0)  # a first sight says nothing
    assert not guard.is_active
    guard.observe(0, 100)
    assert guard.is_active


@pytest.mark.parametrize("num_useful", [0, 25, 26, REVIEW_EVERY])
def test_it_stays_as_long_as_it_pays(num_useful: int) -> None:
    guard = active_guard()
    for turn in range(3):
        for i in range(REVIEW_EVERY):
            assert guard.is_active
            guard.observe(*((100, 0) if i < num_useful else (0, 100)))
        # 26 of 128 admissions are a fifth.
        assert guard.is_active == (num_useful >= 26), turn
        if not guard.is_active:
            return


def test_after_it_stopped_it_takes_as_many_to_start_again() -> None:
    guard = active_guard()
    for _ in range(REVIEW_EVERY):
        guard.observe(0, 100)
    assert not guard.is_active
    for _ in range(ENTER_AFTER - 1):
        guard.observe(0, 100)
    assert not guard.is_active


def rotate(policy: RetentionPolicy, num_prompts: int, passes: int = 3) -> tuple[Driver, list[int]]:
    """Serve prompts of 600 tokens in turn; returns how many hit in each pass."""
    driver = Driver(v4_config(128, 150), 1024, seed=0, policy=policy)
    hits = []
    for _ in range(passes):
        hits.append(0)
        for i in range(num_prompts):
            request = driver.add(tokens_of(i, 600), 1)
            driver.run_all(budget=2048)
            hits[-1] += driver.hits[request.request_id] >= 512
    return driver, hits


@pytest.mark.slow
def test_a_rotation_of_more_prompts_than_fit_hits_those_that_fit() -> None:
    driver, hits = rotate(AUTO, 30)
    assert driver.manager.coordinator.scan_guard is not None
    assert hits[0] == 0
    fit = hits[2]
    assert fit > 16
    assert hits[1] >= fit - ENTER_AFTER - 1
    plain = parse_retention(0, GEOMETRY)
    assert rotate(plain, 30)[1] == [0, 0, 0]
    assert driver.manager.coordinator.scan_guard.is_active
    assert driver.manager.reset_prefix_cache()
    assert not driver.manager.coordinator.scan_guard.is_active, "it spoke of what is forgotten"
    # What fits is left alone.
    driver, hits = rotate(AUTO, 16)
    assert hits == [0, 16, 16]
    assert driver.manager.coordinator.scan_guard is not None
    assert not driver.manager.coordinator.scan_guard.is_active


@pytest.mark.slow
def test_new_prefixes_are_on_trial_until_they_are_hit() -> None:
    driver = Driver(v4_config(32, 600), 1024, seed=0, is_scanned=True)
    pool = driver.manager.block_pool

    def tiers_of_cached() -> set[Tier | None]:
        cached = [b for b in pool.blocks[1:] if pool.keys_of(b) or pool.records_of(b)]
        return {pool.tier_of(block) for block in cached}

    prompt = tokens_of(1, 640)
    driver.add(prompt, 1)
    driver.run_all(budget=2048)
    assert tiers_of_cached() == {Tier.COLD}
    request = driver.add(prompt, 1)
    driver.run_all(budget=2048)
    assert driver.hits[request.request_id] == 608
    used = [b for r in pool.checkpoints.values() if r.num_hits for b in r.all_blocks()]
    # 608 is no multiple of 128: it stays cold, its lean boundary is kept instead.
    lean = next(r for r in pool.checkpoints.values() if r.position == 512)
    assert used
    assert {pool.tier_of(block) for block in lean.all_blocks()} == {Tier.REGULAR}
    dense = [b for b in pool.blocks[1:] if pool.keys_of(b)]
    assert [pool.tier_of(b) for b in dense].count(Tier.REGULAR) >= 512 // 128


def test_intervals_do_not_resist_scans() -> None:
    for value in ("0", "none", "256"):
        assert not parse_retention(value, GEOMETRY).resists_scans
    assert AUTO.resists_scans
