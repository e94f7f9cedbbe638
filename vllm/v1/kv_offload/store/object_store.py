"""Objects that can be found, and those on their way: what any thread may ask of a store.

    reserve   slots and a sequence for objects that are to be written     memory only
              ... their bytes are written to the slots, and synced ...    rows_file, at the workers
    commit    their cells are written and synced: acknowledged            one thread: writer
    evict     cells are emptied and synced; only then slots are free      the same thread

A lookup finds acknowledged objects only, and need not wait until all of the index is read
(opening). After a failed sync nobody knows what the disk holds of what was written since the last
one: that is forgotten, and its slots stay unused until a restart.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from vllm.utils.math_utils import cdiv
from vllm.v1.kv_offload.store.content import StoreContent
from vllm.v1.kv_offload.store.file_calls import FileCalls
from vllm.v1.kv_offload.store.opening import Opening
from vllm.v1.kv_offload.store.records import (
    Extent,
    ObjectKey,
    ObjectSpec,
    Reservation,
    StoredObject,
)
from vllm.v1.kv_offload.store.room import Room
from vllm.v1.kv_offload.store.rows_file import SEAL_BYTES
from vllm.v1.kv_offload.store.store_log import REFUSED, StoreLog
from vllm.v1.kv_offload.store.store_state import StoreShape, StoreState
from vllm.v1.kv_offload.store.writer import StoreWriter

# No object takes more of the slots: one would empty the store.
_MAX_SHARE = 4


class ObjectStore:
    """The objects of one identity.

    Its own methods touch memory alone. Objects can be found as soon as their part of the index is
    read; ``state.is_ready`` says that all of it is, and then they can be written.

    Args:
        files: File calls.
        index: Handle of the index.
        rows: Handles of the rows files, one for each worker; all have the same slots.
        shape: Sizes.
        allow: Given the size in bytes that all rows files want, returns how large they may be.
        clock: Monotonic seconds.

    Attributes:
        state: The lock, and what it guards: records, slots, what is on its way.
        opening: Takes the index over.
        writer: What changes on the disk: commits, and what is given up for them.
        content: What there is, in numbers and lists.
        shape: Sizes.
        counts: What happened.
    """

    def __init__(
        self,
        files: FileCalls,
        index: int,
        rows: Sequence[int],
        shape: StoreShape,
        allow: Callable[[int], int],
        clock: Callable[[], float],
    ) -> None:
        lock = threading.Lock()
        room = Room(files, rows, shape.slot_bytes, shape.max_slots, allow, lock)
        self.state = StoreState(shape, lock, room, clock)
        self.opening = Opening(files, index, self.state)
        self.writer = StoreWriter(files, index, self.state)
        self.content = StoreContent(self.state)
        self.shape = shape
        self.counts = self.state.counts

    def begin_log(self, log: StoreLog) -> tuple[list[StoredObject], int]:
        """Have questions and changes noted from now on; returns the objects and the last sequence.

        Only of a store that is ready, and of which nobody has asked anything.
        """
        with self.state.lock:
            assert self.state.is_ready
            assert not self.state.reservations
            self.state.entries.begin_log(log)
            return self.state.entries.list_all(), self.state.entries.sequence

    # ---- lookups -----------------------------------------------------------------------------

    def find(self, keys: Sequence[ObjectKey]) -> list[StoredObject | None]:
        """Return the acknowledged objects of some names.

        Raises:
            IndexUnreadError: Their part of the index is not read yet; it is read next.
        """
        with self.state.lock:
            self.state.entries.note_asked()
            opening, table = self.opening, self.state.entries.table
            if not opening.is_reading:
                cells = self._find_cells(keys)
                return [None if cell < 0 else table.describe(cell) for cell in cells]
            if keys:
                opening.check_read(keys)
            return [
                None if cell < 0 or opening.is_corrupt(cell) else table.describe(cell)
                for cell in table.find(keys)
            ]

    def _find_cells(self, keys: Sequence[ObjectKey]) -> Sequence[int]:
        """Return the cells of some names, -1 where there is none; none before all is read."""
        return self.state.entries.table.find(keys) if self.state.is_ready else [-1] * len(keys)

    def contains(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Say which names are acknowledged, or on their way; nothing is before all is read."""
        with self.state.lock:
            self.state.entries.note_asked()
            return [
                cell >= 0 or key in self.state.reservations
                for cell, key in zip(self._find_cells(keys), keys, strict=True)
            ]

    def was_given_up(self, key: ObjectKey) -> bool:
        """Whether an object was here since the start, and went for want of room."""
        with self.state.lock:
            self.state.entries.note_asked()
            return self.state.entries.was_given_up(key)

    def take_removed(self) -> list[ObjectKey]:
        """Drain the names of what can be found no more."""
        if not self.state.entries.has_removed:
            # Asked in every step.
            return []
        with self.state.lock:
            return self.state.entries.take_removed()

    # ---- uses --------------------------------------------------------------------------------

    def pin(self, objects: Sequence[StoredObject]) -> bool:
        """Keep objects from being evicted, and note their use; False: one is gone."""
        with self.state.lock:
            entries = self.state.entries
            entries.note_asked()
            if not all(entries.is_current(found) for found in objects):
                return False
            entries.next_sequence()
            entries.pin(objects)
            if self.opening.is_reading:
                self.opening.note_use(objects)
            else:
                entries.use([found.cell for found in objects])
            return True

    def unpin(self, objects: Sequence[StoredObject]) -> None:
        """Let pinned objects be evicted again."""
        with self.state.lock:
            self.state.entries.unpin(objects)

    def use(self, keys: Sequence[ObjectKey], *, is_hit: bool) -> None:
        """Note that a prompt goes through objects, wherever it found them: all at one time.

        Args:
            keys: Their names; what is not here, nor on its way, is left out.
            is_hit: Whether it was spared computing them.
        """
        with self.state.lock:
            if not self.state.is_ready:
                return
            entries = self.state.entries
            sequence = entries.next_sequence()
            cells = entries.table.find(keys)
            entries.use([cell for cell in cells if cell >= 0], is_hit=is_hit)
            absent = [key for key, cell in zip(keys, cells, strict=True) if cell < 0]
            self.state.reservations.use(absent, sequence)

    def pass_by(self, keys: Sequence[ObjectKey]) -> None:
        """Note that a conversation begins behind states: those that are its alone go first.

        Args:
            keys: Their names, the deepest first; what is not here is left out.
        """
        with self.state.lock:
            if self.state.is_ready:
                self.state.entries.supersede(keys)

    def report_corrupt(self, found: StoredObject) -> None:
        """Forget an object whose bytes are wrong; its slots stay unused until it is emptied."""
        with self.state.lock:
            opening, entries = self.opening, self.state.entries
            if opening.is_corrupt(found.cell) or not entries.is_current(found):
                return
            self.counts.corrupt += 1
            if opening.is_reading:
                opening.note_corrupt(found)
            else:
                entries.bury(found.cell)

    # ---- on the way to the disk --------------------------------------------------------------

    def reserve(self, specs: Sequence[ObjectSpec]) -> list[Reservation | None]:
        """Take slots for objects; None for those that are there, on their way, or find no room."""
        with self.state.lock:
            self.state.entries.note_asked()
            if not self.state.can_be_written:
                return [None] * len(specs)
            known = self.state.entries.table.find([spec.key for spec in specs])
            return [
                self._reserve(spec)
                if cell < 0 and spec.key not in self.state.reservations
                else None
                for spec, cell in zip(specs, known, strict=True)
            ]

    def _reserve(self, spec: ObjectSpec) -> Reservation | None:
        state = self.state
        num_slots = cdiv(spec.num_bytes + SEAL_BYTES, self.shape.slot_bytes)
        fits = num_slots * _MAX_SHARE <= self.shape.max_slots
        slots = state.room.take(num_slots) if fits else None
        if slots is None:
            self.counts.no_room += 1
            state.entries.note(REFUSED, spec.key)
            return None
        sequence = state.entries.next_sequence()
        state.reservations.add(spec.key, sequence)
        return Reservation(spec, Extent(spec.key, sequence, spec.num_bytes, slots))

    def want_room(self, num_bytes: int) -> None:
        """Have room made for objects of so many bytes together, as far as that is reasonable."""
        with self.state.lock:
            self.state.room.want(cdiv(num_bytes, self.shape.slot_bytes))

    def abandon(self, reservations: Sequence[Reservation], *, retire: bool = False) -> None:
        """Give up objects that are not on the disk.

        Args:
            reservations: The objects.
            retire: Leave their slots unused: a failed sync may have left anything there.
        """
        with self.state.lock:
            for reservation in reservations:
                self.state.reservations.drop(reservation.spec.key)
                self.counts.failed += 1
                if not retire:
                    self.state.room.give_back(reservation.extent.slots)
            if retire:
                self.state.note_failure()
