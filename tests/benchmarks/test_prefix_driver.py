"""The driver of control-plane benchmarks: every token is accounted for, nothing is left held."""

import random

import pytest

from benchmarks.prefix_driver import PoolTooSmall, PrefixDriver
from benchmarks.replay import make_config, make_policy
from benchmarks.v4_cache import flash_config
from vllm.cachelab.sim.requests import PrefixUnits
from vllm.v1.request import Request


def make_driver(num_blocks: int = 400, max_model_len: int = 20_000, **kwargs: int) -> PrefixDriver:
    config = flash_config(128, num_blocks)
    return PrefixDriver(config, max_model_len, **kwargs)  # type: ignore[arg-type]


def add(driver: PrefixDriver, number: int, spans: list[int], max_tokens: int = 1) -> Request:
    tokens = [0] * (512 * len(spans))
    return driver.add(str(number), tokens, PrefixUnits(number, spans, 128), max_tokens)


@pytest.mark.parametrize("first", [7, 1 << 63, 1 << 127])
def test_hashes_follow_the_prefix_ids_and_answers_are_unique(first: int) -> None:
    driver = make_driver()
    one, two = add(driver, 1, [first, first + 1]), add(driver, 2, [first, first + 2])
    assert {len(name) for name in one.block_hashes} == {16}
    assert len(one.block_hashes) == len(set(one.block_hashes)) == 8
    assert one.block_hashes[:4] == two.block_hashes[:4]
    assert not set(one.block_hashes[4:]) & set(two.block_hashes[4:])
    for request in (one, two):
        request.append_output_token_ids([0] * 300)
    assert len(one.block_hashes) == 10
    assert not set(one.block_hashes[8:]) & set(two.block_hashes[8:])


def test_a_short_prompt_inside_a_span_has_only_its_full_units() -> None:
    request = make_driver().add("1", [0] * 300, PrefixUnits(1, [5], 128))
    assert len(request.block_hashes) == 2


def test_chunked_prefill_takes_the_steps_it_must_and_leaves_nothing_held() -> None:
    driver = make_driver(chunk=1024)
    add(driver, 1, list(range(6)), max_tokens=3)
    driver.run_all()
    assert driver.stats.num_steps == 3 + 2
    assert driver.manager.usage == 0


@pytest.mark.parametrize("max_running", [1, 4])
def test_every_prompt_token_hits_or_has_a_reason(max_running: int) -> None:
    driver = make_driver(num_blocks=150, max_running=max_running, chunk=2048, decode_stride=64)
    rng = random.Random(0)
    history: list[list[int]] = [[]]
    for number in range(60):
        spans = [*rng.choice(history)[:20], *range(100 * number + 1, 100 * number + 5)]
        history.append(spans)
        add(driver, number, spans, max_tokens=rng.randint(1, 400))
    driver.run_all()
    stats = driver.stats
    assert stats.num_requests == 60
    assert stats.hit_tokens + sum(stats.miss_tokens.values()) == stats.prompt_tokens
    assert 0 < stats.hit_rate < 1
    assert driver.manager.usage == 0
    driver.manager.new_step_starts()
    driver.manager.check_invariants({})


def test_a_full_pool_preempts_and_everybody_finishes() -> None:
    driver = make_driver(70, 12_000, max_running=8, chunk=2048, decode_stride=128)
    for number in range(8):
        add(driver, number, [number], max_tokens=11_000)
    driver.run_all()
    assert driver.stats.num_preemptions > 0
    assert driver.stats.num_requests == 8


def test_a_pool_too_small_for_a_chunk_is_named() -> None:
    # Window blocks for every row of 8,192 tokens are more than vLLM's pool has pages.
    config = make_config("today", "vllm", 128, 2048)
    policy = make_policy("today", config)
    driver = PrefixDriver(config, 20_000, policy=policy)
    hasher = PrefixUnits(7, range(100), 256, 256)
    driver.add("seven", [0] * 14_171, hasher)
    with pytest.raises(PoolTooSmall, match=r"2048 blocks .* request seven \(14171 tokens"):
        driver.run_all()
