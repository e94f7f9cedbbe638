"""Which rows of an Engram table stand for the n-grams of a text: numbers only (torch-free).

    table of a layer   | n = 2: head 0 | head 1 | ... | n = 3: head 0 | ... |
    rows of a head     a prime, another one for every head of every layer

Ids are folded before (``token_folding``), so that spellings of one word share rows. Source: the
facts that the release's published files state, checked by the heights of its tables.
"""

from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import numpy as np

_SEED_STEP = 10_007
# Bases for which the test of Miller and Rabin is exact below 3.3e24.
_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)


@dataclass(frozen=True, slots=True)
class NgramPlan:
    """The tables of a model.

    Attributes:
        layer_ids: The layers before which a table is read, ascending.
        longest: Tokens of the longest n-gram.
        num_heads: Rows read for the n-grams of one length.
        row_width: Values of a row.
        least_rows: Below the rows of any head.
        pad_token_id: Stands where an n-gram has no token.
        num_folded: Ids that folding leaves.
    """

    layer_ids: tuple[int, ...]
    longest: int
    num_heads: int
    row_width: int
    least_rows: int
    pad_token_id: int
    num_folded: int

    @property
    def rows_per_token(self) -> int:
        """Rows of one table that are read for a token."""
        return (self.longest - 1) * self.num_heads

    def find_primes(self, table: int) -> tuple[int, ...]:
        """Returns the rows of each head of the table-th table, in the order of the heads."""
        count = self.rows_per_token
        return _find_primes(self.least_rows, count * len(self.layer_ids))[
            table * count : (table + 1) * count
        ]

    def find_offsets(self, table: int) -> tuple[int, ...]:
        """Returns the first row of each head."""
        return (0, *accumulate(self.find_primes(table)[:-1]))

    def count_rows(self, table: int) -> int:
        """Returns the rows of the table-th table."""
        return sum(self.find_primes(table))

    def find_multipliers(self, table: int) -> tuple[int, ...]:
        """Returns the odd numbers that the tokens of an n-gram are multiplied by, newest first."""
        limit = max(1, (2**63 - 1) // self.num_folded // 2)
        source = np.random.default_rng(_SEED_STEP * self.layer_ids[table])
        drawn = source.integers(0, limit, size=self.longest, dtype=np.int64)
        return tuple(2 * int(value) + 1 for value in drawn)


@cache
def _find_primes(least: int, count: int) -> tuple[int, ...]:
    found: list[int] = []
    candidate = least
    while len(found) < count:
        if _is_prime(candidate):
            found.append(candidate)
        candidate += 1
    return tuple(found)


def _is_prime(number: int) -> bool:
    if number < 2:
        return False
    for prime in _WITNESSES:
        if number % prime == 0:
            return number == prime
    odd, num_halvings = number - 1, 0
    while odd % 2 == 0:
        odd, num_halvings = odd // 2, num_halvings + 1
    return all(_passes(number, witness, odd, num_halvings) for witness in _WITNESSES)


def _passes(number: int, witness: int, odd: int, num_halvings: int) -> bool:
    power = pow(witness, odd, number)
    if power in (1, number - 1):
        return True
    for _ in range(num_halvings - 1):
        power = power * power % number
        if power == number - 1:
            return True
    return False
