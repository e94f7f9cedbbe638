"""Which entries go first: an order that is kept up as entries change, and never made anew.

    start        all entries are sorted once, as arrays
    an entry     is entered in a heap when it comes, or when it is to go before others
    a use        changes its cell only: who comes up with an old score is entered with the new one

A score only rises but where an entry is superseded, so whoever comes up with its present score is
the first of all. Each change is met at most once more: O(log n) a victim.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from vllm.v1.kv_offload.store.cells import (
    CELL_BYTES,
    EMPTY_HEAD,
    POSITION,
    POSITION_OFFSET,
    USES,
    USES_OFFSET,
    Cells,
)

# By how much a superseded entry's score is below all others.
_SUPERSEDED = 1 << 62
_NOT_QUEUED = -1
_WORD = 32
_MAX_POSITION = (1 << _WORD) - 1

Indices = NDArray[np.int64]


class EvictionOrder:
    """Superseded entries first, then the least recently used, of a chain the deepest.

    Owns: the order. Not thread-safe.

    Args:
        cells: All cells, which somebody else changes.
    """

    def __init__(self, cells: Cells) -> None:
        self._cells = cells
        self._raw = memoryview(cells.view(np.uint8).data)
        # The score under which an entry stands in the order; others of it are void.
        self._queued: Indices = np.full(len(cells), _NOT_QUEUED, np.int64)
        # Those of the start, in order, and how far they were taken.
        self._first: Indices = np.empty(0, np.int64)
        self._first_scores: Indices = np.empty(0, np.int64)
        self._at = 0
        self._heap: list[int] = []

    def begin(self, used: Indices) -> None:
        """Take the entries that are there."""
        scores = self._cells["last_use"][used].astype(np.int64)
        scores[self._cells["superseded"][used] == 0] += _SUPERSEDED
        positions = self._cells["position"][used].astype(np.int64)
        order = np.lexsort((used, -positions, scores))
        self._first, self._first_scores, self._at = used[order], scores[order], 0
        self._heap.clear()
        self._queued[:] = _NOT_QUEUED
        self._queued[self._first] = self._first_scores

    def enter(self, index: int) -> None:
        """Take an entry that is new, or that goes before others from now on."""
        score = self._score(index)
        self._queued[index] = score
        heapq.heappush(self._heap, self._pack(score, index))

    def take(self, pinned: Collection[int]) -> int | None:
        """Return the entry to give up next; None: all are pinned, or there is none.

        It stays in the order until its cell is emptied.
        """
        found: int | None = None
        skipped: list[int] = []
        while (packed := self._take_first()) is not None:
            index = packed & _MAX_POSITION
            score = packed >> 2 * _WORD
            if self._queued[index] != score:
                continue
            self._queued[index] = _NOT_QUEUED
            low = index * CELL_BYTES
            if self._raw[low : low + len(EMPTY_HEAD)] == EMPTY_HEAD:
                continue
            if score != self._score(index):
                self.enter(index)
                continue
            skipped.append(index)
            if index not in pinned:
                found = index
                break
        self._put_back(skipped)
        return found

    def _put_back(self, indices: Sequence[int]) -> None:
        for index in indices:
            self.enter(index)

    def _take_first(self) -> int | None:
        """Take the lowest of all that stand in the order, packed."""
        old = None
        if self._at < len(self._first):
            old = self._pack(int(self._first_scores[self._at]), int(self._first[self._at]))
        if old is None or (self._heap and self._heap[0] < old):
            return heapq.heappop(self._heap) if self._heap else None
        self._at += 1
        return old

    def _score(self, index: int) -> int:
        last_use, _, is_superseded = USES.unpack_from(self._raw, index * CELL_BYTES + USES_OFFSET)
        return int(last_use) + (0 if is_superseded else _SUPERSEDED)

    def _pack(self, score: int, index: int) -> int:
        (position,) = POSITION.unpack_from(self._raw, index * CELL_BYTES + POSITION_OFFSET)
        depth = _MAX_POSITION - int(position)
        return score << 2 * _WORD | depth << _WORD | index
