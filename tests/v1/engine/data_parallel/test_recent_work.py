"""What replicas computed lately, against a sum over all that they were given."""

import math
import random

import numpy as np
import pytest

from vllm.v1.engine.data_parallel.recent_work import RecentWork

CAPACITY = 10_000


@pytest.mark.parametrize("num_serving", [3, 5])
def test_what_was_computed_long_ago_counts_less(num_serving: int) -> None:
    rng = random.Random(num_serving)
    work = RecentWork(5, CAPACITY)
    work.set_serving(np.arange(5) < num_serving)
    given: list[tuple[int, int]] = []
    # Enough for the unit to begin anew several times.
    for _ in range(60 * num_serving):
        rank, tokens = rng.randrange(num_serving), rng.randrange(1, CAPACITY)
        work.add(rank, tokens)
        given.append((rank, tokens))
    expected, later = np.zeros(5), 0
    for rank, tokens in reversed(given):
        expected[rank] += tokens * math.exp(-later / (num_serving * CAPACITY))
        later += tokens
    assert work.tokens / work.tokens.sum() == pytest.approx(expected / expected.sum())
    # The mean that prices are made of may be a hundredth old.
    mean = expected.sum() / num_serving
    assert work.prices == pytest.approx(2 * np.minimum(expected / mean, 2) ** 2, rel=0.05)


def test_a_replica_that_begins_anew_counts_as_usual() -> None:
    work = RecentWork(3, CAPACITY)
    assert work.prices.tolist() == [2, 2, 2]
    for rank, tokens in enumerate((900, 300, 0)):
        work.add(rank, tokens)
    assert work.prices[2] == 0 < work.prices[1] < 2 < work.prices[0]
    work.forget(0)
    work.add_replica()
    mean = work.tokens.mean()
    assert work.tokens[0] < 900
    assert work.prices == pytest.approx(2 * (work.tokens / mean) ** 2, rel=0.05)
