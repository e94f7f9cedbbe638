"""Index and slots together: what is on the disk, and how it gets there without ever lying.

    reserve   slots and a sequence for objects that are to be written     memory only
              ... their bytes are written to the slots, and synced ...    rows_file, at the workers
    commit    their cells are written and synced: acknowledged            one thread
    evict     cells are emptied and synced; only then slots are free      the same thread

A lookup finds acknowledged objects only, and need not wait until all of the index is read
(index_pass). After a failed sync nobody knows what the disk holds of what was written since the
last one: that is forgotten, and its slots stay unused until a restart.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm.utils.math_utils import cdiv
from vllm.v1.kv_offload.store.cells import CELL_BYTES, EMPTY_HEAD, PAGE_BYTES, USES_OFFSET
from vllm.v1.kv_offload.store.entries import Entries
from vllm.v1.kv_offload.store.file_calls import FileCalls
from vllm.v1.kv_offload.store.index_pass import IndexPass
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
from vllm.v1.kv_offload.store.store_log import LOST, REFUSED, StoreLog

# No object takes more of the slots: one would empty the store.
_MAX_SHARE = 4
_FAILURES_TO_STOP = 2
_FAILURE_WINDOW_S = 60.0


@dataclass(frozen=True, slots=True)
class StoreShape:
    """The sizes of a store's files.

    Attributes:
        slot_bytes: Bytes of a slot.
        num_pages: Pages of the index.
        max_slots: Slots of the rows file at its largest.
        seed: Of checksums.
    """

    slot_bytes: int
    num_pages: int
    max_slots: int
    seed: int

    @property
    def index_bytes(self) -> int:
        """The size of the index."""
        return self.num_pages * PAGE_BYTES


@dataclass(slots=True)
class StoreCounts:
    """What a store did since it was opened, in objects unless said otherwise."""

    committed: int = 0
    committed_bytes: int = 0
    failed: int = 0
    no_room: int = 0
    evicted: int = 0
    corrupt: int = 0
    damaged_cells: int = 0


class ObjectStore:
    """The objects of one identity.

    ``find``, ``reserve``, ``pin`` and their like may be called by any thread and touch memory
    alone; ``begin``, ``read_on``, ``commit``, ``make_room`` and ``clear`` touch files and belong to
    one thread. Objects can be found as soon as their part of the index is read; ``is_ready`` says
    that all of it is, and then they can be written.

    Owns: the index's file, what is on its way to it, and under one lock ``Entries`` (what there
    is), ``Room`` (slots) and, while the index is read, an ``Opening``.

    Args:
        files: File calls.
        index: Handle of the index.
        rows: Handles of the rows files, one for each worker; all have the same slots.
        shape: Sizes.
        allow: Given the size in bytes that all rows files want, returns how large they may be.
        clock: Monotonic seconds.
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
        self.shape = shape
        self.counts = StoreCounts()
        self._files = files
        self._index = index
        self._clock = clock
        self._lock = threading.Lock()
        self._entries = Entries(shape.num_pages, shape.seed)
        self._room = Room(files, rows, shape.slot_bytes, shape.max_slots, allow, self._lock)
        self._opening: Opening | None = None
        # On their way, with their last use.
        self._reserved: dict[ObjectKey, int] = {}
        # Reservations up to this sequence were made before the store was cleared.
        self._cleared_at = -1
        self._failures: deque[float] = deque(maxlen=_FAILURES_TO_STOP)
        # What was there when all of the index was read.
        self.opened_bytes = 0
        self.is_ready = False
        self.is_writable = True

    # ---- opening -----------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin to take over what the files hold; no entry is read yet.

        Raises:
            OSError: The rows file is not there.
        """
        shape, num_slots = self.shape, self._room.measure()
        with self._lock:
            self._entries = Entries(shape.num_pages, shape.seed)
            table = self._entries.table
            index_pass = IndexPass(
                self._files, self._index, table, shape.seed, num_slots, shape.slot_bytes
            )
            self._opening = Opening(index_pass, table, self._lock)

    def read_on(self) -> bool:
        """Read some of the index, what lookups wait for first; False: all of it is read.

        Raises:
            OSError: It cannot be read.
        """
        assert self._opening is not None
        found = self._opening.read_some()
        if found is None:
            return True
        with self._lock:
            self._room.take_over(found.free_runs)
            self._entries.take_over(found)
            self.opened_bytes = found.live_bytes
            self.counts.damaged_cells = len(found.dropped)
            used, corrupt = self._opening.take_noted()
            self._opening = None
            self.is_ready = True
            self._entries.next_sequence()
            self._entries.use([one.cell for one in used if self._entries.is_current(one)])
            for one in corrupt:
                if self._entries.is_current(one):
                    self._entries.bury(one.cell)
        return False

    def take_served(self) -> bool:
        """Whether all that lookups waited for has been read since the last call."""
        with self._lock:
            return self._opening is not None and self._opening.take_served()

    def stop_reading(self) -> None:
        """Leave out what is not read: it cannot be. Nothing more is written either."""
        with self._lock:
            self.is_writable = False
            if self._opening is not None:
                self._opening.stop()

    def load(self) -> None:
        """Take over what the files hold, all at once.

        Raises:
            OSError: The index cannot be read.
        """
        self.begin()
        while self.read_on():
            pass

    def begin_log(self, log: StoreLog) -> tuple[list[StoredObject], int]:
        """Have questions and changes noted from now on; returns the objects and the last sequence.

        Only of a store that is ready, and of which nobody has asked anything.
        """
        with self._lock:
            assert self.is_ready
            assert not self._reserved
            self._entries.log = log
            return self._entries.list_all(), self._entries.sequence

    def _note_asked(self) -> None:
        if self._entries.log is not None:
            self._entries.log.note_asked()

    # ---- lookups -----------------------------------------------------------------------------

    def find(self, keys: Sequence[ObjectKey]) -> list[StoredObject | None]:
        """Return the acknowledged objects of some names.

        Raises:
            IndexUnreadError: Their part of the index is not read yet; it is read next.
        """
        with self._lock:
            self._note_asked()
            opening, table = self._opening, self._entries.table
            if opening is None:
                cells = table.find(keys) if self.is_ready else [-1] * len(keys)
                return [None if cell < 0 else table.describe(cell) for cell in cells]
            if keys:
                opening.check_read(keys)
            return [
                None if cell < 0 or opening.is_corrupt(cell) else table.describe(cell)
                for cell in table.find(keys)
            ]

    def contains(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Say which names are acknowledged, or on their way; nothing is before all is read."""
        with self._lock:
            self._note_asked()
            cells = self._entries.table.find(keys) if self.is_ready else [-1] * len(keys)
            return [
                cell >= 0 or key in self._reserved for cell, key in zip(cells, keys, strict=True)
            ]

    def was_given_up(self, key: ObjectKey) -> bool:
        """Whether an object was here since the start, and went for want of room."""
        with self._lock:
            self._note_asked()
            return self._entries.was_given_up(key)

    def take_removed(self) -> list[ObjectKey]:
        """Drain the names of what can be found no more."""
        if not self._entries.has_removed:
            # Asked in every step.
            return []
        with self._lock:
            return self._entries.take_removed()

    def pin(self, objects: Sequence[StoredObject]) -> bool:
        """Keep objects from being evicted, and note their use; False: one is gone."""
        with self._lock:
            self._note_asked()
            entries = self._entries
            if not all(entries.is_current(found) for found in objects):
                return False
            entries.next_sequence()
            entries.pin(objects)
            if self._opening is not None:
                self._opening.note_use(objects)
            else:
                entries.use([found.cell for found in objects])
            return True

    def unpin(self, objects: Sequence[StoredObject]) -> None:
        """Let pinned objects be evicted again."""
        with self._lock:
            self._entries.unpin(objects)

    def use(self, keys: Sequence[ObjectKey], *, is_hit: bool) -> None:
        """Note that a prompt goes through objects, wherever it found them: all at one time.

        Args:
            keys: Their names; what is not here, nor on its way, is left out.
            is_hit: Whether it was spared computing them.
        """
        with self._lock:
            if not self.is_ready:
                return
            sequence = self._entries.next_sequence()
            cells = self._entries.table.find(keys)
            self._entries.use([cell for cell in cells if cell >= 0], is_hit=is_hit)
            for key, cell in zip(keys, cells, strict=True):
                if cell < 0 and key in self._reserved:
                    self._reserved[key] = sequence

    def pass_by(self, keys: Sequence[ObjectKey]) -> None:
        """Note that a conversation begins behind states: those that are its alone go first.

        Args:
            keys: Their names, the deepest first; what is not here is left out.
        """
        with self._lock:
            if self.is_ready:
                self._entries.supersede(keys)

    def report_corrupt(self, found: StoredObject) -> None:
        """Forget an object whose bytes are wrong; its slots stay unused until it is emptied."""
        with self._lock:
            opening = self._opening
            is_known = opening is not None and opening.is_corrupt(found.cell)
            if is_known or not self._entries.is_current(found):
                return
            self.counts.corrupt += 1
            if opening is not None:
                opening.note_corrupt(found)
            else:
                self._entries.bury(found.cell)

    # ---- writing -----------------------------------------------------------------------------

    def reserve(self, specs: Sequence[ObjectSpec]) -> list[Reservation | None]:
        """Take slots for objects; None for those that are there, on their way, or find no room."""
        with self._lock:
            self._note_asked()
            if not (self.is_ready and self.is_writable):
                return [None] * len(specs)
            known = self._entries.table.find([spec.key for spec in specs])
            return [
                self._reserve(spec) if cell < 0 and spec.key not in self._reserved else None
                for spec, cell in zip(specs, known, strict=True)
            ]

    def _reserve(self, spec: ObjectSpec) -> Reservation | None:
        num_slots = cdiv(spec.num_bytes + SEAL_BYTES, self.shape.slot_bytes)
        fits = num_slots * _MAX_SHARE <= self.shape.max_slots
        slots = self._room.take(num_slots) if fits else None
        if slots is None:
            self.counts.no_room += 1
            self._entries.note(REFUSED, spec.key)
            return None
        sequence = self._entries.next_sequence()
        self._reserved[spec.key] = sequence
        return Reservation(spec, Extent(spec.key, sequence, spec.num_bytes, slots))

    def want_room(self, num_bytes: int) -> None:
        """Have room made for objects of so many bytes together, as far as that is reasonable."""
        with self._lock:
            self._room.want(cdiv(num_bytes, self.shape.slot_bytes))

    def abandon(self, reservations: Sequence[Reservation], *, retire: bool = False) -> None:
        """Give up objects that are not on the disk.

        Args:
            reservations: The objects.
            retire: Leave their slots unused: a failed sync may have left anything there.
        """
        with self._lock:
            for reservation in reservations:
                self._reserved.pop(reservation.spec.key, None)
                self.counts.failed += 1
                if not retire:
                    self._room.give_back(reservation.extent.slots)
            if retire:
                self._note_failure()

    def commit(self, reservations: Sequence[Reservation]) -> list[Reservation]:
        """Acknowledge objects whose bytes are synced at every worker.

        Returns:
            Those that will be found from now on, whatever becomes of this process.
        """
        entries = self._entries
        with self._lock:
            reservations = self._drop_cleared(reservations)
            self._evict_ahead()
            placed = self._place(reservations)
            buried = dict(entries.dying)
            changes = [(index * CELL_BYTES, cell) for _, index, cell in placed]
            changes += [(index * CELL_BYTES, EMPTY_HEAD) for index in buried]
            changes += [
                (index * CELL_BYTES + USES_OFFSET, entries.table.uses_of(index))
                for index in entries.take_uses(buried.keys())
            ]
        if not changes:
            return []
        is_written = self._write_cells(changes)
        with self._lock:
            for index, slots in buried.items():
                entries.dying.pop(index, None)
                if is_written:
                    self._room.give_back(slots)
            for reservation, index, cell in placed:
                if is_written:
                    self._reserved.pop(reservation.spec.key, None)
                    entries.put(reservation, index, cell)
                    self.counts.committed += 1
                    self.counts.committed_bytes += reservation.spec.num_bytes
                else:
                    # On the disk its cell may stand or not: nothing else may take its slots.
                    self._lose(reservation)
                    self.counts.failed += 1
            if not is_written:
                self._note_failure()
                return []
        return [reservation for reservation, _, _ in placed]

    def _drop_cleared(self, reservations: Sequence[Reservation]) -> list[Reservation]:
        """Give up what was reserved before the store was cleared."""
        kept = []
        for reservation in reservations:
            if reservation.extent.sequence > self._cleared_at:
                kept.append(reservation)
                continue
            self._lose(reservation)
            self._room.give_back(reservation.extent.slots)
            self.counts.failed += 1
        return kept

    def _lose(self, reservation: Reservation) -> None:
        """Take note that an object on its way will not be found."""
        self._reserved.pop(reservation.spec.key, None)
        self._entries.note(LOST, reservation.spec.key)

    def _place(self, reservations: Sequence[Reservation]) -> list[tuple[Reservation, int, bytes]]:
        placed: list[tuple[Reservation, int, bytes]] = []
        entries, table = self._entries, self._entries.table
        taken = set(entries.dying)
        for reservation in reservations:
            index = table.choose_cell(reservation.spec.key, taken)
            if index is None:
                self._lose(reservation)
                self._room.give_back(reservation.extent.slots)
                self.counts.no_room += 1
                for near in table.cells_near(reservation.spec.key):
                    if near not in entries.pins and near not in entries.dying:
                        self._evict(near)
                        break
                continue
            taken.add(index)
            last_use = self._reserved.get(reservation.spec.key, 0)
            placed.append((reservation, index, table.make_cell(reservation, last_use)))
        return placed

    def _write_cells(self, changes: Sequence[tuple[int, bytes]]) -> bool:
        """Write parts of cells, at their offsets; False: nobody knows what the disk holds."""
        try:
            for offset, data in changes:
                self._files.write(self._index, [data], offset)
            self._files.sync(self._index)
        except OSError:
            return False
        return True

    def _note_failure(self) -> None:
        now = self._clock()
        self._failures.append(now)
        if len(self._failures) == _FAILURES_TO_STOP:
            self.is_writable = now - self._failures[0] > _FAILURE_WINDOW_S

    # ---- giving up ---------------------------------------------------------------------------

    def make_room(self, *, may_wait: bool = False) -> None:
        """Grow, or evict, until what was last refused fits and some is free ahead.

        Args:
            may_wait: Whether room that nobody was refused may be made by the commit of what is on
                its way: one sync less.
        """
        with self._lock:
            if not (self.is_ready and self.is_writable):
                return
            num_missing = self._room.num_missing
            if num_missing <= 0 and not self._entries.dying:
                return
            comes_later = may_wait and not self._room.has_refused and bool(self._reserved)
        if num_missing > 0 and self._room.can_grow:
            self._room.grow(num_missing)
        if not comes_later:
            self.commit(())

    def _evict_ahead(self) -> None:
        """Give objects up until enough will be free after the next sync; holds the lock."""
        num_missing = self._room.num_missing
        if self._room.can_grow:
            return
        self._room.begin_making()
        freed = sum(count for slots in self._entries.dying.values() for _, count in slots)
        while freed < num_missing:
            index = self._entries.table.next_victim(self._entries.pins)
            if index is None:
                return
            freed += self._evict(index)

    def _evict(self, index: int) -> int:
        self.counts.evicted += 1
        return self._entries.evict(index)

    def clear(self) -> bool:
        """Forget all objects, on the disk too, and those on their way; False: that failed."""
        with self._lock:
            if not (self.is_ready and self.is_writable):
                return False
            self._cleared_at = self._entries.sequence
            for index in self._entries.table.used().tolist():
                self._entries.bury(index)
        self.commit(())
        with self._lock:
            return not self._entries.dying

    # ---- numbers -----------------------------------------------------------------------------

    @property
    def capacity_bytes(self) -> int:
        """Bytes of slots at one worker, as of now."""
        return self._room.num_slots * self.shape.slot_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of slots that are not free."""
        return self.capacity_bytes - self._room.num_free * self.shape.slot_bytes

    @property
    def live_bytes(self) -> int:
        """Bytes of objects that can be found."""
        return self._entries.live_bytes

    def num_objects(self) -> dict[str, int]:
        """Return how many objects of each kind can be found."""
        with self._lock:
            return self._entries.num_by_kind()

    def list_objects(self) -> list[StoredObject]:
        """Return all objects; O(objects)."""
        with self._lock:
            return self._entries.list_all()

    def count_as_found(self) -> None:
        """Take what is there now as what was there when the store was opened."""
        with self._lock:
            self.opened_bytes = self._entries.live_bytes

    def list_keys(self, most: int) -> list[ObjectKey]:
        """Return the names of the objects that were used last."""
        with self._lock:
            return self._entries.list_keys(most)

    def find_faults(self) -> list[str]:
        """Say which slots are in two places (D3)."""
        with self._lock:
            owners: dict[int, str] = {}
            faults = []
            places = [(f"cell {one.cell}", one.extent.slots) for one in self._entries.list_all()]
            places += [(f"dying cell {i}", slots) for i, slots in self._entries.dying.items()]
            places += [("the free list", self._room.free_runs)]
            for name, slots in places:
                for start, count in slots:
                    for slot in range(start, start + count):
                        if slot in owners:
                            faults.append(f"slot {slot} is in {owners[slot]} and in {name}")
                        owners[slot] = name
            return faults
