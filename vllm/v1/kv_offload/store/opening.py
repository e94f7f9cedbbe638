"""A store while its index is read: what can be asked already, and what happened meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock

from vllm.exceptions import VllmError
from vllm.v1.kv_offload.store.cell_table import CellTable
from vllm.v1.kv_offload.store.index_pass import IndexPass, TakenOver
from vllm.v1.kv_offload.store.records import ObjectKey, StoredObject


class IndexUnreadError(VllmError):
    """A lookup came before its part of the index was read."""


class Opening:
    """Reads an index while others look things up in it.

    ``read_some`` belongs to the thread of the store's files; all else is called under its lock.

    Owns: the pass, and what was used, or found to be corrupt, before all was read.

    Args:
        index_pass: What reads.
        table: Where it enters what it reads.
        lock: The store's.
    """

    def __init__(self, index_pass: IndexPass, table: CellTable, lock: Lock) -> None:
        self._pass = index_pass
        self._table = table
        self._lock = lock
        self._used: list[StoredObject] = []
        self._corrupt: dict[int, StoredObject] = {}

    def read_some(self) -> TakenOver | None:
        """Read some of the index, what lookups wait for first; returns what was found at its end.

        Raises:
            OSError: It cannot be read.
        """
        with self._lock:
            pages = self._pass.next_pages()
        if pages is None:
            return self._pass.finish()
        cells = self._pass.read(pages)
        with self._lock:
            self._pass.enter(pages, cells)
        return None

    def check_read(self, keys: Sequence[ObjectKey]) -> None:
        """Have the part of some names read before others, if it is not yet.

        Raises:
            IndexUnreadError: It is not.
        """
        pages = self._table.pages_of(keys)
        if not self._pass.knows(pages):
            self._pass.want(pages)
            raise IndexUnreadError

    def is_corrupt(self, cell: int) -> bool:
        """Whether an object was found to be corrupt."""
        return cell in self._corrupt

    def note_use(self, objects: Sequence[StoredObject]) -> None:
        """Take note of a use."""
        self._used += objects

    def note_corrupt(self, found: StoredObject) -> None:
        """Take note of an object whose bytes are wrong."""
        self._corrupt[found.cell] = found

    def take_noted(self) -> tuple[list[StoredObject], list[StoredObject]]:
        """Drain what was used, and what was found to be corrupt."""
        noted = self._used, list(self._corrupt.values())
        self._used, self._corrupt = [], {}
        return noted

    def take_served(self) -> bool:
        """Whether all that lookups waited for has been read since the last call."""
        return self._pass.take_served()

    def stop(self) -> None:
        """Leave out what is not read: it cannot be."""
        self._pass.know_all()
