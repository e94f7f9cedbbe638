"""Tables of a step in one int32 buffer: columns, then block ids, in one upload.

    columns of given lengths, filled up with -1 | block ids of all tables | 0

Where columns have the same lengths they lie the same way, and a graph finds those of a later step
where it found those of the one that it was captured with.
"""

from collections.abc import Sequence

import numpy as np
import torch

from vllm.utils.uploads import StagingBuffers


class TableColumns:
    """What is laid out: columns, each of a length of its own, and block ids."""

    def __init__(self) -> None:
        self.values: list[np.ndarray] = []
        self.lengths: list[int] = []
        self.ids: list[np.ndarray] = []
        self.num_ids = 0

    def add(self, values: np.ndarray, length: int) -> None:
        """Append a column, filled up to its length."""
        assert len(values) <= length, f"{len(values)} values of a column of {length}"
        self.values.append(values)
        self.lengths.append(length)

    def add_ids(self, ids: Sequence[np.ndarray]) -> None:
        """Append block ids."""
        self.ids += ids
        self.num_ids += sum(map(len, ids))

    def count_values(self, num_ids: int) -> int:
        """Return how much room the columns and so many block ids take."""
        return sum(self.lengths) + num_ids + 1


class TableBuffer:
    """Where tables lie on a device.

    Args:
        device: The device.

    Attributes:
        values: int32: the buffer.

    Owns: the buffer, and those of the host that it is filled from.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.values = torch.zeros(0, dtype=torch.int32, device=device)
        self._staging = StagingBuffers((0,), torch.int32, device)
        self._is_fixed = False

    def reserve(self, num_values: int) -> None:
        """Make room for so many; tables handed out before are not valid afterwards."""
        if num_values <= len(self.values):
            return
        assert not self._is_fixed, f"graphs read tables of {len(self.values)} values"
        size = 1 << (num_values - 1).bit_length()
        self.values = torch.zeros(size, dtype=torch.int32, device=self._device)
        # Copies from those before may not have been made yet: torch keeps pinned memory for them.
        self._staging = StagingBuffers((size,), torch.int32, self._device)

    def fix(self) -> None:
        """Have the address stay: graphs read there."""
        self._is_fixed = True

    def upload(self, columns: TableColumns) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """Fill the buffer; returns the columns and the block ids on the device.

        Padding is -1, which is no request, no place and no number of anything.
        """
        num_fixed = sum(columns.lengths)
        num_values = columns.count_values(columns.num_ids)
        self.reserve(num_values)
        staged = self._staging.take()
        host = staged.numpy()
        first = 0
        for values, length in zip(columns.values, columns.lengths, strict=True):
            host[first : first + len(values)] = values
            host[first + len(values) : first + length] = -1
            first += length
        for table in columns.ids:
            host[first : first + len(table)] = table
            first += len(table)
        host[first] = 0
        self._staging.send(staged[:num_values], self.values[:num_values])
        views = torch.split(self.values[:num_fixed], columns.lengths)
        return views, self.values[num_fixed:]
