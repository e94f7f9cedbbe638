"""The seam for quantised weights: a platform says which matrices are stored its way.

A model asks its ``TensorFactory`` for each matrix by published name; where the checkpoint's
``WeightQuantization`` knows the name, the layer keeps no weight of its own and calls what it got.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from vllm.v1.attention.ops.stored import RowSource


@dataclass(frozen=True, slots=True)
class MatrixSpec:
    """A matrix that a layer asks for.

    Attributes:
        name: Its published name, without ".weight".
        in_size: Width of the input, or of one slice of it.
        out_size: Rows of the matrix, of all groups together.
        dtype: Type of the layer's activations.
        device: Where it lives.
        num_groups: Slices of the input that ``map_groups`` will get; 1: called as a whole.
    """

    name: str
    in_size: int
    out_size: int
    dtype: torch.dtype
    device: torch.device
    num_groups: int = 1


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """The routed experts that a layer asks for, and the shared expert beside them.

    Attributes:
        prefix: Published prefix of the layer, with its dot.
        num_experts: Routed ones that this rank holds.
        hidden_size: Width of their input and output.
        inner_size: Width between their matrices.
        limit: Clamp of gate and up; 0: none.
        dtype: Type of the layer's activations.
        device: Where they live.
    """

    prefix: str
    num_experts: int
    hidden_size: int
    inner_size: int
    limit: float
    dtype: torch.dtype
    device: torch.device


class QuantisedMatrix(Protocol):
    """One published matrix [out, in] in a storage of its own.

    Attributes:
        row_source: The matrix as rows that can be decoded, so that matrices over one input share
            one product; None where its products are its own.
    """

    row_source: RowSource | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map [T, in] to [T, out]."""

    def prepare(self, x: torch.Tensor) -> Any:
        """Return [T, in] as ``map_prepared`` takes it, of this and any matrix of the checkpoint.

        Matrices over one input share the work of it, such as rounding the input.
        """

    def map_prepared(self, prepared: Any) -> torch.Tensor:
        """Map what ``prepare`` returned to [T, out]."""

    def map_groups(self, x: torch.Tensor) -> torch.Tensor:
        """Map slices by the matrix's g blocks of rows: [T, g, in] to [T, g, out / g]."""

    def slots(self, name: str) -> dict[str, torch.Tensor]:
        """Return tensor name -> destination; ``name`` is the matrix's, without ".weight"."""


class QuantisedExperts(Protocol):
    """The routed experts of one layer and its shared expert, in a storage of their own."""

    @property
    def is_one_product(self) -> bool:
        """Whether all routed experts are multiplied at once, whichever were chosen."""

    def stack(self) -> None:
        """Arrange the experts, loaded, so that they are one product where that can be had."""

    def __call__(
        self, x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Sum each token's chosen experts and the shared one: [T, D], [T, k], [T, k] to [T, D]."""

    def slots(self, prefix: str) -> dict[str, torch.Tensor]:
        """Return tensor name -> destination; ``prefix`` is the feed-forward layer's."""


class RowDecoder(Protocol):
    """Decodes some rows of a table that stays in its file.

    Attributes:
        row_bytes: Bytes of a stored row.
    """

    row_bytes: int

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the values, fp32 [T, width], of stored rows, uint8 [T, row_bytes]."""


class WeightQuantization(Protocol):
    """What a checkpoint says about how its matrices are stored."""

    def make_matrix(self, spec: MatrixSpec) -> QuantisedMatrix | None:
        """Return the storage of a matrix, or None where it is plain.

        Raises:
            UnsupportedFeatureError: It is stored in a way that is not supported.
        """

    def has_part(self, prefix: str) -> bool:
        """Whether the checkpoint holds tensors of an optional part of the model."""

    def plain_dtype(self, names: Sequence[str]) -> torch.dtype | None:
        """Return the type plain tensors are kept in although activations are wider.

        Args:
            names: Published names of tensors that share one parameter.

        Returns:
            None: the type the model asks for.
        """

    def find_row_decoder(self, name: str, width: int) -> RowDecoder | None:
        """Return what decodes rows of a table that stays in its file; None: they are plain.

        Args:
            name: Its published name.
            width: Values of a row.
        """

    def finish_loading(self) -> None:
        """Check and arrange what was made, now that every slot is filled; called once.

        Raises:
            CheckpointError: The values cannot be computed with.
        """

    def make_experts(self, spec: ExpertsSpec) -> QuantisedExperts | None:
        """Return the storage of a layer's experts, or None where all are plain.

        Raises:
            UnsupportedFeatureError: They are stored in a way that is not supported.
        """
