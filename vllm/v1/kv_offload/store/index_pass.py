"""The index taken over from its file: pages that are asked for first, all others behind them.

    begin      nothing is read                                      a start need not wait
    read_on    pages that a lookup missed, else the next 256 KiB    each cell is checked before it
                                                                    can be found
    finish     which slots are free, which cells share one          only writing waits for it

A cell is found only if it is whole, of this folder and within the rows file. That two cells name
one slot is seen in the end; until then the seals of the rows tell the right one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from vllm.v1.kv_offload.store.cell_table import CellTable, Indices, find_impossible
from vllm.v1.kv_offload.store.cells import (
    CELL,
    PAGE_BYTES,
    PAGE_CELLS,
    Cells,
    as_words,
    find_damaged,
)
from vllm.v1.kv_offload.store.file_calls import FileCalls

# Read and checked in one go, between which other threads get their turn.
_PAGES_AT_ONCE = 64


@dataclass
class TakenOver:
    """What a whole pass found.

    Attributes:
        used: The cells that stand.
        dropped: Cells that are damaged, impossible, or share slots with a younger one.
        free_runs: Indices of no cell, as (first slot, slots), in order.
        count: The highest sequence or use of any cell.
        live_bytes: Bytes of all objects.
        num_by_kind: Objects by kind.
    """

    used: Indices
    dropped: list[int] = field(default_factory=list)
    free_runs: list[tuple[int, int]] = field(default_factory=list)
    count: int = 0
    live_bytes: int = 0
    num_by_kind: dict[int, int] = field(default_factory=dict)


class IndexPass:
    """Reads an index page by page into a table.

    Owns: which pages are known, and what was seen of their cells so far. ``knows`` and ``want`` may
    be called by any thread that holds the store's lock, the others belong to the one of its files.

    Args:
        files: File calls.
        handle: Of the index.
        table: What is read goes here.
        seed: Of the cells' checksums.
        num_slots: Slots of the rows file, as of now.
        slot_bytes: Bytes of a slot.
    """

    def __init__(
        self,
        files: FileCalls,
        handle: int,
        table: CellTable,
        seed: int,
        num_slots: int,
        slot_bytes: int,
    ) -> None:
        self._files = files
        self._handle = handle
        self._table = table
        self._seed = seed
        self._num_slots = num_slots
        self._slot_bytes = slot_bytes
        self._known = np.zeros(table.num_pages, bool)
        self._wanted: dict[int, None] = {}
        self._is_waited_for = False
        self._next = 0
        self._dropped: list[int] = []
        # Of the cells that stand, by part of the index.
        self._used: list[Indices] = []

    # ---- lookups meanwhile -------------------------------------------------------------------

    def knows(self, pages: Indices) -> bool:
        """Whether pages were read."""
        return bool(self._known[pages].all())

    def want(self, pages: Indices) -> None:
        """Have pages read before others."""
        self._is_waited_for = True
        self._wanted.update(dict.fromkeys(np.unique(pages[~self._known[pages]]).tolist()))

    def take_served(self) -> bool:
        """Whether all that lookups waited for has been read since the last call."""
        is_served = self._is_waited_for and not self._wanted
        self._is_waited_for = self._is_waited_for and not is_served
        return is_served

    def know_all(self) -> None:
        """Take what is not read for empty: it cannot be read."""
        self._known[:] = True
        self._wanted.clear()

    # ---- the pass ----------------------------------------------------------------------------

    def next_pages(self) -> Indices | None:
        """Return the pages to read next; None: all are known."""
        wanted, self._wanted = [page for page in self._wanted if not self._known[page]], {}
        if wanted:
            self._wanted = dict.fromkeys(wanted[_PAGES_AT_ONCE:])
            return np.array(wanted[:_PAGES_AT_ONCE], np.int64)
        first = self._next
        if first >= self._table.num_pages:
            return None
        self._next = min(first + _PAGES_AT_ONCE, self._table.num_pages)
        return np.arange(first, self._next)

    def read(self, pages: Indices) -> Cells:
        """Return the cells of some pages, those that cannot be found emptied.

        Raises:
            OSError: They cannot be read.
        """
        raw = memoryview(bytearray(len(pages) * PAGE_BYTES))
        for start, end in _find_runs(pages):
            offset = int(pages[start]) * PAGE_BYTES
            self._files.read(self._handle, raw[start * PAGE_BYTES : end * PAGE_BYTES], offset)
        cells = np.frombuffer(raw, CELL)
        dropped = find_damaged(cells, self._seed)
        cells["checksum"][dropped] = 0
        impossible = find_impossible(cells, self._num_slots, self._slot_bytes)
        cells["checksum"][impossible] = 0
        # Pages that a lookup wanted were counted then.
        for index in (*dropped, *impossible):
            page = int(pages[index // PAGE_CELLS])
            if not self._known[page]:
                self._dropped.append(page * PAGE_CELLS + index % PAGE_CELLS)
        return cells

    def enter(self, pages: Indices, cells: Cells) -> None:
        """Let cells be found that were read; what is known already may have been used since."""
        is_new = ~self._known[pages]
        if not is_new.any():
            return
        if not is_new.all():
            words = as_words(cells).reshape(len(pages), -1)
            pages, cells = pages[is_new], words[is_new].view(CELL).reshape(-1)
        self._table.fill(pages, cells)
        used = np.flatnonzero(cells["checksum"])
        self._used.append(pages[used // PAGE_CELLS] * PAGE_CELLS + used % PAGE_CELLS)
        self._known[pages] = True

    def finish(self) -> TakenOver:
        """Return what follows from all cells together. Mutates the table."""
        used = np.concatenate([*self._used, np.empty(0, np.int64)])
        shared = self._table.find_shared(used)
        if shared:
            self._table.clear(shared)
            used = used[~np.isin(used, shared)]
        cells = self._table.cells
        kinds = np.bincount(cells["kind"][used], minlength=1)
        return TakenOver(
            used,
            self._dropped + shared,
            self._table.find_free_runs(used, self._num_slots),
            self._table.mend_uses(used),
            int(cells["length"][used].sum()),
            {kind: int(count) for kind, count in enumerate(kinds.tolist()) if count},
        )


def _find_runs(pages: Indices) -> list[tuple[int, int]]:
    """Return (start, end) of the parts of a list whose pages follow one another."""
    breaks = (np.flatnonzero(np.diff(pages) != 1) + 1).tolist()
    return list(zip([0, *breaks], [*breaks, len(pages)], strict=True))
