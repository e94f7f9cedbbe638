"""The way followed changes for what lasts, not for luck."""

import random

from vllm.v1.core.retention.auto.contest import Contest


def test_luck_changes_nothing_and_a_lead_does() -> None:
    rng = random.Random(0)
    contest = Contest(3, 0, 0.03)
    changes = 0
    for _ in range(3000):
        # All hit about as much, one now more and now less.
        changes += contest.add(20, [10.0 + rng.randint(-1, 1) for _ in range(3)], 400)
    assert changes == 0
    current = contest.current
    better = (current + 1) % 3
    for _ in range(300):
        contest.add(20, [12.0 if way == better else 10.0 for way in range(3)], 400)
    assert contest.current == better


def test_a_few_hits_are_no_lead() -> None:
    contest = Contest(2, 0, 0.03)
    assert not contest.add(20, [0.0, 39.0], 400)
    assert contest.add(20, [0.0, 39.0], 400)
    assert contest.current == 1
