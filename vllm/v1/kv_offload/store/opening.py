"""A store is opened: its index is taken over, and what can be asked meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

from vllm.exceptions import VllmError
from vllm.v1.kv_offload.store.file_calls import FileCalls
from vllm.v1.kv_offload.store.index_pass import IndexPass, TakenOver
from vllm.v1.kv_offload.store.records import ObjectKey, StoredObject
from vllm.v1.kv_offload.store.store_state import StoreState


class IndexUnreadError(VllmError):
    """A lookup came before its part of the index was read."""


class Opening:
    """Reads an index while others look things up in it.

    ``begin``, ``read_on`` and ``load`` belong to the thread of the store's files; ``take_served``
    and ``stop_reading`` may be called by any. All else is called under the store's lock.

    Owns: the pass, and what was used, or found to be corrupt, before all was read.

    Args:
        files: File calls.
        index: Handle of the index.
        state: The store's.
    """

    def __init__(self, files: FileCalls, index: int, state: StoreState) -> None:
        self._files = files
        self._index = index
        self._state = state
        self._pass: IndexPass | None = None
        self._used: list[StoredObject] = []
        self._corrupt: dict[int, StoredObject] = {}

    # ---- taking the index over ---------------------------------------------------------------

    def begin(self) -> None:
        """Begin to take over what the files hold; no entry is read yet.

        Raises:
            OSError: The rows file is not there.
        """
        state = self._state
        assert not state.is_ready
        assert self._pass is None
        shape, num_slots = state.shape, state.room.measure()
        with state.lock:
            table, size = state.entries.table, shape.slot_bytes
            self._pass = IndexPass(self._files, self._index, table, shape.seed, num_slots, size)

    def read_on(self) -> bool:
        """Read some of the index, what lookups wait for first; False: all of it is read.

        Raises:
            OSError: It cannot be read.
        """
        index_pass, lock = self._pass, self._state.lock
        assert index_pass is not None
        with lock:
            pages = index_pass.next_pages()
        if pages is None:
            self._end(index_pass.finish())
            return False
        cells = index_pass.read(pages)
        with lock:
            index_pass.enter(pages, cells)
        return True

    def load(self) -> None:
        """Take over what the files hold, all at once.

        Raises:
            OSError: The index cannot be read.
        """
        self.begin()
        while self.read_on():
            pass

    def _end(self, found: TakenOver) -> None:
        """Let the store be written; what happened meanwhile is noted in its entries."""
        state, entries = self._state, self._state.entries
        with state.lock:
            state.room.take_over(found.free_runs)
            entries.take_over(found)
            state.counts.damaged_cells = len(found.dropped)
            self._pass = None
            state.begin_serving(found.live_bytes)
            entries.next_sequence()
            entries.use([one.cell for one in self._used if entries.is_current(one)])
            for one in self._corrupt.values():
                if entries.is_current(one):
                    entries.bury(one.cell)
            self._used, self._corrupt = [], {}

    def take_served(self) -> bool:
        """Whether all that lookups waited for has been read since the last call."""
        with self._state.lock:
            return self._pass is not None and self._pass.take_served()

    def stop_reading(self) -> None:
        """Leave out what is not read: it cannot be. Nothing more is written either."""
        with self._state.lock:
            self._state.allow_writing(False)
            if self._pass is not None:
                self._pass.know_all()

    # ---- lookups meanwhile -------------------------------------------------------------------

    @property
    def is_reading(self) -> bool:
        """Whether some of the index is not read yet, or cannot be."""
        return self._pass is not None

    def check_read(self, keys: Sequence[ObjectKey]) -> None:
        """Have the part of some names read before others, if it is not yet.

        Raises:
            IndexUnreadError: It is not.
        """
        assert self._pass is not None
        pages = self._state.entries.table.pages_of(keys)
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
