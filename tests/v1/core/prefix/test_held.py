"""Prefixes that are held: how long, up to which share of the pool, and what they survive."""

import random

import pytest

from tests.v1.core.unit_cache_driver import Driver, make_request
from tests.v1.core.v4_geometry import v4_config
from vllm.v1.core.prefix.held import HeldPrefixes
from vllm.v1.core.retention.auto.eviction import Rule
from vllm.v1.messages import HeldPrefix
from vllm.v1.request import Request

FOREVER = float("inf")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def tokens_of(seed: int, n: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(n)]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def driver(clock: Clock) -> Driver:
    driver = Driver(v4_config(32, 260), 2048, seed=0, rule=Rule.LRU)
    driver.coordinator.held = HeldPrefixes(driver.coordinator.prefixes, clock)
    return driver


def serve(driver: Driver, tokens: list[int], ttl: float | None = None) -> Request:
    """Serve a prompt, and hold it for so many seconds."""
    driver._next_id += 1
    ttls = {} if ttl is None else {len(tokens): ttl}
    request = make_request(
        f"r{driver._next_id}",
        tokens,
        driver.unit,
        2,
        cache_boundaries=tuple(ttls),
        cache_ttls=ttls,
    )
    driver._enqueue(request, len(driver.waiting))
    driver.run_all(budget=2048)
    return request


def hit_of(driver: Driver, tokens: list[int]) -> int:
    return driver.hits[serve(driver, tokens).request_id]


def flood(driver: Driver, seed: int = 100) -> None:
    """Serve enough to reuse all that may be reused."""
    for i in range(12):
        serve(driver, tokens_of(seed + i, 1500))


def held(driver: Driver) -> list[HeldPrefix]:
    return list(driver.manager.coordinator.held_prefixes())


def test_survives_what_washes_others_away(driver: Driver) -> None:
    first, other = tokens_of(1, 1000), tokens_of(2, 1000)
    request = serve(driver, first, FOREVER)
    serve(driver, other)
    flood(driver)
    (kept,) = held(driver)
    assert (kept.id, kept.num_tokens, kept.is_pinned) == (request.request_id, 992, True)
    assert kept.expires_in is None
    assert hit_of(driver, [*other, 5]) == 0
    assert hit_of(driver, [*first, 5]) == 992
    driver.check()


def test_for_a_time(driver: Driver, clock: Clock) -> None:
    first = tokens_of(1, 1000)
    serve(driver, first, 300.0)
    flood(driver)
    clock.now = 299.0
    assert [h.expires_in for h in held(driver)] == [1.0]
    clock.now = 300.0
    flood(driver, 200)
    assert held(driver) == []
    assert hit_of(driver, [*first, 5]) == 0


def test_the_longer_of_two_times_counts_and_a_place_is_held_once(
    driver: Driver, clock: Clock
) -> None:
    first = tokens_of(1, 1000)
    serve(driver, first, 300.0)
    later = serve(driver, first, 100.0)
    assert [(h.id, h.expires_in) for h in held(driver)] == [(later.request_id, 300.0)]
    last = serve(driver, first, 900.0)
    assert [(h.id, h.expires_in) for h in held(driver)] == [(last.request_id, 900.0)]


def test_the_oldest_gives_way_to_the_cap(driver: Driver) -> None:
    requests = [serve(driver, tokens_of(seed, 1500), FOREVER) for seed in range(6)]
    pins = driver.manager.block_pool.pins
    assert pins is not None
    assert pins.num_blocks <= pins.max_blocks
    pinned = [h.id for h in held(driver) if h.is_pinned]
    assert 0 < len(pinned) < 6
    assert pinned == [r.request_id for r in requests][-len(pinned) :]


def test_forgotten_by_name(driver: Driver) -> None:
    request = serve(driver, tokens_of(1, 1000), FOREVER)
    assert not driver.manager.coordinator.forget_prefix("another")
    assert driver.manager.coordinator.forget_prefix(request.request_id)
    assert held(driver) == []
    driver.check()


def test_not_pinned_it_is_listed_while_it_is_there(driver: Driver) -> None:
    serve(driver, tokens_of(1, 1000), 0.0)
    assert [(h.is_pinned, h.num_blocks) for h in held(driver)] == [(False, 0)]
    flood(driver)
    assert held(driver) == []


def test_a_hit_beyond_the_place_holds_what_is_there(driver: Driver) -> None:
    first = tokens_of(1, 1000)
    serve(driver, first)
    serve(driver, first, FOREVER)
    (kept,) = held(driver)
    assert kept.is_pinned
    assert kept.num_tokens >= 896


def test_a_reset_forgets_all(driver: Driver) -> None:
    serve(driver, tokens_of(1, 1000), FOREVER)
    assert driver.manager.reset_prefix_cache()
    assert held(driver) == []
    # Nobody asks for it when it comes again.
    serve(driver, tokens_of(1, 1000))
    assert held(driver) == []
