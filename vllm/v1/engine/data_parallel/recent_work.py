"""How much replicas were given to compute lately, and what memory costs there: news for old."""

import math

import numpy as np

from vllm.v1.engine.data_parallel.policy import (
    Amounts,
    Flags,
    find_eviction_price,
    find_eviction_prices,
)

# Prices are computed anew when so much of the memory of all was filled, and for one replica always.
_RENEW_SHARE = 0.01
# Recent tokens are counted in a unit that grows; it begins anew above this.
_MAX_UNIT = 1e9


class RecentWork:
    """Tokens that replicas computed lately: what all together could hold in their memory.

    What was computed longer ago counts less, falling by e each time that the whole fleet has filled
    its memory once. So the replica with more than its share has filled its own faster, and what it
    evicts next is younger than what others evict.

    Owns: the counts, the prices made of them.

    Args:
        num_replicas: How many there are.
        capacity_tokens: That fit in the memory of each.
    """

    def __init__(self, num_replicas: int, capacity_tokens: int) -> None:
        self._capacity = max(1, capacity_tokens)
        # In a unit that grows instead of all numbers that shrink.
        self.tokens: Amounts = np.zeros(num_replicas)
        self._unit = 1.0
        self._serves: Flags = np.ones(num_replicas, np.bool_)
        self._renew()

    def _renew(self) -> None:
        self._num_serving = max(1, int(self._serves.sum()))
        self._mean = float(self.tokens[self._serves].sum()) / self._num_serving
        self.prices = find_eviction_prices(self.tokens, self._mean)
        self._unit_then = self._unit

    def set_serving(self, serves: Flags) -> None:
        """Note which replicas serve: the others do not count for what is usual."""
        self._serves = serves
        self._renew()

    def add(self, rank: int, num_tokens: int) -> None:
        """Note that a replica was given tokens to compute."""
        self._unit *= math.exp(num_tokens / (self._num_serving * self._capacity))
        self.tokens[rank] += num_tokens * self._unit
        if self._unit > _MAX_UNIT:
            self.tokens /= self._unit
            self._unit = 1.0
            self._renew()
        elif self._unit > self._unit_then * (1 + _RENEW_SHARE):
            self._renew()
        else:
            # One number: an array's functions would take longer than the rest.
            self.prices[rank] = find_eviction_price(float(self.tokens[rank]), self._mean)

    def forget(self, rank: int) -> None:
        """Note that a replica begins anew.

        It counts as usual, not as cheap: unused memory costs nothing anyway, and what it pulls of
        others before it serves is worth as much as theirs.
        """
        self.tokens[rank] = self._mean
        self._renew()

    def add_replica(self) -> None:
        """Make room for one more, which serves; as after ``forget``."""
        self.tokens = np.append(self.tokens, self._mean)
        self._serves = np.append(self._serves, True)
        self._renew()
