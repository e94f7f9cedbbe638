"""A choice is followed when it is further ahead than luck explains."""

import random

from vllm.v1.core.retention.auto.comparison import Comparison


def test_luck_changes_nothing_however_small_the_pool() -> None:
    rng = random.Random(0)
    comparison = Comparison(2, 0, 3.0)
    changes = 0
    for _ in range(3000):
        # A prompt is a fifth of what is cached, and hits under one choice or under the other.
        first = rng.random() < 0.5
        changes += comparison.add(20, [20.0 * first, 20.0 * (not first)], 100)
    assert changes <= 2


def test_a_few_differences_are_enough_if_all_go_one_way() -> None:
    comparison = Comparison(3, 1, 2.0)
    found = [comparison.add(20, [10.0, 10.0, 15.0], 400) for _ in range(6)]
    # Ahead by n * 5 against luck of about 2 * 5 * n ** 0.5.
    assert found == [False, False, False, False, True, False]
    assert comparison.current == 2


def test_differences_of_nearly_nothing_are_no_lead() -> None:
    comparison = Comparison(2, 0, 2.0)
    assert not any(comparison.add(1, [1.0, 1.01], 4000) for _ in range(300))


def test_what_was_seen_before_a_change_does_not_count_after_it() -> None:
    comparison = Comparison(3, 0, 2.0)
    while not comparison.add(20, [0.0, 15.0, 12.0], 400):
        pass
    found = [comparison.add(20, [0.0, 0.0, 15.0], 400) for _ in range(5)]
    assert found == [False, False, False, False, True]
    assert comparison.current == 2
