"""Linear layers by how a tensor-parallel group shares them; a group of one shares nothing.

Weights are stored [out, in] and allocated uninitialised: the loader fills them through views.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from vllm.distributed.parallel_state import TensorParallelGroup, shard_size
from vllm.model_executor.layers.quantization import (
    ExpertsSpec,
    MatrixSpec,
    QuantisedExperts,
    QuantisedMatrix,
    RowDecoder,
    WeightQuantization,
)
from vllm.model_executor.layers.quantization.products import multiply_plain
from vllm.model_executor.layers.quantization.storages import PlainRows, StackedRows
from vllm.model_executor.model_loader.shards import WHOLE_SHARE, RankShare
from vllm.v1.attention.ops.registry import OpResolver
from vllm.v1.attention.ops.stored import RowSource


@dataclass(frozen=True, slots=True)
class TensorFactory:
    """How a model's tensors are made.

    Attributes:
        dtype: Type of ordinary weights.
        device: Where they live.
        group: The processes that share the model.
        ops: Resolves op names.
        quantization: Which matrices are stored in another way; None: none is.
        prefix: Published prefix of the names asked for, with its dot.
        share: Which part of the model this process holds.
    """

    dtype: torch.dtype
    device: torch.device
    group: TensorParallelGroup
    ops: OpResolver
    quantization: WeightQuantization | None = None
    prefix: str = ""
    share: RankShare = WHOLE_SHARE

    def within(self, prefix: str) -> "TensorFactory":
        """Returns a factory for the tensors whose published names begin with ``prefix``."""
        return replace(self, prefix=f"{prefix}.")

    def quantised_matrix(
        self, name: str, in_size: int, out_size: int, num_groups: int = 1
    ) -> QuantisedMatrix | None:
        """Returns the storage of a quantised matrix; None for a plain one, or one without name."""
        if self.quantization is None or not name:
            return None
        spec = MatrixSpec(
            self.prefix + name, in_size, out_size, self.dtype, self.device, num_groups
        )
        return self.quantization.make_matrix(spec)

    def quantised_experts(
        self, num_experts: int, hidden_size: int, inner_size: int, limit: float
    ) -> QuantisedExperts | None:
        """Returns the storage of a layer's quantised experts; None for plain ones."""
        if self.quantization is None:
            return None
        spec = ExpertsSpec(
            self.prefix, num_experts, hidden_size, inner_size, limit, self.dtype, self.device
        )
        return self.quantization.make_experts(spec)

    def row_decoder(self, name: str, width: int) -> RowDecoder | None:
        """Returns what decodes rows of the table ``name``, whole; None: they are plain values."""
        if self.quantization is None:
            return None
        return self.quantization.find_row_decoder(self.prefix + name, width)

    def kept_dtype(self, default: torch.dtype, *names: str) -> torch.dtype:
        """Returns the type of a parameter that holds the plain tensors ``names``.

        Next to quantised matrices, plain ones stay as stored too: widened, they could take more
        memory than all the rest.
        """
        if self.quantization is None or not names:
            return default
        return self.quantization.plain_dtype([self.prefix + name for name in names]) or default

    def parameter(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """Allocates an uninitialised inference-only parameter."""
        data = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        return nn.Parameter(data, requires_grad=False)


class ReplicatedLinear(nn.Module):
    """One or several matrices over the same input, whole on every process.

    Args:
        in_size: Width of the input.
        out_sizes: Widths of the outputs, fused into one matrix product.
        make: Allocates the weight.
        names: Published names of the first outputs' matrices; only these may be quantised.
    """

    def __init__(
        self,
        in_size: int,
        out_sizes: Sequence[int],
        make: TensorFactory,
        names: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self._linear, self._stored_linear = make.ops("linear"), make.ops("stored_linear")
        self.out_sizes = tuple(out_sizes)
        padded_names = [*names, *("" for _ in self.out_sizes[len(names) :])]
        self._quantised = tuple(
            make.quantised_matrix(name, in_size, size)
            for name, size in zip(padded_names, self.out_sizes, strict=True)
        )
        # Outputs of quantised matrices take no rows of the plain weight.
        self._plain_sizes = [
            size if quantised is None else 0
            for size, quantised in zip(self.out_sizes, self._quantised, strict=True)
        ]
        self._is_plain = all(quantised is None for quantised in self._quantised)
        plain_tensors = [
            f"{name}.weight"
            for name, quantised in zip(names, self._quantised, strict=False)
            if quantised is None
        ]
        dtype = make.kept_dtype(make.dtype, *plain_tensors)
        self.weight = make.parameter(sum(self._plain_sizes), in_size, dtype=dtype)
        self._source = None if self._is_plain else self._find_source()

    def _find_source(self) -> RowSource | None:
        """Returns all outputs as one matrix, where every quantised one can be decoded."""
        parts: list[RowSource] = []
        for quantised, plain in zip(self._quantised, self.weight_parts(), strict=True):
            source = PlainRows(plain) if quantised is None else quantised.row_source
            if source is None:
                return None
            parts.append(source)
        return StackedRows(*parts)

    def weight_parts(self) -> tuple[torch.Tensor, ...]:
        """Views of the fused weight, one per output; a quantised one's has no rows."""
        return torch.split(self.weight.data, self._plain_sizes)

    def part_slots(self, index: int, name: str) -> dict[str, torch.Tensor]:
        """Returns tensor name -> destination of one output's matrix ``name``."""
        quantised = self._quantised[index]
        if quantised is None:
            return {f"{name}.weight": self.weight_parts()[index]}
        return quantised.slots(name)

    def find_rows(self) -> RowSource | None:
        """Returns the matrix as stored rows; None where a platform multiplies by it its own way."""
        return PlainRows(self.weight.data) if self._is_plain else self._source

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [T, in] to [T, sum(out_sizes)]."""
        if self._is_plain:
            return multiply_plain(x, self.weight, self._linear, self._stored_linear)
        if self._source is not None:
            product: torch.Tensor = self._stored_linear(x, self._source)
            return product
        plain = torch.split(self._linear(x, self.weight), self._plain_sizes, -1)
        prepared = next(q for q in self._quantised if q is not None).prepare(x)
        outputs = zip(self._quantised, plain, strict=True)
        parts = [part if q is None else q.map_prepared(prepared) for q, part in outputs]
        return torch.cat(parts, -1)


class MergedColumnParallelLinear(ReplicatedLinear):
    """Several matrices over the same input, the outputs of each shared out.

    Args:
        in_size: Width of the input.
        out_sizes: This process's share of each output's width.
        make: Allocates the weight.
        names: Published names of the matrices.
    """


class StoredLinear(nn.Module):
    """One matrix, plain or quantised, of which this process holds [out, in]."""

    def __init__(
        self, name: str, in_size: int, out_size: int, make: TensorFactory, num_groups: int = 1
    ) -> None:
        super().__init__()
        self._linear, self._stored_linear = make.ops("linear"), make.ops("stored_linear")
        self._quantised = make.quantised_matrix(name, in_size, out_size, num_groups)
        names = [f"{name}.weight"] if name else []
        self.weight = make.parameter(
            0 if self._quantised else out_size, in_size, dtype=make.kept_dtype(make.dtype, *names)
        )

    def weight_slots(self, name: str) -> dict[str, torch.Tensor]:
        """Returns tensor name -> destination of the matrix ``name``."""
        if self._quantised is None:
            return {f"{name}.weight": self.weight.data}
        return self._quantised.slots(name)

    def find_rows(self) -> RowSource | None:
        """Returns the matrix as stored rows; None where a platform multiplies by it its own way."""
        return (
            PlainRows(self.weight.data) if self._quantised is None else self._quantised.row_source
        )

    def _map(self, x: torch.Tensor) -> torch.Tensor:
        if self._quantised is not None:
            return self._quantised(x)
        return multiply_plain(x, self.weight, self._linear, self._stored_linear)


class ColumnParallelLinear(StoredLinear):
    """A matrix whose outputs are shared out; each process keeps its own outputs.

    Args:
        size_name: What ``out_size`` is, for messages.
        in_size: Width of the input.
        out_size: Width of the whole output.
        make: Allocates the weight.
        name: Published name of the matrix; empty: it is never quantised.
    """

    def __init__(
        self, size_name: str, in_size: int, out_size: int, make: TensorFactory, name: str = ""
    ) -> None:
        super().__init__(name, in_size, shard_size(size_name, out_size, make.group), make)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [T, in] to [T, out / group size]."""
        return self._map(x)


class RowParallelLinear(StoredLinear):
    """A matrix whose inputs are shared out; the outputs are summed over the group.

    Args:
        size_name: What ``in_size`` is, for messages.
        in_size: Width of the whole input.
        out_size: Width of the output.
        make: Allocates the weight.
        name: Published name of the matrix; empty: it is never quantised.
    """

    def __init__(
        self, size_name: str, in_size: int, out_size: int, make: TensorFactory, name: str = ""
    ) -> None:
        super().__init__(name, shard_size(size_name, in_size, make.group), out_size, make)
        self._group = make.group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [T, in / group size] to [T, out]."""
        return self._group.all_reduce(self._map(x))


class GroupedColumnParallelLinear(StoredLinear):
    """Independent matrices over equal slices of the input; the slices are shared out.

    The published weight is [groups * out, in]: rows of group g first come at g * out.

    Args:
        size_name: What ``num_groups`` is, for messages.
        num_groups: Matrices on all processes together.
        in_size: Width of a slice.
        out_size: Width of a matrix's output.
        make: Allocates the weight.
        name: Published name of the stacked matrices; empty: they are never quantised.
    """

    def __init__(
        self,
        size_name: str,
        num_groups: int,
        in_size: int,
        out_size: int,
        make: TensorFactory,
        name: str = "",
    ) -> None:
        num_local = shard_size(size_name, num_groups, make.group)
        super().__init__(name, in_size, num_local * out_size, make, num_local)
        self._grouped_linear = make.ops("grouped_linear")
        self._stored_grouped_linear = make.ops("stored_grouped_linear")
        self.num_groups = num_local
        self._out_size = out_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [T, groups * in] to [T, groups * out]."""
        num_tokens = x.shape[0]
        grouped = x.view(num_tokens, self.num_groups, -1)
        if self._quantised is not None:
            return self._quantised.map_groups(grouped).reshape(num_tokens, -1)
        if self.weight.dtype != x.dtype:
            rows = PlainRows(self.weight.data)
            mapped: torch.Tensor = self._stored_grouped_linear(grouped, rows, self.num_groups)
            return mapped.reshape(num_tokens, -1)
        weight = self.weight.view(self.num_groups, self._out_size, -1)
        flat: torch.Tensor = self._grouped_linear(grouped, weight).reshape(num_tokens, -1)
        return flat
