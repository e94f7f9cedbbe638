"""The rule in force follows the traffic, and does not flap."""

import random

import pytest

from vllm.v1.core.retention.auto.duel import Duel
from vllm.v1.core.retention.auto.eviction import Rule


def make_chat(rng: random.Random, num_prompts: int) -> list[list[int]]:
    """Turns of conversations that alternate, over a few system prompts."""
    talks: list[list[int]] = []
    fresh = 1000
    prompts = []
    for _ in range(num_prompts):
        if len(talks) < 8:
            system = 100 * rng.randrange(3)
            talks.append(list(range(system, system + 2)))
        talk = talks[min(int(rng.expovariate(0.5)), len(talks) - 1)]
        talks.remove(talk)
        for _ in range(rng.randint(1, 3)):
            fresh += 1
            talk.append(fresh)
        prompts.append(list(talk))
        if len(talk) < 20:
            talks.insert(0, talk)
    return prompts


def test_a_loop_that_does_not_fit_brings_residents_and_its_end_takes_them_away() -> None:
    duel = Duel(200)
    loop = [list(range(10 * i, 10 * i + 10)) for i in range(30)]
    for prompt in loop * 3:
        duel.serve(prompt)
    assert duel.rule is Rule.RESIDENTS
    # Conversations, each continued a few times at once: what was used last is used next.
    for number in range(400):
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


@pytest.mark.parametrize("capacity", [100, 200, 400])
def test_chats_keep_what_was_used_last(capacity: int) -> None:
    """In small pools too, where a prompt is a good part of what is cached."""
    duel = Duel(capacity, 3.0)
    changes = sum(duel.serve(prompt) for prompt in make_chat(random.Random(1), 2000))
    assert duel.rule in (Rule.LRU, Rule.LONG_PROBATION)
    assert changes <= 2
