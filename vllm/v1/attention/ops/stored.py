"""Stacks of matrices as a checkpoint stores them, for kernels that decode in registers."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

PLAIN, FP8_BLOCKS, FP4_GROUPS, INT8_ROWS = 0, 1, 2, 3


@dataclass(frozen=True, slots=True)
class StoredStack:
    """Matrices of one shape [out, in], as stored; E of them, or one.

    Attributes:
        kind: ``PLAIN``, ``FP8_BLOCKS`` (e4m3 bytes), ``FP4_GROUPS`` (e2m1, two to a byte, the even
            column low) or ``INT8_ROWS``.
        codes: [E, out, in], of FP4 [E, out, in / 2].
        scales: One per block of ``scale_shape``, [E, ceil(out / rows), ceil(in / columns)]: uint8
            (e8m0) or fp32. Plain: anything.
        scale_shape: Rows and columns that share a scale.
    """

    kind: int
    codes: torch.Tensor
    scales: torch.Tensor
    scale_shape: tuple[int, int] = (1, 1)

    @classmethod
    def plain(cls, weight: torch.Tensor) -> "StoredStack":
        """Returns ordinary matrices [E, out, in]."""
        return cls(PLAIN, weight, weight)

    @property
    def num_matrices(self) -> int:
        """E."""
        return self.codes.shape[0]

    @property
    def out_size(self) -> int:
        """Outputs of one matrix."""
        return self.codes.shape[1]

    @property
    def in_size(self) -> int:
        """Inputs of one matrix."""
        return self.codes.shape[2] * (2 if self.kind == FP4_GROUPS else 1)


@dataclass(frozen=True, slots=True)
class GatedExperts:
    """The experts of one layer.

    Attributes:
        gate_up: [E, 2 * M, D].
        down: [E, D, M].
        activate: Maps [N, 2 * M] to [N, M].
        gate_up_bias, down_bias: [E, 2 * M] and [E, D], or None.
    """

    gate_up: StoredStack
    down: StoredStack
    activate: Callable[[torch.Tensor], torch.Tensor]
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
