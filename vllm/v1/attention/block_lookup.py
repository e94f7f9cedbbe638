"""Position -> block id for many requests at once, over tables of unequal length."""

from collections.abc import Sequence

import numpy as np
import torch

from vllm.exceptions import InvariantError
from vllm.utils.uploads import upload
from vllm.v1.attention.layout import GroupLayout
from vllm.v1.attention.step_batch import ragged_arange
from vllm.v1.attention.step_rules import find_block_index, find_row
from vllm.v1.attention.step_tables import BlockTableView, PageRows


class BlockLookup:
    """The block tables of one group, laid end to end.

    Args:
        tables: One per request.
        group: The group's geometry.
        device: Where the addresses are used.
    """

    def __init__(
        self, tables: Sequence[BlockTableView], group: GroupLayout, device: torch.device
    ) -> None:
        self._group = group
        self.device = device
        self._lengths = np.array([len(table.block_ids) for table in tables], dtype=np.int64)
        self._bases = np.array([table.base for table in tables], dtype=np.int64)
        self._offsets = np.cumsum(self._lengths) - self._lengths
        # A last null id: what a position outside its table reads.
        self._ids = np.concatenate(
            [*(table.block_ids for table in tables), np.zeros(1, dtype=np.int64)]
        ).astype(np.int64, copy=False)

    def find_blocks(self, requests: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Returns block ids, 0 where a position is not stored; the shapes broadcast."""
        index = find_block_index(self._group, positions) - self._bases[requests]
        is_inside = (index >= 0) & (index < self._lengths[requests])
        return self._ids[np.where(is_inside, self._offsets[requests] + index, -1)]

    def find_rows(self, positions: np.ndarray) -> np.ndarray:
        """Returns each position's row inside its block."""
        return find_row(self._group, positions)

    def locate(self, requests: np.ndarray, positions: np.ndarray) -> PageRows:
        """Returns the addresses of rows that must be stored.

        Raises:
            InvariantError: One of them is not.
        """
        blocks = self.find_blocks(requests, positions)
        if not blocks.all():
            self._raise_missing(requests, positions, blocks)
        rows = self.find_rows(positions)
        if rows.shape != blocks.shape:
            rows = np.broadcast_to(rows, blocks.shape).copy()
        return self.to_page_rows(blocks, rows)

    def check_stored(self, low: np.ndarray, high: np.ndarray) -> None:
        """Sees that the rows of positions [low, high) of each request have blocks.

        Raises:
            InvariantError: One has none (I5).
        """
        # One position a block is enough.
        size = self._group.block_size
        first = find_block_index(self._group, low)
        counts = np.where(high > low, -(-high // size) - first, 0)
        requests = np.repeat(np.arange(len(low)), counts)
        self.locate(requests, np.maximum(ragged_arange(first, counts) * size, low[requests]))

    def to_page_rows(self, blocks: np.ndarray, rows: np.ndarray) -> PageRows:
        """Moves addresses to the device."""
        return PageRows(upload(blocks, self.device), upload(rows, self.device))

    def _raise_missing(
        self, requests: np.ndarray, positions: np.ndarray, blocks: np.ndarray
    ) -> None:
        where = np.argwhere(blocks == 0)[0]
        request = int(np.broadcast_to(requests, blocks.shape)[tuple(where)])
        position = int(np.broadcast_to(positions, blocks.shape)[tuple(where)])
        base, length = int(self._bases[request]), int(self._lengths[request])
        size = self._group.block_size
        raise InvariantError(
            f"I5: attention needs the row of position {position} of the step's request {request} "
            f"in a {self._group.kind} group, but its table (tokens {base * size}.."
            f"{(base + length) * size - 1}) stores no block there"
        )
