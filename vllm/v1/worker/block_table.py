"""One request's block tables: for each KV group the ids of its blocks, in token order."""

from collections.abc import Sequence

import numpy as np

from vllm.v1.attention.metadata import BlockTableView
from vllm.v1.core.values.cache_step import WindowTable

_INITIAL_CAPACITY = 16


class GroupBlockTable:
    """A growing list of block ids in one array.

    Owns: its array. A view handed out stays valid: appending writes behind it or moves to a new
    array, replacing always takes a new one.
    """

    __slots__ = ("_base", "_ids", "_num_blocks", "_view")

    _base: int
    _ids: np.ndarray  # int64 [capacity]
    _num_blocks: int
    _view: BlockTableView | None

    def __init__(self, block_ids: Sequence[int] = ()) -> None:
        self.replace(0, block_ids)

    @property
    def view(self) -> BlockTableView:
        """The table as the attention metadata takes it; built once per change."""
        if self._view is None:
            self._view = BlockTableView(self._base, self._ids[: self._num_blocks])
        return self._view

    def replace(self, base: int, block_ids: Sequence[int]) -> None:
        """Forget the table and hold blocks ``base``, ``base + 1``, ..."""
        self._ids = np.array(block_ids, dtype=np.int64)
        self._num_blocks = len(block_ids)
        self._base = base
        self._view = None

    def append(self, block_ids: Sequence[int]) -> None:
        """Add blocks behind the last one."""
        end = self._num_blocks + len(block_ids)
        if end > len(self._ids):
            grown = np.empty(max(_INITIAL_CAPACITY, 2 * end), dtype=np.int64)
            grown[: self._num_blocks] = self._ids[: self._num_blocks]
            self._ids = grown
        self._ids[self._num_blocks : end] = block_ids
        self._num_blocks = end
        self._view = None


class RequestBlockTables:
    """The tables of one request, one per KV group, in group order."""

    __slots__ = ("_groups", "_views")

    def __init__(self, num_groups: int) -> None:
        self._groups = tuple(GroupBlockTable() for _ in range(num_groups))
        self._views: tuple[BlockTableView, ...] | None = None

    @property
    def views(self) -> tuple[BlockTableView, ...]:
        """All groups' tables; the same tuple until one changes."""
        if self._views is None:
            self._views = tuple(group.view for group in self._groups)
        return self._views

    def replace_all(self, block_ids: Sequence[Sequence[int]]) -> None:
        """Start over with these blocks from token 0 on (a new or resumed request)."""
        for group, ids in zip(self._groups, block_ids, strict=True):
            group.replace(0, ids)
        self._views = None

    def append_all(self, block_ids: Sequence[Sequence[int]]) -> None:
        """Add a step's new blocks of every group."""
        for group, ids in zip(self._groups, block_ids, strict=True):
            if ids:
                group.append(ids)
                self._views = None

    def replace_windows(self, tables: Sequence[WindowTable]) -> None:
        """Take the live range of the window groups that changed."""
        for table in tables:
            self._groups[table.group_id].replace(table.base, table.block_ids)
        self._views = None

    def clear(self) -> None:
        """Forget every block (the request was preempted)."""
        self.replace_all([()] * len(self._groups))
