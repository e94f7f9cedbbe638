"""From labels' log probabilities to an answer's numbers. Pure, and in one order: equal bits."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Distribution:
    """How likely each option is, in the question's order.

    Attributes:
        probabilities: They sum to 1.
        label_mass: The share of all the model might say that are labels, before any of this.
    """

    probabilities: tuple[float, ...]
    label_mass: float

    @property
    def best(self) -> int:
        """The most likely option, the first of several."""
        return max(range(len(self.probabilities)), key=lambda i: self.probabilities[i])

    @property
    def confidence(self) -> float:
        """The best option's probability, times the mass of all labels."""
        return self.probabilities[self.best] * self.label_mass

    @property
    def mean_index(self) -> float:
        """The sum of each option's place times its probability; places begin at 0."""
        return sum(i * probability for i, probability in enumerate(self.probabilities))


def softmax(logprobs: Sequence[float], temperature: float) -> tuple[float, ...]:
    """Return probabilities of options alone.

    Args:
        logprobs: Of their labels.
        temperature: Above 1 flattens, below 1 sharpens; which is the largest stays.
    """
    highest = max(logprobs)
    if highest == -math.inf:
        return tuple(1.0 / len(logprobs) for _ in logprobs)
    weights = [math.exp((logprob - highest) / temperature) for logprob in logprobs]
    total = sum(weights)
    return tuple(weight / total for weight in weights)


def label_mass(logprobs: Sequence[float]) -> float:
    """Return the probability of all labels together."""
    return min(1.0, sum(math.exp(logprob) for logprob in logprobs))


def make_distribution(
    readings: Sequence[tuple[int, Sequence[float]]], temperature: float
) -> Distribution:
    """Return the distribution over options that were asked for in several orders.

    Args:
        readings: By how many places the options were rotated, and their labels' log probabilities
            in that order.
        temperature: See ``softmax``.
    """
    num_options = len(readings[0][1])
    sums, mass = [0.0] * num_options, 0.0
    for turn, logprobs in readings:
        for place, probability in enumerate(softmax(logprobs, temperature)):
            sums[(place + turn) % num_options] += probability
        mass += label_mass(logprobs)
    count = len(readings)
    if count == 1:
        return Distribution(tuple(sums), mass)
    return Distribution(tuple(total / count for total in sums), mass / count)
