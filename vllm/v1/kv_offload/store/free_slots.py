"""Which slots of a file are free: runs between those in use."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Sequence
from itertools import chain, islice

from vllm.v1.kv_offload.store.cells import MAX_EXTENT_SLOTS, MAX_EXTENTS

Extents = tuple[tuple[int, int], ...]


class FreeSlots:
    """Free runs of slots, by their first slot.

    Owns: the runs; no two touch.

    Args:
        runs: Those that are free at first, as (first slot, slots), in order; no two touch.
    """

    def __init__(self, runs: Sequence[tuple[int, int]] = ()) -> None:
        self._counts = dict(runs)
        self._starts = list(self._counts)
        self._cursor = 0
        self.num_free = sum(self._counts.values())

    def add(self, start: int, count: int) -> None:
        """Add a run that is not free yet, and join it with its neighbours."""
        if count <= 0:
            return
        self.num_free += count
        at = bisect_left(self._starts, start)
        if at < len(self._starts) and self._starts[at] == start + count:
            count += self._counts.pop(self._starts.pop(at))
        if at and self._starts[at - 1] + self._counts[self._starts[at - 1]] == start:
            self._counts[self._starts[at - 1]] += count
            return
        insort(self._starts, start)
        self._counts[start] = count

    def add_all(self, extents: Iterable[tuple[int, int]]) -> None:
        """Add several runs."""
        for start, count in extents:
            self.add(start, count)

    def take(self, count: int) -> Extents | None:
        """Take slots in at most 8 runs, from one if there is one; None: there is no such room."""
        if count > self.num_free:
            return None
        start = self._find_run(count)
        if start is not None:
            return tuple(self._take_from(start, count))
        longest = sorted(self._starts, key=lambda s: self._counts[s], reverse=True)[:MAX_EXTENTS]
        parts = [min(self._counts[s], MAX_EXTENT_SLOTS) for s in longest]
        if sum(parts) < count:
            return None
        taken: list[tuple[int, int]] = []
        for start, part in zip(longest, parts, strict=True):
            if count:
                taken += self._take_from(start, min(part, count))
                count -= min(part, count)
        return tuple(taken)

    def _find_run(self, count: int) -> int | None:
        """Return the next run that is long enough, from where the last one was found."""
        if count > MAX_EXTENT_SLOTS * MAX_EXTENTS:
            return None
        counts, starts = self._counts, self._starts
        at = bisect_right(starts, self._cursor)
        for start in chain(islice(starts, at, None), islice(starts, at)):
            if counts[start] >= count:
                return start
        return None

    def _take_from(self, start: int, count: int) -> Sequence[tuple[int, int]]:
        """Take the first slots of a run."""
        at = bisect_left(self._starts, start)
        length = self._counts.pop(start)
        if length > count:
            self._starts[at] = start + count
            self._counts[start + count] = length - count
        else:
            del self._starts[at]
        self.num_free -= count
        self._cursor = start
        return [
            (start + low, min(MAX_EXTENT_SLOTS, count - low))
            for low in range(0, count, MAX_EXTENT_SLOTS)
        ]

    def runs(self) -> list[tuple[int, int]]:
        """Return all runs."""
        return [(start, self._counts[start]) for start in self._starts]
