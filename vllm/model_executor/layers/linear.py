"""Linear layers by how a tensor-parallel group shares them; a group of one shares nothing.

Weights are stored [out, in] and allocated uninitialised: the loader fills them through views.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from vllm.distributed.parallel_state import TensorParallelGroup, shard_size
from vllm.v1.attention.ops.registry import OpResolver


@dataclass(frozen=True, slots=True)
class TensorFactory:
    """How a model's tensors are made.

    Attributes:
        dtype: Type of ordinary weights.
        device: Where they live.
        group: The processes that share the model.
        ops: Resolves op names.
    """

    dtype: torch.dtype
    device: torch.device
    group: TensorParallelGroup
    ops: OpResolver

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
    """

    def __init__(self, in_size: int, out_sizes: Sequence[int], make: TensorFactory) -> None:
        super().__init__()
        self._linear = make.ops("linear")
        self.out_sizes = tuple(out_sizes)
        self.weight = make.parameter(sum(out_sizes), in_size)

    def weight_parts(self) -> tuple[torch.Tensor, ...]:
        """Views of the fused weight, one per output."""
        return torch.split(self.weight.data, list(self.out_sizes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [T, in] to [T, sum(out_sizes)]."""
        mapped: torch.Tensor = self._linear(x, self.weight)
        return mapped


class ColumnParallelLinear(nn.Module):
    """A matrix whose outputs are shared out; each process keeps its own outputs."""

    def __init__(self, name: str, in_size: int, out_size: int, make: TensorFactory) -> None:
        super().__init__()
        self._linear = make.ops("linear")
        self.weight = make.parameter(shard_size(name, out_size, make.group), in_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [T, in] to [T, out / group size]."""
        mapped: torch.Tensor = self._linear(x, self.weight)
        return mapped


class RowParallelLinear(nn.Module):
    """A matrix whose inputs are shared out; the outputs are summed over the group."""

    def __init__(self, name: str, in_size: int, out_size: int, make: TensorFactory) -> None:
        super().__init__()
        self._linear = make.ops("linear")
        self._group = make.group
        self.weight = make.parameter(out_size, shard_size(name, in_size, make.group))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [T, in / group size] to [T, out]."""
        return self._group.all_reduce(self._linear(x, self.weight))


class GroupedColumnParallelLinear(nn.Module):
    """Independent matrices over equal slices of the input; the slices are shared out.

    The published weight is [groups * out, in]: rows of group g first come at g * out.
    """

    def __init__(
        self, name: str, num_groups: int, in_size: int, out_size: int, make: TensorFactory
    ) -> None:
        super().__init__()
        self._grouped_linear = make.ops("grouped_linear")
        self.num_groups = shard_size(name, num_groups, make.group)
        self.weight = make.parameter(self.num_groups * out_size, in_size)
        self._out_size = out_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [T, groups * in] to [T, groups * out]."""
        num_tokens = x.shape[0]
        weight = self.weight.view(self.num_groups, self._out_size, -1)
        mapped = self._grouped_linear(x.view(num_tokens, self.num_groups, -1), weight)
        flat: torch.Tensor = mapped.reshape(num_tokens, -1)
        return flat
