"""The residual streams at the ends of blocks, for a drafter to make its last row anew."""

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch

from vllm.utils.uploads import upload

MAX_BYTES = 64 << 20
"""About 2,000 boundaries of DeepSeek-V4-Flash in bf16, 32 KiB each."""


class BoundaryStreams:
    """Main-model streams of the last token of KV blocks, the longest unused dropped first.

    A block's id is key enough: whoever gets the block next writes its last row, and with it the
    entry here, before a prefix hit can end in it.

    Owns: its tensor, allocated at the first entry.

    Args:
        max_bytes: Size of the tensor at most; at least one entry.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._rows: torch.Tensor | None = None
        self._slots: OrderedDict[int, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._slots)

    def save(self, block_ids: Sequence[int], streams: torch.Tensor) -> None:
        """Remember streams ``[M, n, D]`` of M blocks, a later one of equal blocks winning."""
        if not block_ids:
            return
        if self._rows is None:
            num_rows = max(1, self._max_bytes // (streams[0].numel() * streams.element_size()))
            self._rows = streams.new_empty(num_rows, *streams.shape[1:])
        rows_of = {self._take_slot(block_id): row for row, block_id in enumerate(block_ids)}
        moved = np.array([list(rows_of), list(rows_of.values())], dtype=np.int64)
        slots, rows = upload(moved, streams.device)
        self._rows[slots] = streams[rows]

    def _take_slot(self, block_id: int) -> int:
        assert self._rows is not None
        slot = self._slots.pop(block_id, None)
        if slot is None:
            slot = len(self._slots)
            if slot == len(self._rows):
                _, slot = self._slots.popitem(last=False)
        self._slots[block_id] = slot
        return slot

    def forget(self, block_ids: Sequence[int]) -> None:
        """Overwrite the streams of blocks."""
        for block_id in block_ids:
            slot = self._slots.get(block_id)
            if slot is not None and self._rows is not None:
                self._rows[slot].zero_()

    def find(self, block_id: int) -> torch.Tensor | None:
        """Return the streams ``[n, D]`` of a block's last token, if they are still here."""
        slot = self._slots.get(block_id)
        if slot is None:
            return None
        self._slots.move_to_end(block_id)
        assert self._rows is not None
        return self._rows[slot]
