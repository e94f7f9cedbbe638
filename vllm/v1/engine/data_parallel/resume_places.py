"""Where prompts can be resumed, and how a long prompt finds the few such places on its way."""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

_NUM_MARK_BITS = 20
_MASK = (1 << 64) - 1
# Hashes need not differ in their low bits (ids of traces do not); those of such a product do.
_SPREAD = 0x9E3779B97F4A7C15
_SHIFT = 64 - _NUM_MARK_BITS
# A count that stays: nobody knows how many more there were.
_FULL = 255
# From a prompt's end on so many are looked up one by one: a next turn finds its place there.
_NEAR = 16


class ResumePlaces(dict[int, int]):
    """Prefix -> who can resume behind it, one bit each.

    Most units of a prompt are no such place, and each lookup of one that is not reads memory that
    nothing else has read lately. So a table of 1 MiB counts the prefixes by 20 bits of them, and a
    prompt's units are sought there, all at once.

    Owns: the counts.
    """

    def __init__(self) -> None:
        super().__init__()
        self._marks = bytearray(1 << _NUM_MARK_BITS)
        # The same memory.
        self._counts: npt.NDArray[np.uint8] = np.frombuffer(self._marks, np.uint8)

    def __setitem__(self, short: int, holders: int) -> None:
        if short not in self:
            place = (short * _SPREAD & _MASK) >> _SHIFT
            if self._marks[place] < _FULL:
                self._marks[place] += 1
        super().__setitem__(short, holders)

    def __delitem__(self, short: int) -> None:
        super().__delitem__(short)
        place = (short * _SPREAD & _MASK) >> _SHIFT
        if self._marks[place] < _FULL:
            self._marks[place] -= 1

    def find(self, hashes: Sequence[int], low: int, high: int) -> Iterator[int]:
        """Yield how many leading units of a prompt end with a place, the most first.

        Args:
            hashes: Of the prompt's units, 64 bits each.
            low: More than so many.
            high: At most so many.
        """
        near = max(low, high - _NEAR)
        for i in range(high, near, -1):
            if hashes[i - 1] in self:
                yield i
        if near > low:
            keys = np.fromiter(hashes[low:near], np.uint64, near - low)
            keys *= np.uint64(_SPREAD)
            keys >>= np.uint64(_SHIFT)
            for i in self._counts[keys].nonzero()[0][::-1].tolist():
                if hashes[low + i] in self:
                    yield low + i + 1
