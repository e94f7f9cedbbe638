"""Matrices as their checkpoint stores them, decoded to fp32 rows where they are used."""

from collections.abc import Sequence
from typing import Protocol

import torch

from vllm.exceptions import CheckpointError
from vllm.model_executor.layers.quantization.decode import decode_fp4_groups, decode_fp8_blocks
from vllm.v1.attention.ops.stored import (
    FP4_GROUPS,
    FP8_BLOCKS,
    Inputs,
    MatrixStack,
    RowSource,
    StoredStack,
)

_E8M0_NAN = 255
_E4M3_NAN = 0x7F


class WholeInputs:
    """The part of a ``RowSource`` whose products take their inputs as they are."""

    inputs: Inputs = "whole"

    def round_inputs(self, x: torch.Tensor) -> torch.Tensor:
        """See ``RowSource``."""
        return x


class Storage(RowSource, Protocol):
    """A ``RowSource`` that a checkpoint fills."""

    def slots(self, name: str) -> dict[str, torch.Tensor]:
        """Return tensor name -> destination; ``name`` is the matrix's, without ".weight"."""

    def check(self, name: str) -> None:
        """Check the values, now that they are loaded.

        Raises:
            CheckpointError: One is no number.
        """


class Fp8Blocks(WholeInputs):
    """A ``Storage`` of e4m3 codes with one scale per block; see ``decode_fp8_blocks``.

    Args:
        num_rows: Outputs.
        num_columns: Inputs.
        block_shape: Rows and columns that share a scale.
        scales: Uninitialised, uint8 (e8m0) or fp32, one per block.
        scale_slot: What follows the matrix's name in that of its scales, and their stored shape.
    """

    def __init__(
        self,
        num_rows: int,
        num_columns: int,
        block_shape: tuple[int, int],
        scales: torch.Tensor,
        scale_slot: tuple[str, tuple[int, ...]] | None = None,
    ) -> None:
        self._scale_slot = scale_slot or (".scale", tuple(scales.shape))
        self.num_rows, self.num_columns = num_rows, num_columns
        # A block that the matrix does not fill is as large as the matrix.
        self.block_shape = (min(block_shape[0], num_rows), min(block_shape[1], num_columns))
        self.scales = scales
        self.codes = torch.empty((num_rows, num_columns), dtype=torch.uint8, device=scales.device)

    def leaves(self) -> Sequence[RowSource]:
        """See ``RowSource``."""
        return (self,)

    def find_stack(self) -> StoredStack:
        """See ``RowSource``."""
        return StoredStack(FP8_BLOCKS, self.codes[None], self.scales[None], self.block_shape)

    def write_rows(self, start: int, out: torch.Tensor) -> None:
        """See ``RowSource``."""
        codes = self.codes[start : start + out.shape[0]]
        decode_fp8_blocks(codes, self.scales, self.block_shape, start, out)

    def slots(self, name: str) -> dict[str, torch.Tensor]:
        """See ``Storage``."""
        suffix, shape = self._scale_slot
        return {
            f"{name}.weight": self.codes.view(torch.float8_e4m3fn),
            f"{name}{suffix}": scale_slot(self.scales).view(shape),
        }

    def check(self, name: str) -> None:
        """See ``Storage``."""
        if ((self.codes & _E4M3_NAN) == _E4M3_NAN).any():
            raise CheckpointError(
                f"{name}.weight holds NaN (an FP8 byte 0x7f or 0xff): download it again."
            )
        check_scales(name, self.scales)


class Fp4Groups(WholeInputs):
    """A ``Storage`` of e2m1 codes with one scale per group of a row; see ``decode_fp4_groups``.

    Args:
        num_rows: Outputs.
        num_columns: Inputs; even.
        group_size: Columns that share a scale.
        scales: Uninitialised, uint8 (e8m0) or fp32, [num_rows, groups].
    """

    def __init__(
        self, num_rows: int, num_columns: int, group_size: int, scales: torch.Tensor
    ) -> None:
        self.num_rows, self.num_columns = num_rows, num_columns
        self.group_size, self.scales = group_size, scales
        self.codes = torch.empty(
            (num_rows, num_columns // 2), dtype=torch.uint8, device=scales.device
        )

    def leaves(self) -> Sequence[RowSource]:
        """See ``RowSource``."""
        return (self,)

    def find_stack(self) -> StoredStack:
        """See ``RowSource``."""
        scale_shape = (1, self.group_size)
        return StoredStack(FP4_GROUPS, self.codes[None], self.scales[None], scale_shape)

    def write_rows(self, start: int, out: torch.Tensor) -> None:
        """See ``RowSource``."""
        rows = slice(start, start + out.shape[0])
        decode_fp4_groups(self.codes[rows], self.scales[rows], self.group_size, out)

    def slots(self, name: str) -> dict[str, torch.Tensor]:
        """See ``Storage``."""
        return {f"{name}.weight": self.codes, f"{name}.scale": scale_slot(self.scales)}

    def check(self, name: str) -> None:
        """See ``Storage``."""
        check_scales(name, self.scales)


class PlainRows(WholeInputs):
    """A ``Storage`` of ordinary floating-point rows, widened where they are used.

    Args:
        weight: [num_rows, num_columns].
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self.num_rows, self.num_columns = weight.shape
        self.weight = weight

    def leaves(self) -> Sequence[RowSource]:
        """See ``RowSource``."""
        return (self,)

    def find_stack(self) -> StoredStack:
        """See ``RowSource``."""
        return StoredStack.plain(self.weight.unsqueeze(0))

    def write_rows(self, start: int, out: torch.Tensor) -> None:
        """See ``RowSource``."""
        out.copy_(self.weight[start : start + out.shape[0]])

    def slots(self, name: str) -> dict[str, torch.Tensor]:
        """See ``Storage``."""
        return {f"{name}.weight": self.weight}

    def check(self, name: str) -> None:
        """See ``Storage``; plain values are taken as they are."""


class StackedRows(WholeInputs):
    """Several matrices over one input, as one ``RowSource``.

    Parts that round their inputs are multiplied one by one: see ``stored_products``.
    """

    def __init__(self, *parts: RowSource) -> None:
        self.parts = parts
        self.num_rows = sum(part.num_rows for part in parts)
        self.num_columns = parts[0].num_columns

    def leaves(self) -> Sequence[RowSource]:
        """See ``RowSource``."""
        return [leaf for part in self.parts for leaf in part.leaves()]

    def find_stack(self) -> MatrixStack | None:
        """See ``RowSource``: its parts are multiplied by one by one."""
        return None

    def write_rows(self, start: int, out: torch.Tensor) -> None:
        """See ``RowSource``."""
        stop, first = start + out.shape[0], 0
        for part in self.parts:
            low, high = max(start, first), min(stop, first + part.num_rows)
            if low < high:
                part.write_rows(low - first, out[low - start : high - start])
            first += part.num_rows


def scale_slot(scales: torch.Tensor) -> torch.Tensor:
    """Return where scales are loaded to; bytes take e8m0, never numbers."""
    return scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales


def check_scales(name: str, scales: torch.Tensor) -> None:
    """Check the scales of a matrix.

    Raises:
        CheckpointError: One is no number.
    """
    is_bad = scales == _E8M0_NAN if scales.dtype == torch.uint8 else ~scales.isfinite()
    if is_bad.any():
        row, column = is_bad.nonzero()[0].tolist()
        raise CheckpointError(
            f"{name}.scale holds {int(is_bad.sum())} scales that are no number (E8M0 byte 255, or "
            f"infinite), the first at [{row}, {column}]: download it again."
        )
