"""Which rows the layers above the last source of entries compute of a prompt.

Nothing but entries carries what came long before, and the last of them are made of the input of
layer ``cut``. Above it a row is of use only to rows of its window in the next layer. So of a prompt
whose first read output is at q, layer l computes [q - (L - l) (W - 1), end): the rows before that
make entries in layer ``cut``, and nothing above it.

    layer       rows of a prompt
    0 .. cut-1  |==========================================|
    cut         |entries alone . . . . . . |===============|
    cut + 1                                     |==========|
    L - 1                                            |=====|   q, and the window before it

Each layer takes the rows of the next one's windows in too: their own windows are cut off, which no
row that is read depends on.
"""

import numpy as np
import torch

from vllm.v1.attention.step_tables import StepMetadata


class LazyRows:
    """The rows of one step.

    Args:
        meta: The step's tables.
        num_layers: L.
        window: W.
    """

    def __init__(self, meta: StepMetadata, num_layers: int, window: int) -> None:
        self._meta, self._num_layers, self._reach = meta, num_layers, window - 1

    def count_dropped(self, layer: int) -> tuple[int, ...]:
        """Returns of each chunk how many of its first rows a layer above the cut leaves out."""
        counts = []
        for chunk in self._meta.chunks:
            first = chunk.output_from - (self._num_layers - layer) * self._reach
            counts.append(min(max(first - chunk.start, 0), chunk.num_tokens))
        return tuple(counts)

    def find_rows(self, dropped: tuple[int, ...]) -> torch.Tensor:
        """Returns the flat rows int64 that are left."""
        is_kept = np.ones(self._meta.num_tokens, dtype=np.bool_)
        for chunk, count in zip(self._meta.chunks, dropped, strict=True):
            is_kept[chunk.rows.start : chunk.rows.start + count] = False
        return torch.from_numpy(np.flatnonzero(is_kept))
