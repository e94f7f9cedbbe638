"""Slots: which are free, how many more there may be, and how many are wanted next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock

from vllm.v1.kv_offload.store.file_calls import FileCalls
from vllm.v1.kv_offload.store.free_slots import Extents, FreeSlots

# Kept free ahead of the next batch, so that it need not wait for a sync of its evictions: at least
# this share, and at most that one, where batches were larger of late.
_AHEAD_SHARE = 64
_MOST_AHEAD_SHARE = 8
# How much of what a batch wanted is wanted of the next one.
_AHEAD_DECAY = 0.95
# The rows file grows by this share of its largest size.
_GROWTH_SHARE = 16


class Room:
    """The slots of the rows files, which all have the same ones.

    ``grow`` touches files and takes the store's lock itself; whoever calls anything else holds it.

    Owns: which slots are free, the files' size, what is wanted.

    Args:
        files: File calls.
        rows: Handles of the rows files.
        slot_bytes: Bytes of a slot.
        max_slots: Of a file at its largest.
        allow: Given the size in bytes that all rows files want, returns how large they may be.
        lock: The store's.

    Attributes:
        num_slots: That there are now.
    """

    def __init__(
        self,
        files: FileCalls,
        rows: Sequence[int],
        slot_bytes: int,
        max_slots: int,
        allow: Callable[[int], int],
        lock: Lock,
    ) -> None:
        self._files = files
        self._rows = tuple(rows)
        self._slot_bytes = slot_bytes
        self._max_slots = max_slots
        self._allow = allow
        self._lock = lock
        self._free = FreeSlots()
        self.num_slots = 0
        self._num_refused = 0
        self._ahead = 0.0
        self._may_grow = True

    def measure(self) -> int:
        """Take what the files have.

        Raises:
            OSError: One is not there.
        """
        sizes = [self._files.size(handle) for handle in self._rows]
        self.num_slots = min(self._max_slots, min(sizes) // self._slot_bytes)
        return self.num_slots

    def take_over(self, free_runs: Sequence[tuple[int, int]]) -> None:
        """Begin with some free slots."""
        self._free = FreeSlots(free_runs)

    @property
    def num_free(self) -> int:
        """Slots that hold nothing."""
        return self._free.num_free

    @property
    def free_runs(self) -> Extents:
        """Slots that hold nothing, as (first slot, slots)."""
        return tuple(self._free.runs())

    @property
    def num_missing(self) -> int:
        """Slots that should be free and are not; below 0: there are more."""
        wanted = max(self._num_refused, int(self._ahead), self._max_slots // _AHEAD_SHARE)
        return wanted - self._free.num_free

    @property
    def has_refused(self) -> bool:
        """Whether somebody got no slots since room was made."""
        return self._num_refused > 0

    @property
    def can_grow(self) -> bool:
        """Whether there may be more slots, as far as is known."""
        return self._may_grow and self.num_slots < self._max_slots

    def take(self, num_slots: int) -> Extents | None:
        """Take slots; None, and they are wanted: there are too few."""
        slots = self._free.take(num_slots)
        if slots is None:
            self._num_refused = max(self._num_refused, num_slots)
        return slots

    def give_back(self, slots: Extents) -> None:
        """Let slots be free."""
        self._free.add_all(slots)

    def want(self, num_slots: int) -> None:
        """Have so many slots free ahead of the next batch, as far as that is reasonable."""
        self._ahead = max(self._ahead, min(num_slots, self._max_slots // _MOST_AHEAD_SHARE))

    def begin_making(self) -> None:
        """Take note that what was refused is made room for now."""
        self._num_refused = 0
        self._ahead *= _AHEAD_DECAY

    def grow(self, num_wanted: int) -> None:
        """Make the rows files longer, as far as the folder's limit and the disk allow."""
        slot_bytes, num_workers = self._slot_bytes, len(self._rows)
        step = max(num_wanted, self._max_slots // _GROWTH_SHARE)
        target = min(self._max_slots, self.num_slots + step)
        allowed = self._allow(target * slot_bytes * num_workers)
        target = min(target, allowed // (slot_bytes * num_workers))
        self._num_refused = 0
        if target <= self.num_slots:
            self._may_grow = False
            return
        try:
            for handle in self._rows:
                self._files.allocate(handle, target * slot_bytes)
                self._files.sync(handle)
        except OSError:
            # The disk is full, or the user's quota: what is there already is what there is.
            self._may_grow = False
            return
        with self._lock:
            self._free.add(self.num_slots, target - self.num_slots)
            self.num_slots = target
