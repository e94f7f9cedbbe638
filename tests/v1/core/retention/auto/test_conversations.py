"""What conversations give up follows what people come back for."""

import random

import pytest

from vllm.v1.core.retention.auto.conversations import SupersedingLearner
from vllm.v1.core.retention.auto.superseding import Superseding


def make_prompts(rng: random.Random, num_prompts: int, *, returns: float) -> list[list[int]]:
    """Turns of conversations that alternate; some go back a few turns and go on otherwise."""
    fresh = 0
    talks: list[list[int]] = []
    ends: list[list[int]] = []
    prompts = []
    for _ in range(num_prompts):
        if len(talks) < 8:
            talks.append([])
            ends.append([0])
        number = rng.randrange(len(talks))
        talk, said = talks[number], ends[number]
        if rng.random() < returns and len(said) > 3:
            back = said[-rng.randint(2, 3)]
            del talk[back:]
            while said[-1] > back:
                said.pop()
        for _ in range(rng.randint(2, 4)):
            fresh += 1
            talk.append(fresh)
        said.append(len(talk))
        prompts.append(list(talk))
        if len(talk) > 30:
            del talks[number], ends[number]
    return prompts


@pytest.mark.parametrize(
    ("returns", "capacity", "expected"),
    [
        # They only go on, and memory is short: every checkpoint but the last is in the way.
        (0.0, 120, Superseding.AT_ONCE),
        # They go back to earlier turns, and there is room for those.
        (0.5, 450, Superseding.NEVER),
    ],
)
def test_follows_what_people_come_back_for(
    returns: float, capacity: int, expected: Superseding
) -> None:
    learner = SupersedingLearner(capacity, 3.0, None)
    assert learner.current is Superseding.A_TURN_LATER
    prompts = make_prompts(random.Random(2), 1500, returns=returns)
    changes = sum(learner.serve(prompt) for prompt in prompts)
    assert learner.current is expected
    assert 1 <= changes <= 3


def test_changes_its_mind_when_people_do() -> None:
    learner = SupersedingLearner(450, 3.0, None)
    rng = random.Random(3)
    for prompt in make_prompts(rng, 1500, returns=0.5):
        learner.serve(prompt)
    assert learner.current is Superseding.NEVER
    learner = SupersedingLearner(120, 3.0, None)
    for prompt in make_prompts(rng, 1500, returns=0.0):
        learner.serve(prompt)
    assert learner.current is Superseding.AT_ONCE


def test_nothing_changes_while_everything_fits() -> None:
    learner = SupersedingLearner(100_000, 3.0, None)
    prompts = make_prompts(random.Random(4), 600, returns=0.0)
    assert not any(learner.serve(prompt) for prompt in prompts)


def test_what_takes_turns_is_luck() -> None:
    """Two prompts, of which each is hit under another choice: neither is ahead for long."""
    learner = SupersedingLearner(60, 3.0, None)
    rng = random.Random(5)
    changes = 0
    for number in range(1500):
        first = 100 * (number % 40)
        length = rng.randint(1, 12)
        changes += learner.serve(range(first, first + length))
    assert changes <= 4
