"""The index in memory: what it holds, where a new entry goes, which entries go first."""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from vllm.v1.kv_offload.store.cells import (
    CELL,
    CELL_BYTES,
    EMPTY_HEAD,
    KEY_OFFSET,
    KIND_OFFSET,
    PAGE_BYTES,
    PAGE_CELLS,
    USES,
    USES_OFFSET,
    Cells,
    ObjectKind,
    OpenCell,
    as_words,
    close_cell,
    open_cell,
    pick,
)
from vllm.v1.kv_offload.store.eviction_order import EvictionOrder
from vllm.v1.kv_offload.store.free_slots import Extents
from vllm.v1.kv_offload.store.records import Extent, ObjectKey, Reservation, StoredObject
from vllm.v1.kv_offload.store.rows_file import SEAL_BYTES

_NO_TOKEN = -1
_HALVES = struct.Struct("<QQ")
# So few keys are found sooner one by one than as arrays.
_FEW_KEYS = 16
# Uses that may have been counted since the last write.
_MAX_USES = 1 << 40
# With so many hits a state is where several prompts part, and no conversation's alone.
SHARED_HITS = 2

Indices = NDArray[np.int64]


class CellTable:
    """All cells, as an array. An entry may stand in either of two pages that its key names.

    Owns: the cells in memory. Not thread-safe.

    Args:
        num_pages: Pages of 32 cells.
        seed: Of the cells' checksums: those of another folder do not pass.
    """

    def __init__(self, num_pages: int, seed: int) -> None:
        self.num_pages = num_pages
        self._seed = seed
        self.cells: Cells = np.zeros(num_pages * PAGE_CELLS, CELL)
        self._raw = memoryview(self.cells.view(np.uint8).data)
        self._heads = as_words(self.cells)[:, 0]
        self._order = EvictionOrder(self.cells)

    @property
    def raw(self) -> memoryview:
        """All bytes of all cells."""
        return self._raw

    # ---- taking over what a file holds -------------------------------------------------------

    def fill(self, pages: Indices, cells: Cells) -> None:
        """Enter the cells of some pages, 32 of each."""
        words = as_words(self.cells).reshape(self.num_pages, -1)
        words[pages] = as_words(cells).reshape(len(pages), -1)

    def clear(self, indices: Iterable[int]) -> None:
        """Empty cells."""
        for index in indices:
            self.cells[index] = np.zeros((), CELL)

    def find_shared(self, used: Indices) -> list[int]:
        """Return entries that share a slot with a younger one.

        Args:
            used: The indices of all entries.
        """
        owners, starts, ends = self._intervals(used)
        order = np.argsort(starts, kind="stable")
        starts, ends = starts[order], ends[order]
        if not (starts[1:] < ends[:-1]).any():
            return []
        taken: set[int] = set()
        shared = []
        entries = np.unique(owners)
        by_age = np.argsort(self.cells["sequence"][entries])[::-1]
        for index in entries[by_age].tolist():
            slots = {
                slot
                for start, count in open_cell(self._raw, index).extents
                for slot in range(start, start + count)
            }
            if slots & taken:
                shared.append(int(index))
            else:
                taken |= slots
        return shared

    def _intervals(self, used: Indices) -> tuple[Indices, Indices, Indices]:
        """Return, per run of slots of some entries, its cell, its first slot, the one behind it."""
        cells = pick(self.cells, used)
        extents = cells["extents"]
        in_use = np.arange(extents.shape[1]) < cells["num_extents"][:, None]
        owners = np.repeat(used, in_use.sum(axis=1))
        starts = extents["slot"][in_use].astype(np.int64)
        return owners, starts, starts + extents["count"][in_use]

    def find_free_runs(self, used: Indices, num_slots: int) -> list[tuple[int, int]]:
        """Return the runs of slots in none of some entries, in order."""
        _, starts, ends = self._intervals(used)
        starts, ends = np.sort(starts), np.sort(ends)
        gaps_from = np.concatenate(([0], ends))
        gaps_to = np.concatenate((starts, [num_slots]))
        found = gaps_to > gaps_from
        counts = gaps_to[found] - gaps_from[found]
        return list(zip(gaps_from[found].tolist(), counts.tolist(), strict=True))

    def mend_uses(self, used: Indices) -> int:
        """Put uses right that cannot be; return the highest sequence or use of all entries."""
        if not len(used):
            return 0
        sequence, last_use = self.cells["sequence"][used], self.cells["last_use"][used]
        highest = int(sequence.max())
        # No checksum covers them: a torn one must not end the count.
        wrong = (last_use < sequence) | (last_use > np.uint64(highest + _MAX_USES))
        self.cells["last_use"][used[wrong]] = sequence[wrong]
        return max(highest, int(last_use[~wrong].max(initial=0)))

    def take_cells(self, cells: Cells) -> None:
        """Enter many cells into an empty table, each in one of its pages; what has no room goes."""
        for half in (0, 1):
            pages = (cells["key"][:, half] % np.uint64(self.num_pages)).astype(np.int64)
            order = np.argsort(pages, kind="stable")
            cells, pages = cells[order], pages[order]
            by_page = self.cells.reshape(self.num_pages, PAGE_CELLS)
            # The first half filled pages from their beginning.
            filled = (by_page["checksum"] != 0).sum(axis=1)
            place = filled[pages] + np.arange(len(pages)) - np.searchsorted(pages, pages)
            fits = place < PAGE_CELLS
            by_page[pages[fits], place[fits]] = cells[fits]
            cells = cells[~fits]

    # ---- lookups -----------------------------------------------------------------------------

    def pages_of(self, keys: Sequence[ObjectKey]) -> Indices:
        """Return both pages in which each key may stand: ``[keys, 2]``."""
        halves = np.frombuffer(b"".join(key.digest for key in keys), "<u8").reshape(-1, 2)
        return (halves % np.uint64(self.num_pages)).astype(np.int64)

    def find(self, keys: Sequence[ObjectKey]) -> list[int]:
        """Return each key's cell; -1: there is none."""
        if len(keys) <= _FEW_KEYS:
            return [self._find_one(key) for key in keys]
        wanted = np.frombuffer(b"".join(key.digest for key in keys), "<u8").reshape(-1, 2)
        both = self.pages_of(keys)
        kinds = np.fromiter((int(key.kind) for key in keys), np.uint8, len(keys))
        found = np.full(len(keys), -1, np.int64)
        by_page = self.cells.reshape(self.num_pages, PAGE_CELLS)
        for half in (0, 1):
            pages = both[:, half]
            there = by_page["key"][pages]
            same = (there[:, :, 0] == wanted[:, :1]) & (there[:, :, 1] == wanted[:, 1:])
            same &= by_page["kind"][pages] == kinds[:, None]
            same &= by_page["checksum"][pages] != 0
            hit = same.any(axis=1)
            at = same.argmax(axis=1) + pages * PAGE_CELLS
            found = np.where(hit & (found < 0), at, found)
        return [int(index) for index in found]

    def _find_one(self, key: ObjectKey) -> int:
        digest, kind = key.digest, int(key.kind)
        for page in self._pages_of(key):
            low = page * PAGE_BYTES
            data = self._raw[low : low + PAGE_BYTES].tobytes()
            at = data.find(digest)
            while at >= 0:
                cell = at - KEY_OFFSET
                if (
                    cell % CELL_BYTES == 0
                    and data[cell + KIND_OFFSET] == kind
                    and data[cell : cell + len(EMPTY_HEAD)] != EMPTY_HEAD
                ):
                    return (low + cell) // CELL_BYTES
                at = data.find(digest, at + 1)
        return -1

    def _pages_of(self, key: ObjectKey) -> tuple[int, int]:
        first, second = _HALVES.unpack(key.digest)
        return first % self.num_pages, second % self.num_pages

    def describe(self, index: int) -> StoredObject:
        """Return what a cell says."""
        cell = open_cell(self._raw, index)
        key = ObjectKey(ObjectKind(cell.kind), cell.key)
        extent = Extent(key, cell.sequence, cell.length - SEAL_BYTES, cell.extents)
        token = None if cell.next_token == _NO_TOKEN else cell.next_token
        return StoredObject(index, extent, cell.position, token, is_shared=cell.hits >= SHARED_HITS)

    def used(self) -> Indices:
        """Return the indices of all entries."""
        return np.flatnonzero(self.cells["checksum"])

    # ---- changes -----------------------------------------------------------------------------

    def choose_cell(self, key: ObjectKey, taken: Collection[int]) -> int | None:
        """Return an empty cell for a key, in the emptier of its pages; ``taken`` are not empty."""
        best: tuple[int, int] | None = None
        for page in dict.fromkeys(self._pages_of(key)):
            low = page * PAGE_CELLS
            heads = self._heads[low : low + PAGE_CELLS].tolist()
            empty = [
                index for index, head in enumerate(heads, low) if not head and index not in taken
            ]
            if empty and (best is None or len(empty) > best[0]):
                best = (len(empty), empty[0])
        return None if best is None else best[1]

    def cells_near(self, key: ObjectKey) -> list[int]:
        """Return the entries that keep a key from its pages, the least recently used first."""
        pages = dict.fromkeys(self._pages_of(key))
        near = [page * PAGE_CELLS + i for page in pages for i in range(PAGE_CELLS)]
        return sorted(near, key=lambda index: int(self.cells["last_use"][index]))

    def make_cell(self, reservation: Reservation, last_use: int = 0) -> bytes:
        """Return the cell of an object, as it goes to disk.

        Args:
            reservation: The object.
            last_use: Of it, if that was after its slots were taken.
        """
        spec, extent = reservation.spec, reservation.extent
        cell = OpenCell(
            spec.key.digest,
            int(spec.key.kind),
            spec.position,
            spec.num_bytes + SEAL_BYTES,
            extent.sequence,
            extent.slots,
            _NO_TOKEN if spec.next_token is None else spec.next_token,
            max(last_use, extent.sequence),
            SHARED_HITS if spec.is_shared else 0,
            0,
        )
        return close_cell(cell, self._seed)

    def put(self, index: int, cell: bytes) -> None:
        """Enter a cell."""
        self._raw[index * CELL_BYTES : (index + 1) * CELL_BYTES] = cell
        self._order.enter(index)

    def remove(self, index: int) -> Extents:
        """Empty a cell; returns its slots."""
        extents = open_cell(self._raw, index).extents
        self._raw[index * CELL_BYTES : (index + 1) * CELL_BYTES] = bytes(CELL_BYTES)
        return extents

    def touch(self, indices: Indices, count: int, *, is_hit: bool) -> None:
        """Note a use of entries, in memory."""
        cells = self.cells
        cells["last_use"][indices] = count
        if is_hit:
            hits = cells["hits"][indices]
            cells["hits"][indices] = np.minimum(hits, np.uint32(0xFFFF_FFFE)) + 1
            # It is the end of what somebody has yet to say, again.
            cells["superseded"][indices] = 0

    def supersede(self, index: int) -> bool:
        """Let an entry go before others, in memory; False: it does, or several prompts use it."""
        _, hits, is_superseded = USES.unpack_from(self._raw, index * CELL_BYTES + USES_OFFSET)
        if is_superseded or hits >= SHARED_HITS:
            return False
        self.cells["superseded"][index] = 1
        self._order.enter(index)
        return True

    def uses_of(self, index: int) -> bytes:
        """Return the bytes of a cell that tell of its uses."""
        return bytes(self._raw[index * CELL_BYTES + USES_OFFSET : (index + 1) * CELL_BYTES])

    # ---- giving up ---------------------------------------------------------------------------

    def begin_order(self, used: Indices) -> None:
        """Make the order of giving up from all entries; from now on it is kept up.

        Args:
            used: Their indices.
        """
        self._order.begin(used)

    def next_victim(self, pinned: Collection[int]) -> int | None:
        """Return the entry to give up next; None: all are pinned, or there is none.

        Superseded ones go first, then the least recently used, of a chain the deepest. Who takes it
        removes it.
        """
        return self._order.take(pinned)


def find_impossible(cells: Cells, num_slots: int, slot_bytes: int) -> list[int]:
    """Return the indices of whole cells that no writer of a rows file wrote.

    Args:
        cells: Cells.
        num_slots: Slots of the rows file.
        slot_bytes: Bytes of a slot.
    """
    used = np.flatnonzero(cells["checksum"])
    cells = pick(cells, used)
    extents = cells["extents"]
    count = cells["num_extents"].astype(np.int64)
    ends = extents["slot"].astype(np.int64) + extents["count"]
    in_use = np.arange(extents.shape[1]) < count[:, None]
    total = np.where(in_use, extents["count"], 0).sum(axis=1).astype(np.int64)
    wrong = (count > extents.shape[1]) | (count == 0)
    wrong |= ((ends > num_slots) & in_use).any(axis=1)
    wrong |= ((extents["count"] == 0) & in_use).any(axis=1)
    wrong |= total * slot_bytes < cells["length"].astype(np.float64)
    wrong |= cells["length"] <= SEAL_BYTES
    wrong |= ~np.isin(cells["kind"], [int(kind) for kind in ObjectKind])
    return [int(index) for index in used[wrong]]
