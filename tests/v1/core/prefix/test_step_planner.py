"""A plan says what leaves the pool, and changes nothing."""

import random

import pytest

from tests.v1.core.unit_cache_driver import Driver
from tests.v1.core.v4_geometry import v4_config
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.values.cache_step import StepPlan


def tokens_of(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["0", "auto", "256"])
@pytest.mark.parametrize("num_blocks", [200, 500])
def test_what_is_planned_is_what_leaves_the_pool(
    policy: str, num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hits, copies, checkpoints and rows, in a pool that is full and in one that is not."""
    driver = Driver(v4_config(32, num_blocks), 1024, seed=3, policy=policy)
    coordinator, pool = driver.coordinator, driver.manager.block_pool
    commit, plan_step, num_hits = coordinator.commit, coordinator.plan, 0

    def plan(step: object, num_available: int) -> StepPlan:
        num_free = pool.get_num_free_blocks()
        planned = plan_step(step, num_available)  # type: ignore[arg-type]
        assert pool.get_num_free_blocks() == num_free, "planning takes nothing"
        return planned

    def checked_commit(plan: StepPlan) -> tuple[list[KVCacheBlock], ...]:
        nonlocal num_hits
        num_free = pool.get_num_free_blocks()
        new_blocks = commit(plan)
        assert num_free - pool.get_num_free_blocks() == plan.num_blocks
        num_hits += plan.num_blocks > plan.num_new_blocks
        return new_blocks

    monkeypatch.setattr(coordinator, "plan", plan)
    monkeypatch.setattr(coordinator, "commit", checked_commit)
    known = [tokens_of(seed, 400) for seed in range(3)]
    draw = random.Random(policy)
    for turn in range(20):
        base = draw.choice(known)
        prompt = [*base[: draw.randrange(len(base) + 1)], *tokens_of(100 + turn, 60)]
        driver.add(prompt, max_tokens=draw.randrange(1, 40))
        if turn % 3 == 0:
            driver.run_all()
        known.append(prompt)
    driver.run_all()
    assert num_hits > 3, "free blocks of hits were adopted"
