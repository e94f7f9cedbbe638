"""What becomes of spare checkpoints, by the place before the prompt's end where they stand."""

import random

from tests.v1.core.unit_cache_driver import Driver
from tests.v1.core.v4_geometry import v4_config
from vllm.v1.core.retention.policy import COARSE
from vllm.v1.core.retention.tiers import Tier
from vllm.v1.core.values.hit import Checkpoint


def tokens_of(seed: int, n: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(n)]


def serve(driver: Driver, tokens: list[int], budget: int = 4096) -> int:
    request = driver.add(tokens, 1)
    driver.run_all(budget=budget)
    return driver.hits[request.request_id]


def test_those_at_a_distance_that_hits_outlive_superseded_ones() -> None:
    driver = Driver(v4_config(128, 4000), 8192, seed=0)
    beginnings = [tokens_of(seed, 2000) for seed in range(8)]
    for i, beginning in enumerate(beginnings):
        serve(driver, [*beginning, *tokens_of(100 + i, 500)])
    store, pool = driver.coordinator.store, driver.manager.block_pool
    # Nothing resumes 256 tokens before an end, and everything 1,024 tokens.
    place = (2500 - 1024) // 128 * 128
    for i, beginning in enumerate(beginnings[:5]):
        assert serve(driver, [*beginning[:1500], *tokens_of(200 + i, 1000)]) == place
    last = driver.add([*beginnings[7], *tokens_of(107, 500)], 1)
    hashes = last.block_hashes
    near, far = (store.get(hashes[p // 128 - 1]) for p in ((2500 - 256) // 128 * 128, place))
    assert near is not None
    assert far is not None
    assert {pool.tier_of(block) for block in near.all_blocks()} == {Tier.SPARE}
    assert {pool.tier_of(block) for block in far.all_blocks()} == {Tier.WARM}
    driver.check()
    driver.run_all()


def test_a_chunks_end_keeps_the_spare_checkpoint_that_stands_there() -> None:
    """The next chunk gives its trailing checkpoint up, but not where a spare one would be."""
    driver = Driver(v4_config(128, 4000), 8192, seed=0)
    prompt = tokens_of(1, 2048)
    # The first chunk ends 256 tokens before the end.
    request = driver.add(prompt, 1)
    driver.step(budget=1792)
    driver.run_all(budget=1792)
    assert serve(driver, [*prompt[:1900], *tokens_of(2, 300)]) == 1792
    assert request.request_id in driver.finished


def test_coarse_ones_are_left_out_where_conversations_go_on_at_their_ends() -> None:
    driver = Driver(v4_config(128, 4000), 8192, seed=0)
    store, length, coarse = driver.coordinator.store, 2960, 2560

    def find_coarse(seed: int) -> Checkpoint | None:
        request = driver.add(tokens_of(seed, length), 1)
        driver.run_all(budget=4096)
        return store.get(request.block_hashes[coarse // 128 - 1])

    first = find_coarse(1000)
    assert first is not None
    assert first.kind == COARSE
    for seed in range(34):
        conversation = tokens_of(seed, length)
        for _ in range(4):
            serve(driver, conversation)
            conversation += tokens_of(100 + seed, 300)
    assert find_coarse(1001) is None
    driver.check()
