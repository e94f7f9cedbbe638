"""Spare checkpoints: inside the step, within the room, near the end first."""

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest

from benchmarks.v4_cache import UNITS, flash_config
from tests.v1.core.v41_geometry import v41_config
from vllm.v1.core.geometry import CacheGeometry
from vllm.v1.core.retention.auto.spare import _grid, spare_boundaries
from vllm.v1.core.retention.policy import PrefillStep, Spare


def ends(spares: Sequence[Spare]) -> list[int]:
    return [spare.position for spare in spares if spare.kind is not None]


def fillers(spares: Sequence[Spare]) -> list[int]:
    return [spare.position for spare in spares if spare.kind is None]


@pytest.mark.parametrize("unit", UNITS)
def test_places_fit_the_step_and_the_room(unit: int) -> None:
    geometry = CacheGeometry.from_config(flash_config(unit, 1000))
    cost = sum(geometry.lean_blocks)
    rng = random.Random(unit)
    num_places = 0
    for _ in range(500):
        n = rng.randint(1, 60_000)
        start = geometry.floor_lean(rng.randrange(n))
        end = min(n, start + rng.choice([100, 2048, 8192]))
        taken = {geometry.floor_lean(n - 1)}
        num_blocks, num_older = rng.randrange(600), rng.choice([0, 0, 100])
        step = PrefillStep(start, end, n, (), taken, num_blocks, num_older, 1000)
        places = [spare.position for spare in spare_boundaries(geometry, step)]
        assert len(set(places)) == len(places)
        assert all(start < p <= end and p % geometry.lean == 0 for p in places)
        assert not taken & set(places)
        assert len(places) * cost <= 9 / 8 * max(0, num_blocks - 62) + num_older
        num_places += len(places)
    assert num_places > 500


def test_partial_ones_before_a_boundary_weigh_less() -> None:
    geometry = CacheGeometry.from_config(v41_config(32, 1000))
    assert sum(geometry.lean_blocks) == 2 * sum(geometry.partial_blocks) == 8
    for full_from, num_places in ((8160, 3), (7900, 2), (0, 1)):
        step = PrefillStep(0, 8192, 8192, (), (), 62 + 15, 0, 1000, full_from)
        assert len(ends(spare_boundaries(geometry, step))) == num_places


def test_a_full_pool_leaves_none() -> None:
    geometry = CacheGeometry.from_config(flash_config(32, 1000))
    assert not spare_boundaries(geometry, PrefillStep(0, 8192, 8192, (), (), 60, 0, 1000))


def test_ends_grow_apart_fourfold_and_older_spares_give_way_to_them() -> None:
    geometry = CacheGeometry.from_config(flash_config(32, 1000))
    found = spare_boundaries(geometry, PrefillStep(0, 40_000, 40_000, (), (), 0, 900, 1000))
    assert fillers(found) == []
    distances = [40_000 - place for place in reversed(ends(found))]
    assert [spare.kind for spare in reversed(found)] == [1, 2, 3, 4]
    assert len(distances) == 4
    for distance, wanted in zip(distances, (256, 1024, 4096, 16_384), strict=True):
        assert wanted <= distance < wanted + geometry.lean


@pytest.mark.parametrize("num_most", range(9))
@pytest.mark.parametrize("start", [0, 100, 512, 1500])
def test_the_grid_is_the_finest_that_has_room(start: int, num_most: int) -> None:
    """Steps double; of those whose multiples fit the first is taken."""
    end = 4096
    places = list(_grid(512, start, end, num_most))
    fitting = [
        [p for p in range(step, end + 1, step) if p > start] for step in (512, 1024, 2048, 4096)
    ]
    assert places == next((few for few in fitting if num_most and len(few) <= num_most), [])


def test_much_room_gives_a_fine_grid_and_little_a_coarse_one() -> None:
    geometry = CacheGeometry.from_config(flash_config(128, 100_000))
    steps = []
    for num_blocks in (90_000, 6_600):
        step = PrefillStep(0, 65_536, 65_536, (), (), num_blocks, 0, 100_000)
        places = fillers(spare_boundaries(geometry, step))
        steps.append(min(b - a for a, b in pairwise(places)))
    assert steps[0] == 2 * geometry.coarse < steps[1]


def test_marks_come_first_and_only_inside_the_step() -> None:
    geometry = CacheGeometry.from_config(flash_config(32, 1000))
    cost = sum(geometry.lean_blocks)
    step = PrefillStep(2048, 8192, 9000, (3000, 100, 5000), (), 62 + 2 * cost, 0, 1000)
    assert ends(spare_boundaries(geometry, step)) == [2944, 4992]
