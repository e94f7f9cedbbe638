"""Random numbers that are the same in every process and Python version."""

import math
import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Draws:
    """Draws from a seed.

    Python promises the sequence of ``Random.random()`` for a seed, and of no other method: all else
    is made from it here.

    Args:
        seed: Of the run.
        stream: A number of the purpose, so that what one purpose draws moves no other.
    """

    def __init__(self, seed: int, stream: int = 0) -> None:
        self._random = random.Random(seed * 1_000_003 + stream).random

    def uniform(self) -> float:
        """Return a number in [0, 1)."""
        return self._random()

    def below(self, count: int) -> int:
        """Return a whole number in [0, count)."""
        return int(self._random() * count)

    def between(self, low: int, high: int) -> int:
        """Return a whole number in [low, high]."""
        return low + self.below(high - low + 1)

    def choice(self, items: Sequence[T]) -> T:
        """Return one of several items."""
        return items[self.below(len(items))]

    def shuffled(self, items: Sequence[T]) -> list[T]:
        """Return the items in another order (Fisher and Yates)."""
        result = list(items)
        for i in range(len(result) - 1, 0, -1):
            j = self.below(i + 1)
            result[i], result[j] = result[j], result[i]
        return result

    def exponential(self, mean: float) -> float:
        """Return a waiting time of a Poisson process."""
        return -mean * math.log(1.0 - self._random())

    def gamma(self, shape: float, mean: float) -> float:
        """Return a gamma variate of a given mean (Marsaglia and Tsang, 2000)."""
        if shape < 1.0:
            # A variate of shape + 1, scaled; see section 6 of the paper.
            boosted = self.gamma(shape + 1.0, 1.0) * (shape + 1.0)
            power = math.pow(1.0 - self._random(), 1.0 / shape)
            return boosted * power / shape * mean
        if math.isinf(shape):
            return mean  # what ever larger shapes come to
        d = shape - 1.0 / 3.0
        c = 1.0 / math.sqrt(9.0 * d)
        while True:
            x = self._normal()
            v = (1.0 + c * x) ** 3
            if v > 0 and math.log(1.0 - self._random()) < 0.5 * x * x + d - d * v + d * math.log(v):
                return d * v / shape * mean

    def _normal(self) -> float:
        radius = math.sqrt(-2.0 * math.log(1.0 - self._random()))
        return radius * math.cos(2.0 * math.pi * self._random())
