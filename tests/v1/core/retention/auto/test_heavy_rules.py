"""The rule follows the traffic where spans without a checkpoint are of no use."""

import random

from vllm.v1.core.retention.auto.eviction import Rule
from vllm.v1.core.retention.auto.heavy_rules import HeavyDuel, HeavyShadow


def test_a_loop_that_does_not_fit_brings_residents() -> None:
    duel = HeavyDuel(200, 3.0)
    loop = [list(range(10 * i, 10 * i + 10)) for i in range(30)]
    for _ in range(3):
        for prompt in loop:
            duel.serve(prompt)
    assert duel.rule is Rule.RESIDENTS


def test_chats_keep_what_was_used_last() -> None:
    """Turns of conversations that alternate, over a few system prompts."""
    rng = random.Random(1)
    duel = HeavyDuel(200, 3.0)
    talks: list[list[int]] = []
    fresh = 1000
    changes = 0
    for _ in range(2000):
        if len(talks) < 8:
            system = 100 * rng.randrange(3)
            talks.append(list(range(system, system + 2)))
        talk = talks[min(int(rng.expovariate(0.5)), len(talks) - 1)]
        talks.remove(talk)
        for _ in range(rng.randint(1, 3)):
            fresh += 1
            talk.append(fresh)
        changes += duel.serve(talk)
        if len(talk) < 20:
            talks.insert(0, talk)
    assert duel.rule in (Rule.LRU, Rule.LONG_PROBATION)
    assert changes <= 2


def test_what_lies_behind_the_last_checkpoint_is_no_hit() -> None:
    shadow = HeavyShadow(Rule.LRU, 100, 3.0)
    assert shadow.serve(range(10)) == 0
    # Parts at 5: the second prompt shows it, the third hits.
    assert shadow.serve([*range(5), 20, 21]) == 0
    assert shadow.serve([*range(5), 30, 31]) == 5
    # A conversation goes on, twice: where it began before is gone.
    assert shadow.serve(range(12)) == 10
    assert shadow.serve(range(14)) == 12
    assert shadow.serve([*range(10), 40]) == 5
