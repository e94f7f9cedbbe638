"""Matrices as a checkpoint stores them: what ops ask of them, and how kernels take them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch

CodeKind = Literal[
    "int8",
    "int4",
    "uint4",
    "iq4",
    "e2m1",
    "int6",
    "e4m3",
    "nf4",
    "odd4",
    "uint2",
    "int2",
    "int3",
    "iq1",
    "iq2",
    "iq2_xxs",
    "iq3_xxs",
]
"""Two's complement in eight and four bits, 0 to 15, numbers in two tables of 16 values, -32 to 31,
floats of eight bits, another table, the odd numbers from -15; 0 to 3, -1 to 2, -4 to 3, numbers in
two tables of eight, and indexes into two codebooks."""

Inputs = Literal["whole", "bytes by row", "bytes by group", "two bytes by group"]
"""What a product's inputs are rounded to, a property of the matrix: nothing, or 255 steps of the
largest of a row, or of a row's group of weights: of several where scales are whole numbers under a
factor. Two bytes: what 255 steps leave is rounded to as many again."""

ROUNDED_INPUTS: Mapping[str, Inputs] = {
    "exact": "whole",
    "int8": "bytes by group",
    "int16": "two bytes by group",
}
"""What the choices of ``--quantized-inputs`` are."""

PANEL = 64
"""Outputs of a panel."""

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

    def split(self, count: int) -> "StoredStack | None":
        """Returns one matrix as ``count`` of its rows each; None: scales would be cut."""
        rows = self.out_size // count
        if rows % self.scale_shape[0]:
            return None
        codes = self.codes.view(count, rows, -1)
        scales = codes if self.kind == PLAIN else self.scales.view(count, -1, self.scales.shape[2])
        return StoredStack(self.kind, codes, scales, self.scale_shape)

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
class PanelNumbers:
    """One number per output and group of its inputs, in panels.

    Attributes:
        values: [P, groups, 64] of fp32, fp16, bf16, int8, uint8 (e8m0), or e4m3 with ``steps``.
        factors: fp16 [P, ceil(groups / fan), 64], by which they are multiplied; None: by nothing.
        fan: Groups of one factor.
        steps: fp32 [P, 8]: what the e4m3 codes 1, 1.125 .. 1.875 of a panel stand for, those of
            other exponents being powers of two of them.
    """

    values: torch.Tensor
    factors: torch.Tensor | None = None
    fan: int = 1
    steps: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class PanelStack:
    """Matrices of one shape [out, in] whose codes lie in panels of 64 outputs; E of them, or one.

    weight = code * scale + offset, or (code - zero) * scale

    Attributes:
        kind: What the codes are.
        codes: int32 [E * parts * panels, words, 64]; a word holds eight codes of four bits or four
            bytes, of neighbouring inputs, the first lowest.
        scales: The scales.
        offsets: The offsets or zero points, or None.
        has_zeros: Whether ``offsets`` are zero points.
        order: int32 [E * parts, in]: the input that the k-th code is of; None: the k-th.
        group: Inputs under a scale; whole words.
        span: Groups whose inputs are rounded as one.
        inputs: What the products' inputs are rounded to.
        out_size, in_size: Of one matrix.
        num_matrices: E.
        num_parts: Parts of a matrix, one below the other and of one height: each begins with a
            panel, whose lanes are filled up at its end, and has an order of its own.
    """

    kind: CodeKind
    codes: torch.Tensor
    scales: PanelNumbers
    offsets: PanelNumbers | None
    has_zeros: bool
    order: torch.Tensor | None
    group: int
    span: int
    inputs: Inputs
    out_size: int
    in_size: int
    num_matrices: int = 1
    num_parts: int = 1

    @property
    def part_size(self) -> int:
        """Outputs of a part."""
        return self.out_size // self.num_parts

    def split(self, count: int) -> "PanelStack | None":
        """Returns one matrix as ``count`` of its rows each; None: panels would be cut."""
        rows = self.out_size // count
        return None if rows % PANEL else replace(self, out_size=rows, num_matrices=count)


MatrixStack = StoredStack | PanelStack


class RowSource(Protocol):
    """A matrix [num_rows, num_columns] whose rows can be had in fp32.

    Attributes:
        num_rows: Its outputs.
        num_columns: Its inputs.
    """

    num_rows: int
    num_columns: int

    @property
    def inputs(self) -> Inputs:
        """What its products' inputs are rounded to."""

    def round_inputs(self, x: torch.Tensor) -> torch.Tensor:
        """Return what products take for their inputs, fp32 [T, num_columns]: a row by itself."""

    def write_rows(self, start: int, out: torch.Tensor) -> None:
        """Decode rows ``start .. start + R - 1``.

        Mutates:
            out: fp32 [R, num_columns], contiguous.
        """

    def leaves(self) -> "Sequence[RowSource]":
        """Return the matrices it is put together of, from top to bottom; itself, if of none."""

    def find_stack(self) -> MatrixStack | None:
        """Return the matrix as kernels take it; None: they do not."""


@dataclass(frozen=True, slots=True)
class GatedExperts:
    """The experts of one layer.

    Attributes:
        gate_up: [E, 2 * M, D].
        down: [E, D, M].
        activate: Maps [N, 2 * M] to [N, M].
        gate_up_bias, down_bias: [E, 2 * M] and [E, D], or None.
    """

    gate_up: MatrixStack
    down: MatrixStack
    activate: Callable[[torch.Tensor], torch.Tensor]
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
