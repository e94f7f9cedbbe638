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
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from vllm.exceptions import VllmError
from vllm.utils.math_utils import cdiv
from vllm.v1.kv_offload.store.cell_table import CellTable
from vllm.v1.kv_offload.store.cells import (
    CELL_BYTES,
    EMPTY_HEAD,
    PAGE_BYTES,
    USES_OFFSET,
    ObjectKind,
)
from vllm.v1.kv_offload.store.file_calls import FileCalls
from vllm.v1.kv_offload.store.free_slots import Extents, FreeSlots
from vllm.v1.kv_offload.store.index_pass import IndexPass
from vllm.v1.kv_offload.store.records import (
    Extent,
    ObjectKey,
    ObjectSpec,
    Reservation,
    StoredObject,
)
from vllm.v1.kv_offload.store.rows_file import SEAL_BYTES
from vllm.v1.kv_offload.store.store_log import EVICTED, GONE, LOST, REFUSED, StoreLog

# No object takes more of the slots: one would empty the store.
_MAX_SHARE = 4
# Kept free ahead of the next batch, so that it need not wait for a sync of its evictions: at least
# this share, and at most that one, where batches were larger of late.
_AHEAD_SHARE = 64
_MOST_AHEAD_SHARE = 8
# How much of what a batch wanted is wanted of the next one.
_AHEAD_DECAY = 0.95
# The rows file grows by this share of its largest size.
_GROWTH_SHARE = 16
# Uses that are written with one batch; they are no promise.
_MAX_USES = 256
_FAILURES_TO_STOP = 2
# Names remembered of what was given up, to tell it from what was never there.
_MAX_GHOSTS = 1 << 16
_FAILURE_WINDOW_S = 60.0


class IndexUnreadError(VllmError):
    """A lookup came before its part of the index was read."""


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

    Owns: the index in memory and its file's content, which slots are free.

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
        self._rows = tuple(rows)
        self._allow = allow
        self._clock = clock
        self._lock = threading.Lock()
        self._table = CellTable(shape.num_pages, shape.seed)
        self._free = FreeSlots()
        self._num_slots = 0
        self._count = 0
        self._pins: dict[int, int] = {}
        # While the index is read: what reads it, and what happened to entries meanwhile.
        self._pass: IndexPass | None = None
        self._early_uses: list[StoredObject] = []
        self._early_corrupt: dict[int, StoredObject] = {}
        # On their way, with their last use.
        self._reserved: dict[ObjectKey, int] = {}
        # Cells whose emptying is not on the disk yet, with their slots.
        self._dying: dict[int, Extents] = {}
        self._uses: dict[int, None] = {}
        self._failures: deque[float] = deque(maxlen=_FAILURES_TO_STOP)
        self._live_bytes = 0
        # What was there when all of the index was read.
        self.opened_bytes = 0
        self._num_by_kind: Counter[int] = Counter()
        # Given up since the start, the oldest first; what came back is not.
        self._ghosts: dict[ObjectKey, None] = {}
        self._removed: list[ObjectKey] = []
        self._log: StoreLog | None = None
        self.is_ready = False
        self.is_writable = True
        self._wants_room = 0
        self._ahead = 0.0
        self._may_grow = True
        # Reservations up to this sequence were made before the store was cleared.
        self._cleared_at = -1

    # ---- opening -----------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin to take over what the files hold; no entry is read yet.

        Raises:
            OSError: The rows file is not there.
        """
        sizes = [self._files.size(handle) for handle in self._rows]
        num_slots = min(self.shape.max_slots, min(sizes) // self.shape.slot_bytes)
        shape = self.shape
        with self._lock:
            self._table = CellTable(shape.num_pages, shape.seed)
            self._num_slots = num_slots
            self._pass = IndexPass(
                self._files, self._index, self._table, shape.seed, num_slots, shape.slot_bytes
            )

    def read_on(self) -> bool:
        """Read some of the index, what lookups wait for first; False: all of it is read.

        Raises:
            OSError: It cannot be read.
        """
        index_pass = self._pass
        assert index_pass is not None
        with self._lock:
            pages = index_pass.next_pages()
        if pages is not None:
            cells = index_pass.read(pages)
            with self._lock:
                index_pass.enter(pages, cells)
            return True
        found = index_pass.finish()
        free = FreeSlots(found.free_runs)
        with self._lock:
            self._free, self._count = free, found.count
            self._live_bytes = self.opened_bytes = found.live_bytes
            self._num_by_kind = Counter(found.num_by_kind)
            # Emptied on the disk before anything else: their slots may be in use.
            self._dying = dict.fromkeys(found.dropped, ())
            self.counts.damaged_cells = len(found.dropped)
            self._pass = None
            self._table.begin_order(found.used)
            self.is_ready = True
            self._settle_early()
        return False

    def _settle_early(self) -> None:
        """Take note of what was used, or found to be corrupt, before all was read."""
        used, self._early_uses = self._early_uses, []
        corrupt, self._early_corrupt = self._early_corrupt, {}
        self._count += 1
        self._note_uses([found.cell for found in used if self._is_current(found)])
        for found in corrupt.values():
            if self._is_current(found):
                self._bury(found.cell)

    def take_served(self) -> bool:
        """Whether all that lookups waited for has been read since the last call."""
        with self._lock:
            return self._pass is not None and self._pass.take_served()

    def stop_reading(self) -> None:
        """Leave out what is not read: it cannot be. Nothing more is written either."""
        with self._lock:
            self.is_writable = False
            if self._pass is not None:
                self._pass.know_all()

    def load(self) -> None:
        """Take over what the files hold, all at once.

        Raises:
            OSError: The index cannot be read.
        """
        self.begin()
        while self.read_on():
            pass

    # ---- keeping a record --------------------------------------------------------------------

    def begin_log(self, log: StoreLog) -> tuple[list[StoredObject], int]:
        """Have questions and changes noted from now on; returns the objects and the last sequence.

        Only of a store that is ready, and of which nobody has asked anything.
        """
        with self._lock:
            assert self.is_ready
            assert not self._reserved
            self._log = log
            return [self._table.describe(int(index)) for index in self._table.used()], self._count

    def _note_asked(self) -> None:
        if self._log is not None:
            self._log.note_asked()

    def _note(self, kind: str, key: ObjectKey) -> None:
        if self._log is not None:
            self._log.note(kind, key)

    # ---- lookups -----------------------------------------------------------------------------

    def find(self, keys: Sequence[ObjectKey]) -> list[StoredObject | None]:
        """Return the acknowledged objects of some names.

        Raises:
            IndexUnreadError: Their part of the index is not read yet; it is read next.
        """
        with self._lock:
            self._note_asked()
            if self._pass is not None and keys:
                pages = self._table.pages_of(keys)
                if not self._pass.knows(pages):
                    self._pass.want(pages)
                    raise IndexUnreadError
            elif not self.is_ready:
                return [None] * len(keys)
            return [
                None if cell < 0 or cell in self._early_corrupt else self._table.describe(cell)
                for cell in self._table.find(keys)
            ]

    def contains(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Say which names are acknowledged, or on their way; nothing is before all is read."""
        with self._lock:
            self._note_asked()
            cells = self._table.find(keys) if self.is_ready else [-1] * len(keys)
            return [
                cell >= 0 or key in self._reserved for cell, key in zip(cells, keys, strict=True)
            ]

    def was_given_up(self, key: ObjectKey) -> bool:
        """Whether an object was here since the start, and went for want of room."""
        with self._lock:
            self._note_asked()
            return key in self._ghosts

    @property
    def has_removed(self) -> bool:
        """Whether ``take_removed`` has names to tell."""
        return bool(self._removed)

    def take_removed(self) -> list[ObjectKey]:
        """Drain the names of what can be found no more."""
        with self._lock:
            removed, self._removed = self._removed, []
            return removed

    def pin(self, objects: Sequence[StoredObject]) -> bool:
        """Keep objects from being evicted, and note their use; False: one is gone."""
        with self._lock:
            self._note_asked()
            if not all(self._is_current(found) for found in objects):
                return False
            self._count += 1
            for found in objects:
                self._pins[found.cell] = self._pins.get(found.cell, 0) + 1
            if self.is_ready:
                self._note_uses([found.cell for found in objects])
            else:
                self._early_uses += objects
            return True

    def _note_uses(self, cells: Sequence[int], *, is_hit: bool = False) -> None:
        self._table.touch(np.array(cells, np.int64), self._count, is_hit=is_hit)
        self._uses.update(dict.fromkeys(cells))

    def use(self, keys: Sequence[ObjectKey], *, is_hit: bool) -> None:
        """Note that a prompt goes through objects, wherever it found them: all at one time.

        Args:
            keys: Their names; what is not here, nor on its way, is left out.
            is_hit: Whether it was spared computing them.
        """
        with self._lock:
            if not self.is_ready:
                return
            self._count += 1
            cells = self._table.find(keys)
            self._note_uses([cell for cell in cells if cell >= 0], is_hit=is_hit)
            for key, cell in zip(keys, cells, strict=True):
                if cell < 0 and key in self._reserved:
                    self._reserved[key] = self._count

    def unpin(self, objects: Sequence[StoredObject]) -> None:
        """Let pinned objects be evicted again."""
        with self._lock:
            for found in objects:
                self._pins[found.cell] -= 1
                if not self._pins[found.cell]:
                    del self._pins[found.cell]

    def _is_current(self, found: StoredObject) -> bool:
        cell = self._table.cells[found.cell]
        return bool(cell["checksum"]) and int(cell["sequence"]) == found.extent.sequence

    def pass_by(self, keys: Sequence[ObjectKey]) -> None:
        """Note that a conversation begins behind states: those that are its alone go first.

        Args:
            keys: Their names, the deepest first; what is not here is left out.
        """
        with self._lock:
            for cell in self._table.find(keys) if self.is_ready else ():
                if cell >= 0 and self._table.supersede(cell):
                    self._uses[cell] = None

    def report_corrupt(self, found: StoredObject) -> None:
        """Forget an object whose bytes are wrong; its slots stay unused until it is emptied."""
        with self._lock:
            if not self._is_current(found) or found.cell in self._early_corrupt:
                return
            self.counts.corrupt += 1
            if self.is_ready:
                self._bury(found.cell)
            else:
                self._early_corrupt[found.cell] = found

    # ---- writing -----------------------------------------------------------------------------

    def reserve(self, specs: Sequence[ObjectSpec]) -> list[Reservation | None]:
        """Take slots for objects; None for those that are there, on their way, or find no room."""
        with self._lock:
            self._note_asked()
            if not (self.is_ready and self.is_writable):
                return [None] * len(specs)
            known = self._table.find([spec.key for spec in specs])
            return [
                self._reserve(spec) if cell < 0 and spec.key not in self._reserved else None
                for spec, cell in zip(specs, known, strict=True)
            ]

    def _reserve(self, spec: ObjectSpec) -> Reservation | None:
        num_slots = cdiv(spec.num_bytes + SEAL_BYTES, self.shape.slot_bytes)
        if num_slots * _MAX_SHARE > self.shape.max_slots:
            self.counts.no_room += 1
            self._note(REFUSED, spec.key)
            return None
        slots = self._free.take(num_slots)
        if slots is None:
            self._note(REFUSED, spec.key)
            self._wants_room = max(self._wants_room, num_slots)
            self.counts.no_room += 1
            return None
        self._count += 1
        self._reserved[spec.key] = self._count
        return Reservation(spec, Extent(spec.key, self._count, spec.num_bytes, slots))

    def want_room(self, num_bytes: int) -> None:
        """Have room made for objects of so many bytes together, as far as that is reasonable."""
        num_slots = cdiv(num_bytes, self.shape.slot_bytes)
        with self._lock:
            self._ahead = max(
                self._ahead, min(num_slots, self.shape.max_slots // _MOST_AHEAD_SHARE)
            )

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
                    self._free.add_all(reservation.extent.slots)
            if retire:
                self._note_failure()

    def commit(self, reservations: Sequence[Reservation]) -> list[Reservation]:
        """Acknowledge objects whose bytes are synced at every worker.

        Returns:
            Those that will be found from now on, whatever becomes of this process.
        """
        with self._lock:
            reservations = self._drop_cleared(reservations)
            self._evict_ahead()
            placed = self._place(reservations)
            buried = dict(self._dying)
            uses = list(self._uses)[:_MAX_USES]
            changes = [(index * CELL_BYTES, cell) for _, index, cell in placed]
            changes += [(index * CELL_BYTES, EMPTY_HEAD) for index in buried]
            changes += [
                (index * CELL_BYTES + USES_OFFSET, self._table.uses_of(index))
                for index in uses
                if index not in buried and self._table.cells["checksum"][index]
            ]
            for index in uses:
                self._uses.pop(index)
        if not changes:
            return []
        if not self._write_cells(changes):
            with self._lock:
                for reservation, _, _ in placed:
                    self._lose(reservation)
                    self.counts.failed += 1
                # On the disk these cells may stand or not: nothing else may take their slots.
                self._forget_buried(buried, retire=True)
                self._note_failure()
            return []
        with self._lock:
            self._forget_buried(buried, retire=False)
            for reservation, index, cell in placed:
                self._table.put(index, cell)
                if self._log is not None:
                    spec = reservation.spec
                    self._log.note_put(reservation.extent, spec.position, spec.next_token)
                self._reserved.pop(reservation.spec.key, None)
                self._ghosts.pop(reservation.spec.key, None)
                size = reservation.spec.num_bytes
                self._live_bytes += size + SEAL_BYTES
                self._num_by_kind[reservation.spec.key.kind] += 1
                self.counts.committed += 1
                self.counts.committed_bytes += size
        return [reservation for reservation, _, _ in placed]

    def _drop_cleared(self, reservations: Sequence[Reservation]) -> list[Reservation]:
        """Give up what was reserved before the store was cleared."""
        kept = []
        for reservation in reservations:
            if reservation.extent.sequence > self._cleared_at:
                kept.append(reservation)
                continue
            self._lose(reservation)
            self._free.add_all(reservation.extent.slots)
            self.counts.failed += 1
        return kept

    def _lose(self, reservation: Reservation) -> None:
        """Take note that an object on its way will not be found."""
        self._reserved.pop(reservation.spec.key, None)
        self._note(LOST, reservation.spec.key)

    def _place(self, reservations: Sequence[Reservation]) -> list[tuple[Reservation, int, bytes]]:
        placed: list[tuple[Reservation, int, bytes]] = []
        taken = set(self._dying)
        for reservation in reservations:
            index = self._table.choose_cell(reservation.spec.key, taken)
            if index is None:
                self._lose(reservation)
                self._free.add_all(reservation.extent.slots)
                self.counts.no_room += 1
                for near in self._table.cells_near(reservation.spec.key):
                    if near not in self._pins and near not in self._dying:
                        self._evict(near)
                        break
                continue
            taken.add(index)
            last_use = self._reserved.get(reservation.spec.key, 0)
            placed.append((reservation, index, self._table.make_cell(reservation, last_use)))
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
            wanted = self._num_ahead() - self._free.num_free
            if wanted <= 0 and not self._dying:
                return
            num_slots = self._num_slots
            comes_later = may_wait and not self._wants_room and bool(self._reserved)
        if wanted > 0 and self._may_grow and num_slots < self.shape.max_slots:
            self._grow(wanted)
            self._wants_room = 0
        if not comes_later:
            self.commit(())

    def _num_ahead(self) -> int:
        return max(self._wants_room, int(self._ahead), self.shape.max_slots // _AHEAD_SHARE)

    def _grow(self, num_wanted: int) -> None:
        """Make the rows files longer, as far as the folder's limit and the disk allow."""
        slot_bytes, num_workers = self.shape.slot_bytes, len(self._rows)
        step = max(num_wanted, self.shape.max_slots // _GROWTH_SHARE)
        target = min(self.shape.max_slots, self._num_slots + step)
        allowed = self._allow(target * slot_bytes * num_workers)
        target = min(target, allowed // (slot_bytes * num_workers))
        if target <= self._num_slots:
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
            self._free.add(self._num_slots, target - self._num_slots)
            self._num_slots = target

    def _evict_ahead(self) -> None:
        """Give objects up until enough will be free after the next sync; holds the lock."""
        freed = sum(count for slots in self._dying.values() for _, count in slots)
        wanted = self._num_ahead() - self._free.num_free
        if self._may_grow and self._num_slots < self.shape.max_slots:
            return
        self._wants_room = 0
        self._ahead *= _AHEAD_DECAY
        while freed < wanted:
            index = self._table.next_victim(self._pins)
            if index is None:
                return
            freed += self._evict(index)

    def _evict(self, index: int) -> int:
        """Give an object up; returns its slots."""
        self.counts.evicted += 1
        self._ghosts[self._table.describe(index).extent.key] = None
        if len(self._ghosts) > _MAX_GHOSTS:
            del self._ghosts[next(iter(self._ghosts))]
        return self._bury(index, EVICTED)

    def _bury(self, index: int, why: str = GONE) -> int:
        """Empty a cell; its slots are free once that is on the disk."""
        extent = self._table.describe(index).extent
        if self._log is not None:
            self._log.note(why, extent.key)
        self._live_bytes -= extent.num_bytes + SEAL_BYTES
        self._num_by_kind[extent.key.kind] -= 1
        if len(self._removed) < _MAX_GHOSTS:
            self._removed.append(extent.key)
        slots = self._table.remove(index)
        self._dying[index] = slots
        self._uses.pop(index, None)
        return sum(count for _, count in slots)

    def _forget_buried(self, buried: dict[int, Extents], *, retire: bool) -> None:
        for index, slots in buried.items():
            self._dying.pop(index, None)
            if not retire:
                self._free.add_all(slots)

    def clear(self) -> bool:
        """Forget all objects, on the disk too, and those on their way; False: that failed."""
        with self._lock:
            if not (self.is_ready and self.is_writable):
                return False
            self._cleared_at = self._count
            for index in self._table.used().tolist():
                self._bury(index)
        self.commit(())
        with self._lock:
            return not self._dying

    # ---- numbers -----------------------------------------------------------------------------

    @property
    def capacity_bytes(self) -> int:
        """Bytes of slots at one worker, as of now."""
        return self._num_slots * self.shape.slot_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of slots that are not free."""
        return self.capacity_bytes - self._free.num_free * self.shape.slot_bytes

    @property
    def live_bytes(self) -> int:
        """Bytes of objects that can be found."""
        return self._live_bytes

    def num_objects(self) -> dict[str, int]:
        """Return how many objects of each kind can be found."""
        with self._lock:
            return {kind.name.lower(): self._num_by_kind[kind] for kind in ObjectKind}

    def list_objects(self) -> list[StoredObject]:
        """Return all objects; O(objects)."""
        with self._lock:
            return [self._table.describe(int(index)) for index in self._table.used()]

    def count_as_found(self) -> None:
        """Take what is there now as what was there when the store was opened."""
        with self._lock:
            self.opened_bytes = self._live_bytes

    def list_keys(self, most: int) -> list[ObjectKey]:
        """Return the names of the objects that were used last."""
        with self._lock:
            used = self._table.used()
            cells = self._table.cells
            if len(used) > most:
                used = used[np.argpartition(cells["last_use"][used], -most)[-most:]]
            kinds, keys = cells["kind"][used].tolist(), cells["key"][used]
        return [
            ObjectKey(ObjectKind(kind), key.tobytes())
            for kind, key in zip(kinds, keys, strict=True)
        ]

    def find_faults(self) -> list[str]:
        """Say which slots are in two places (D3)."""
        with self._lock:
            owners: dict[int, str] = {}
            faults = []
            places = [
                (f"cell {i}", self._table.describe(int(i)).extent.slots) for i in self._table.used()
            ]
            places += [(f"dying cell {i}", slots) for i, slots in self._dying.items()]
            places += [("the free list", tuple(self._free.runs()))]
            for name, slots in places:
                for start, count in slots:
                    for slot in range(start, start + count):
                        if slot in owners:
                            faults.append(f"slot {slot} is in {owners[slot]} and in {name}")
                        owners[slot] = name
            return faults
