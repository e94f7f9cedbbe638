"""Requests that compute window rows again, over the real manager: what is read is exact."""

import random

import pytest

from tests.v1.core.unit_cache_driver import Driver
from tests.v1.core.v4_geometry import v4_config
from vllm.v1.request import Request

WINDOW = 16
# Six layers and the drafter's, in whole units of 32.
SPAN = 128


def tokens_of(seed: int, n: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(n)]


@pytest.fixture
def driver() -> Driver:
    """A cache that holds the dense rows of 2,000 tokens, and checkpoints near their end alone."""
    driver = Driver(v4_config(32, 3000, length=WINDOW), 8192, seed=0)
    driver.add(SHARED, 1)
    driver.run_all(budget=2048)
    index = driver.coordinator.index
    for record in list(index.checkpoints.values()):
        if record.position < 1900:
            driver.coordinator.store.dissolve(record)
    return driver


SHARED = tokens_of(1, 2000)


def parting_at(cut: int, seed: int, more: int = 300) -> list[int]:
    return [*SHARED[:cut], *tokens_of(seed, more)]


def serve(driver: Driver, tokens: list[int], budget: int = 2048) -> Request:
    request = driver.add(tokens, 3)
    driver.run_all(budget=budget)
    return request


@pytest.mark.parametrize("budget", [2048, 100, 33])
def test_resumes_a_span_before_where_dense_rows_end(driver: Driver, budget: int) -> None:
    request = serve(driver, parting_at(1500, 2), budget)
    boundary = 1500 // 128 * 128
    assert driver.rebuilt == {request.request_id: boundary}
    record = driver.records[request.request_id]
    assert record.num_cached_tokens == record.rebuild_saved_tokens == boundary - SPAN
    assert record.dense_match_tokens == 1500 // 32 * 32
    assert record.miss_tokens["window_rebuilt"] == SPAN


def test_once_is_enough(driver: Driver) -> None:
    serve(driver, parting_at(1500, 2))
    later = serve(driver, parting_at(1500, 3))
    assert driver.hits[later.request_id] == 1500 // 32 * 32
    assert len(driver.rebuilt) == 1


def test_not_where_a_checkpoint_is_as_near(driver: Driver) -> None:
    serve(driver, parting_at(1500, 2))
    request = serve(driver, [*parting_at(1500, 2, 60), *tokens_of(9, 99)])
    assert request.request_id not in driver.rebuilt
    assert driver.hits[request.request_id] == 1560 // 32 * 32


def test_not_under_a_fixed_interval() -> None:
    config = v4_config(32, 3000, length=WINDOW)
    driver = Driver(config, 8192, seed=0, policy=0)
    serve(driver, SHARED)
    serve(driver, parting_at(1500, 2))
    assert driver.rebuilt == {}


def test_a_preempted_one_begins_again(driver: Driver) -> None:
    request = driver.add(parting_at(1500, 2), 3)
    driver.step(budget=40)
    assert request.request_id in driver.rebuilt
    assert 0 < request.num_computed_tokens < driver.rebuilt[request.request_id]
    driver.preempt(request)
    # Until it is there again no step has to know which of its rows are written.
    assert not driver.coordinator.take_step_work().row_bounds
    driver.run_all(budget=40)
    assert len(driver.finished[request.request_id]) == 1803


def test_dense_rows_may_go_on_beside_it(driver: Driver) -> None:
    """One in the middle of it, others hit what the first had cached; nothing is read too early."""
    first = driver.add(parting_at(1500, 2), 3)
    driver.step(budget=40)
    others = [serve(driver, parting_at(cut, 100 + cut), 64) for cut in (1990, 1501, 700)]
    assert first.request_id in driver.finished
    assert {r.request_id for r in others} <= driver.finished.keys()


def test_those_who_come_together_do_it_once(driver: Driver) -> None:
    """The others wait for the window rows of the first, and then resume there."""
    requests = [driver.add(parting_at(1500, seed), 3) for seed in range(2, 6)]
    driver.run_all(budget=2048)
    assert list(driver.rebuilt) == [requests[0].request_id]
    assert [driver.hits[r.request_id] for r in requests[1:]] == [1500 // 32 * 32] * 3
