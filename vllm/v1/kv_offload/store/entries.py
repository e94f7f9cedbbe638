"""What there is: the index in memory, and what follows when an entry comes, is used, or goes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set

import numpy as np

from vllm.v1.kv_offload.store.cell_table import CellTable
from vllm.v1.kv_offload.store.cells import ObjectKind
from vllm.v1.kv_offload.store.free_slots import Extents
from vllm.v1.kv_offload.store.index_pass import TakenOver
from vllm.v1.kv_offload.store.records import ObjectKey, Reservation, StoredObject
from vllm.v1.kv_offload.store.rows_file import SEAL_BYTES
from vllm.v1.kv_offload.store.store_log import EVICTED, GONE, StoreLog

# Uses that are written with one batch; they are no promise.
_MAX_USES = 256
# Names remembered of what was given up, to tell it from what was never there.
_MAX_GHOSTS = 1 << 16


class Entries:
    """The entries of a store. Whoever calls holds the store's lock.

    Owns: the index in memory, pins and uses, emptied cells whose slots are not free yet, the names
    of what went, the bytes and numbers of what is there.

    Args:
        num_pages: Pages of the index.
        seed: Of checksums.

    Attributes:
        table: The cells.
        sequence: Of the last write or use.
        pins: How often each cell is pinned.
        dying: Cells whose emptying is not on the disk yet, with their slots.
        live_bytes: Bytes of objects that can be found.
    """

    def __init__(self, num_pages: int, seed: int) -> None:
        self.table = CellTable(num_pages, seed)
        self.sequence = 0
        self.pins: dict[int, int] = {}
        self.dying: dict[int, Extents] = {}
        self.live_bytes = 0
        # Where questions and changes are noted, in runs that are recorded.
        self._log: StoreLog | None = None
        self._uses: dict[int, None] = {}
        self._num_by_kind: Counter[int] = Counter()
        # Given up since the start, the oldest first; what came back is not.
        self._ghosts: dict[ObjectKey, None] = {}
        self._removed: list[ObjectKey] = []

    def take_over(self, found: TakenOver) -> None:
        """Begin with what a pass through the index entered into the table."""
        self.sequence, self.live_bytes = found.count, found.live_bytes
        self._num_by_kind = Counter(found.num_by_kind)
        # Emptied on the disk before anything else: their slots may be in use.
        self.dying = dict.fromkeys(found.dropped, ())
        self.table.begin_order(found.used)

    def next_sequence(self) -> int:
        """Return the number of a write or use that happens now."""
        self.sequence += 1
        return self.sequence

    # ---- records -----------------------------------------------------------------------------

    def is_current(self, found: StoredObject) -> bool:
        """Whether an object that was found is there still."""
        cell = self.table.cells[found.cell]
        return bool(cell["checksum"]) and int(cell["sequence"]) == found.extent.sequence

    def list_all(self) -> list[StoredObject]:
        """Return all objects; O(objects)."""
        return [self.table.describe(int(index)) for index in self.table.used()]

    def list_keys(self, most: int) -> list[ObjectKey]:
        """Return the names of the objects that were used last."""
        used, cells = self.table.used(), self.table.cells
        if len(used) > most:
            used = used[np.argpartition(cells["last_use"][used], -most)[-most:]]
        kinds, keys = cells["kind"][used].tolist(), cells["key"][used]
        return [
            ObjectKey(ObjectKind(kind), key.tobytes())
            for kind, key in zip(kinds, keys, strict=True)
        ]

    def num_by_kind(self) -> dict[str, int]:
        """Return how many objects of each kind there are."""
        return {kind.name.lower(): self._num_by_kind[kind] for kind in ObjectKind}

    def begin_log(self, log: StoreLog) -> None:
        """Have questions and changes noted from now on."""
        self._log = log

    def note_asked(self) -> None:
        """Count a question, for a record."""
        if self._log is not None:
            self._log.note_asked()

    def note(self, kind: str, key: ObjectKey) -> None:
        """Note what became of an object, for a record."""
        if self._log is not None:
            self._log.note(kind, key)

    # ---- uses --------------------------------------------------------------------------------

    def pin(self, objects: Sequence[StoredObject]) -> None:
        """Keep objects from being given up."""
        for found in objects:
            self.pins[found.cell] = self.pins.get(found.cell, 0) + 1

    def unpin(self, objects: Sequence[StoredObject]) -> None:
        """Let pinned objects be given up again."""
        for found in objects:
            self.pins[found.cell] -= 1
            if not self.pins[found.cell]:
                del self.pins[found.cell]

    def use(self, cells: Sequence[int], *, is_hit: bool = False) -> None:
        """Note a use of some cells, the last one that has a number."""
        self.table.touch(np.array(cells, np.int64), self.sequence, is_hit=is_hit)
        self._uses.update(dict.fromkeys(cells))

    def supersede(self, keys: Sequence[ObjectKey]) -> None:
        """Note that a conversation begins behind states, the deepest first."""
        for cell in self.table.find(keys):
            if cell >= 0 and self.table.supersede(cell):
                self._uses[cell] = None

    def take_uses(self, buried: Set[int]) -> list[int]:
        """Drain the cells whose uses are written next, as many as one batch takes."""
        taken = list(self._uses)[:_MAX_USES]
        for index in taken:
            del self._uses[index]
        return [i for i in taken if i not in buried and self.table.cells["checksum"][i]]

    # ---- coming and going --------------------------------------------------------------------

    def put(self, reservation: Reservation, index: int, cell: bytes) -> None:
        """Let an object be found from now on."""
        spec = reservation.spec
        self.table.put(index, cell)
        if self._log is not None:
            self._log.note_put(reservation.extent, spec.position, spec.next_token)
        self._ghosts.pop(spec.key, None)
        self.live_bytes += spec.num_bytes + SEAL_BYTES
        self._num_by_kind[spec.key.kind] += 1

    def evict(self, index: int) -> int:
        """Give an object up for want of room; returns its slots."""
        self._ghosts[self.table.describe(index).extent.key] = None
        if len(self._ghosts) > _MAX_GHOSTS:
            del self._ghosts[next(iter(self._ghosts))]
        return self.bury(index, EVICTED)

    def bury(self, index: int, why: str = GONE) -> int:
        """Empty a cell; its slots are free once that is on the disk."""
        extent = self.table.describe(index).extent
        self.note(why, extent.key)
        self.live_bytes -= extent.num_bytes + SEAL_BYTES
        self._num_by_kind[extent.key.kind] -= 1
        if len(self._removed) < _MAX_GHOSTS:
            self._removed.append(extent.key)
        slots = self.table.remove(index)
        self.dying[index] = slots
        self._uses.pop(index, None)
        return sum(count for _, count in slots)

    def was_given_up(self, key: ObjectKey) -> bool:
        """Whether an object was here since the start, and went for want of room."""
        return key in self._ghosts

    @property
    def has_removed(self) -> bool:
        """Whether ``take_removed`` has names to tell."""
        return bool(self._removed)

    def take_removed(self) -> list[ObjectKey]:
        """Drain the names of what can be found no more."""
        removed, self._removed = self._removed, []
        return removed
