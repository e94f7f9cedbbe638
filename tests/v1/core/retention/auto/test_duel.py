"""The rule in force follows the traffic, and does not flap."""

import random

from vllm.v1.core.retention.auto.duel import Duel
from vllm.v1.core.retention.auto.eviction import Rule


def test_a_loop_that_does_not_fit_brings_residents_and_its_end_takes_them_away() -> None:
    duel = Duel(200)
    loop = [list(range(10 * i, 10 * i + 10)) for i in range(30)]
    for _ in range(2):
        for prompt in loop:
            duel.serve(prompt)
    assert duel.rule is Rule.RESIDENTS
    # Conversations, each continued a few times at once: what was used last is used next.
    for number in range(120):
        for turn in range(1, 5):
            duel.serve(range(10_000 + 100 * number, 10_000 + 100 * number + 5 * turn))
    assert duel.rule is not Rule.RESIDENTS


def test_prompts_that_never_return_cut_probation_short() -> None:
    rng = random.Random(0)
    duel, fresh = Duel(300), 10**6
    for _ in range(1500):
        if rng.random() < 0.3:
            number = int(rng.paretovariate(0.6)) % 60
            duel.serve(range(1000 * number, 1000 * number + 8))
        else:
            duel.serve(range(fresh, fresh + 20))
            fresh += 20
    assert duel.rule in (Rule.SHORT_PROBATION, Rule.RESIDENTS)


def test_nothing_changes_while_everything_fits() -> None:
    duel = Duel(500)
    rng = random.Random(1)
    changes = sum(duel.serve(range(s := 20 * rng.randrange(20), s + 15)) for _ in range(400))
    assert changes == 0
    assert duel.rule is Rule.LRU


def test_since_says_when_the_rule_took_over() -> None:
    duel = Duel(100)
    loop = [list(range(10 * i, 10 * i + 10)) for i in range(15)]
    for prompt in loop * 4:
        if duel.serve(prompt):
            break
    assert 0 < duel.since <= duel.num_served
