"""Whether a waiting request gains by waiting for a running prefill of the same prefix."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from vllm.utils.hashing import BlockHash

# Waiting for later steps costs them, so it must save more than a step of a short prompt would take.
MIN_GAIN_TOKENS = 128
# A wait is given up after this many steps, and one more for each so many tokens to come.
_STEPS = 4
_TOKENS_PER_STEP = 256


class Donor(NamedTuple):
    """A running prefill.

    Attributes:
        block_hashes: Its chained hashes, one per unit.
        num_published: Units it has published.
        num_units: Full units of its prompt.
    """

    block_hashes: Sequence[BlockHash]
    num_published: int
    num_units: int


def find_donor(
    donors: Sequence[Donor], block_hashes: Sequence[BlockHash], first: int, limit: int
) -> tuple[int | None, int]:
    """Return which prefill shares most beyond what is published, and the units shared.

    Args:
        donors: Running prefills; only those that published exactly what is cached can give more.
        block_hashes: Hashes of the waiting request.
        first: Units of it that are cached.
        limit: Most units it can resume from.
    """
    best, best_units = None, 0
    for i, donor in enumerate(donors):
        if donor.num_published != first:
            continue
        units, theirs = first, donor.block_hashes
        end = min(limit, donor.num_units)
        while units < end and theirs[units] == block_hashes[units]:
            units += 1
        if units > first and units > best_units:
            best, best_units = i, units
    return best, best_units


def num_shared_units(one: Sequence[BlockHash], other: Sequence[BlockHash]) -> int:
    """Return how many leading units two requests share; a chained hash stands for all before it."""
    most = min(len(one), len(other))
    return bisect_left(range(most), True, key=lambda unit: one[unit] != other[unit])


def max_wait_steps(gain_tokens: int) -> int:
    """Return for how many steps a gain of so many tokens is worth waiting."""
    return _STEPS + gain_tokens // _TOKENS_PER_STEP
