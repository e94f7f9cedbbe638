"""How sure answers should be: one temperature, fitted to questions whose answers are known.

Raw log probabilities of letters are too sure of themselves. Divided by a temperature they keep
their order, so no answer changes; the one that makes the known answers most probable is looked for.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vllm.entrypoints.decisions.scoring import softmax

NUM_BINS = 15
# Temperatures that are looked at.
LOWEST, HIGHEST = 0.01, 100.0
_HALVINGS = 100
_LEAST_PROBABILITY = 1e-300


@dataclass(frozen=True, slots=True)
class Labelled:
    """A question whose answer is known.

    Attributes:
        logprobs: Of its labels, as the model gave them.
        right: Which of them is the answer.
    """

    logprobs: Sequence[float]
    right: int


@dataclass(frozen=True, slots=True)
class Calibration:
    """How well probabilities tell how often an answer is right.

    Attributes:
        error: Expected calibration error: the mean distance between the best option's probability
            and how often it is right, over bins of equal width.
        loss: Mean negative log probability of the right options.
    """

    error: float
    loss: float


@dataclass(frozen=True, slots=True)
class Fit:
    """What came of a fit.

    Attributes:
        temperature: The best one.
        num_questions: That it was fitted to.
        accuracy: How often the most likely option is right, at any temperature.
        before: At temperature 1.
        after: At the best one.
        held_out: Of each half at the temperature that the other half gives; None: there is one
            question.
        is_bound: Whether the best one is at the end of what was looked at.
    """

    temperature: float
    num_questions: int
    accuracy: float
    before: Calibration
    after: Calibration
    held_out: Calibration | None
    is_bound: bool


def fit(questions: Sequence[Labelled]) -> Fit:
    """Return the temperature that fits questions best; there is at least one."""
    temperature = find_temperature(questions)
    halves = questions[::2], questions[1::2]
    held_out = None
    if halves[1]:
        own = [find_temperature(half) for half in halves]
        pairs = [(q, own[1]) for q in halves[0]] + [(q, own[0]) for q in halves[1]]
        held_out = _measure(pairs)
    num_right = sum(max(q.logprobs) == q.logprobs[q.right] for q in questions)
    return Fit(
        temperature=temperature,
        num_questions=len(questions),
        accuracy=num_right / len(questions),
        before=_measure([(q, 1.0) for q in questions]),
        after=_measure([(q, temperature) for q in questions]),
        held_out=held_out,
        is_bound=not LOWEST * 1.01 < temperature < HIGHEST / 1.01,
    )


def find_temperature(questions: Sequence[Labelled]) -> float:
    """Return the temperature at which the right options are most probable.

    The loss is convex in the temperature's inverse. Its slope there is the mean, over questions, of
    the expected log probability minus that of the right option: it rises.
    """
    low, high = 1.0 / HIGHEST, 1.0 / LOWEST
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if _slope(questions, middle) > 0 else (middle, high)
    return 2.0 / (low + high)


def _slope(questions: Sequence[Labelled], inverse: float) -> float:
    total = 0.0
    for question in questions:
        # From the highest: sums of large numbers that nearly cancel would lose what matters.
        highest = max(question.logprobs)
        probabilities = softmax(question.logprobs, 1.0 / inverse)
        expected = sum(
            p * (value - highest)
            for p, value in zip(probabilities, question.logprobs, strict=True)
            if p > 0.0
        )
        total += expected - (question.logprobs[question.right] - highest)
    return total


def _measure(pairs: Sequence[tuple[Labelled, float]]) -> Calibration:
    """Measure questions, each at a temperature of its own."""
    sure, right, loss = [0.0] * NUM_BINS, [0] * NUM_BINS, 0.0
    for question, temperature in pairs:
        probabilities = softmax(question.logprobs, temperature)
        best = max(range(len(probabilities)), key=lambda i: probabilities[i])
        at = min(int(probabilities[best] * NUM_BINS), NUM_BINS - 1)
        sure[at] += probabilities[best]
        right[at] += best == question.right
        loss -= math.log(max(probabilities[question.right], _LEAST_PROBABILITY))
    gaps = sum(abs(s - r) for s, r in zip(sure, right, strict=True))
    return Calibration(gaps / len(pairs), loss / len(pairs))
