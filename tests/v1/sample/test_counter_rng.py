"""Counter-based draws: reproducible, uniform, unrelated across keys and positions."""

import numpy as np
import pytest

from vllm.v1.sample.counter_rng import draw_uniforms, make_key


def keys_of(seeds: range) -> np.ndarray:
    return np.array([make_key(seed) for seed in seeds], dtype=np.uint64)


def chi_square(uniforms: np.ndarray, bins: int) -> float:
    counts = np.bincount((uniforms * bins).astype(int), minlength=bins)
    expected = len(uniforms) / bins
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("along", ["positions", "seeds"])
def test_draws_are_uniform(along: str) -> None:
    count = 40_000
    if along == "positions":
        keys = np.full(count, make_key(3), dtype=np.uint64)
        positions = np.arange(count)
    else:
        keys = keys_of(range(count))
        positions = np.full(count, 17)
    uniforms = draw_uniforms(keys, positions)
    assert uniforms.dtype == np.float32
    assert uniforms.min() >= 0
    assert uniforms.max() < 1
    # 99.9% quantile of chi-square with 63 degrees of freedom.
    assert chi_square(uniforms, 64) < 104


def test_neighbours_are_unrelated() -> None:
    positions = np.arange(20_000)
    one = draw_uniforms(np.full(20_000, make_key(1), dtype=np.uint64), positions)
    two = draw_uniforms(np.full(20_000, make_key(2), dtype=np.uint64), positions)
    for a, b in ((one, two), (one[1:], one[:-1]), (one[1:], two[:-1])):
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.03


def test_draws_depend_on_their_own_row_only() -> None:
    keys = keys_of(range(10))
    positions = np.arange(10) * 5
    together = draw_uniforms(keys, positions)
    for i in range(10):
        assert draw_uniforms(keys[i : i + 1], positions[i : i + 1])[0] == together[i]


def test_seeds_over_the_whole_signed_range_have_keys() -> None:
    seeds = [0, 1, -1, 2**63 - 1, -(2**63), 42]
    keys = {make_key(seed) for seed in seeds}
    assert len(keys) == len(seeds)
    assert all(0 <= key < 2**64 for key in keys)
