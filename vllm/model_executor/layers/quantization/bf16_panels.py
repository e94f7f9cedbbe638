"""Plain bf16 matrices, packed for products that round their inputs to bf16 too.

Outputs lie in lanes, 64 to a panel; a word is two inputs of one output, the even one low:

    words   int32 [panels, ceil(columns / 32) * 16, 64]
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm.model_executor.layers.quantization.decode import view_as
from vllm.model_executor.layers.quantization.panels import allocate_beside
from vllm.model_executor.layers.quantization.storages import WholeInputs
from vllm.v1.attention.ops.stored import PANEL, RowSource

BLOCK = 32
"""Inputs of a block; a panel is whole blocks, filled up with zeros."""


class Bf16Panels(WholeInputs):
    """A ``RowSource`` of packed bf16 values.

    Args:
        weight: bf16 [num_rows, num_columns].
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self.num_rows, self.num_columns = weight.shape
        num_panels = -(-self.num_rows // PANEL)
        num_blocks = -(-self.num_columns // BLOCK)
        self.words = allocate_beside((num_panels, num_blocks * BLOCK // 2, PANEL), torch.int32)
        rest = num_blocks * BLOCK - self.num_columns
        whole = self.num_rows // PANEL
        for panel in range(num_panels):
            rows = weight[panel * PANEL : (panel + 1) * PANEL]
            if rest:
                rows = torch.nn.functional.pad(rows, (0, rest))
            if panel == whole:
                self.words[panel].zero_()
            self.words[panel, :, : len(rows)] = view_as(rows, torch.int32).T

    def leaves(self) -> Sequence[RowSource]:
        """See ``RowSource``."""
        return (self,)

    def find_stack(self) -> None:
        """See ``RowSource``: a CPU's kernels alone read these panels."""

    def write_rows(self, start: int, out: torch.Tensor) -> None:
        """See ``RowSource``."""
        stop = start + out.shape[0]
        first, last = start // PANEL, -(-stop // PANEL)
        rows = self.words[first:last].transpose(1, 2).flatten(0, 1)
        rows = rows[start - first * PANEL : stop - first * PANEL]
        out.copy_(view_as(rows, torch.bfloat16)[:, : self.num_columns])


class PackedWeights:
    """A model's bf16 matrices in panels, each packed once.

    Args:
        releases: Whether a matrix that was packed is given back to the system: from then on its
            parameter holds nothing, and only who reads the panels can run the model.

    Attributes:
        releases: That.

    Owns: the panels.
    """

    def __init__(self, *, releases: bool) -> None:
        self.releases = releases
        self._panels: dict[tuple[int, int, tuple[int, ...]], Bf16Panels] = {}
        # A parameter's storage is known by its place, which is free for others once it is gone.
        self._storages: list[torch.UntypedStorage] = []

    def find(self, weight: torch.Tensor) -> Bf16Panels | None:
        """Return a matrix's panels; None: it was not packed."""
        return self._panels.get(_identify(weight))

    def pack(self, weight: torch.Tensor) -> Bf16Panels:
        """Return the panels of a matrix bf16 [rows, columns].

        Mutates:
            weight: Its memory is given back, if this releases what it packed.
        """
        if found := self.find(weight):
            return found
        panels = Bf16Panels(weight)
        self._panels[_identify(weight)] = panels
        storage = weight.untyped_storage()
        self._storages.append(storage)
        if self.releases and storage.nbytes() == weight.nbytes and storage.resizable():
            storage.resize_(0)
        return panels


def _identify(weight: torch.Tensor) -> tuple[int, int, tuple[int, ...]]:
    return weight.untyped_storage()._cdata, int(weight.storage_offset()), tuple(weight.shape)
