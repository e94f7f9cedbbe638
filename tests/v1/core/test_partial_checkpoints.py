"""Checkpoints that lack the rows of upper layers: whom they serve, and when whole ones are made."""

import pytest

from tests.v1.core.test_unit_retention import serve, tokens_of
from tests.v1.core.unit_cache_driver import Driver
from tests.v1.core.v41_geometry import v41_config
from vllm.v1.core.geometry import CacheGeometry

# Of three upper layers with windows of 128.
REACH = 3 * 127


def make_driver(blocks: int = 4000, window: int = 128) -> Driver:
    return Driver(v41_config(32, blocks, window), 8192, seed=0)


def misses(driver: Driver, number: int) -> dict[str, int]:
    return dict(driver.records[f"r{number}"].miss_tokens)


def test_who_goes_on_for_long_resumes_at_one_and_leaves_one_where_it_parts() -> None:
    driver, base = make_driver(), tokens_of(1, 2000)
    tails = [tokens_of(seed, 1000) for seed in (2, 3)]
    assert serve(driver, base) == 0
    # Spares of the grid are partial, and so is what is left where the second one parts.
    assert serve(driver, base[:1100] + tails[0]) == 1024
    assert serve(driver, base[:1100] + tails[1]) == 1088
    assert "window_partial" not in misses(driver, 3)


def test_who_ends_soon_passes_them_once_and_leaves_a_whole_one() -> None:
    driver, base = make_driver(), tokens_of(1, 2000)
    for prompt in (base, base[:1100] + tokens_of(2, 1000)):
        serve(driver, prompt)
    hits = [serve(driver, base[:1100] + tokens_of(seed, 50)) for seed in (4, 5, 6)]
    # Nothing is kept that it could resume at: windows are computed again, once.
    assert hits == [320, 1088, 1088]
    expected = {"window_rebuilt": 768, "first_seen": 32, "above_last_boundary": 30}
    assert misses(driver, 3) == expected
    assert "window_rebuilt" not in misses(driver, 4)


@pytest.mark.parametrize("budget", [500, 4096])
@pytest.mark.parametrize("tail", [30, 700])
def test_requests_that_come_together_and_end_soon_hit_at_once(budget: int, tail: int) -> None:
    """The first of them computes all layers where the others part from it, far before its end."""
    driver, document = make_driver(), tokens_of(1, 2000)
    prompts = [document + tokens_of(2, 900)]
    prompts += [document + tokens_of(seed, tail) for seed in (3, 4, 5)]
    requests = [driver.add(prompt, 2) for prompt in prompts]
    driver.run_all(budget=budget)
    assert [driver.hits[request.request_id] for request in requests] == [0, 1984, 1984, 1984]


def test_where_short_continuations_are_usual_ends_are_computed_by_all_layers() -> None:
    """They resume 1,024 tokens before earlier prompts' ends: from the fifth on at once."""
    driver = make_driver(20_000, 400)
    hits = []
    for number in range(6):
        document = tokens_of(100 + number, 2400)
        serve(driver, document)
        hits.append(serve(driver, document[:1400] + tokens_of(200 + number, 40)))
    assert hits == [0] * 4 + [1376] * 2
    assert misses(driver, 2) == {
        "window_partial": 1376,
        "first_seen": 32,
        "above_last_boundary": 32,
    }
    policy = driver.coordinator.policy
    assert policy.full_from(2400, ()) == 1376
    assert policy.full_from(500, ()) is None
    policy.reset()
    assert policy.full_from(2400, ()) is None


def test_long_continuations_teach_nothing() -> None:
    driver = make_driver(20_000, 400)
    for number in range(6):
        document = tokens_of(100 + number, 2400)
        serve(driver, document)
        assert serve(driver, document[:1400] + tokens_of(200 + number, 1300)) == 1376
    assert driver.coordinator.policy.full_from(2400, ()) is None


@pytest.mark.parametrize(("message", "hit"), [(60, 1472), (200, 1024)])
def test_what_is_marked_near_the_end_is_whole(message: int, hit: int) -> None:
    """A system prompt in front of a short message: the next conversation hits it at once."""
    driver, system = make_driver(), tokens_of(1, 1500)
    for seed in (2, 3):
        request = driver.add(system + tokens_of(seed, message), 2, cache_boundaries=(1500,))
        driver.run_all(budget=2048)
    assert driver.hits[request.request_id] == hit


def test_one_weighs_half_of_a_whole_one() -> None:
    for unit in (32, 64, 128):
        geometry = CacheGeometry.from_config(v41_config(unit, 10))
        assert geometry.lazy_reach == REACH
        assert sum(geometry.partial_blocks) * 2 == sum(geometry.lean_blocks) > 0
        whole = geometry.without_lazy_layers()
        assert whole.partial_blocks == whole.lean_blocks == geometry.lean_blocks
