"""Manifold-constrained hyper-connections: n residual streams mixed around each sublayer."""

import torch
from torch import nn

from vllm.model_executor.layers.linear import TensorFactory
from vllm.v1.attention.ops.reference import sinkhorn_sums
from vllm.v1.attention.ops.registry import OpResolver


class HyperConnection(nn.Module):
    """Reads a sublayer's input from the streams and writes its output back.

    Args:
        num_streams: n.
        hidden_size: D.
        norm_eps: Of the weight-less norm over all n * D values.
        hc_eps: Added to the reading weights, the mixing matrix and its sums.
        num_iterations: Sinkhorn column passes.
        ops: Resolves op names.
        make: Allocates the weights, all fp32.
    """

    def __init__(
        self,
        num_streams: int,
        hidden_size: int,
        norm_eps: float,
        hc_eps: float,
        num_iterations: int,
        ops: OpResolver,
        make: TensorFactory,
    ) -> None:
        super().__init__()
        n = num_streams
        self._num_streams, self._num_iterations = n, num_iterations
        self._norm_eps, self._hc_eps = norm_eps, hc_eps
        self.fn = make.parameter((2 + n) * n, n * hidden_size, dtype=torch.float32)
        self.base = make.parameter((2 + n) * n, dtype=torch.float32)
        self.scale = make.parameter(3, dtype=torch.float32)
        # Which scale each projected value takes: n reading, n writing, n * n mixing ones.
        self._scale_index = torch.tensor([0] * n + [1] * n + [2] * n * n, device=make.device)
        self._row_sums, self._column_sums = (
            sums.to(make.device) for sums in sinkhorn_sums(n, hc_eps)
        )
        self._project = ops("hc_project")
        self._sinkhorn = ops("sinkhorn")
        self._collapse = ops("hc_collapse")
        self._expand = ops("hc_expand")

    def read(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the sublayer's input [T, D], and ``write``'s weights [T, n] and [T, n, n]."""
        weights, post, mix = self.weigh(streams)
        return self.collapse(streams, weights), post, mix

    def weigh(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns ``collapse``'s weights [T, n], and ``write``'s."""
        n = self._num_streams
        scale = self.scale[self._scale_index]
        projected = self._project(streams, self.fn, scale, self.base, self._norm_eps)
        gates = projected[:, : 2 * n].sigmoid()
        mix = self._sinkhorn(
            projected[:, 2 * n :].view(-1, n, n),
            self._num_iterations,
            self._hc_eps,
            self._row_sums,
            self._column_sums,
        )
        return gates[:, :n] + self._hc_eps, gates[:, n:] * 2, mix

    def collapse(self, streams: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Returns the sum [T, D] of the streams, each by its weight."""
        collapsed: torch.Tensor = self._collapse(streams, weights)
        return collapsed

    def write(
        self, output: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, mix: torch.Tensor
    ) -> torch.Tensor:
        """Returns the new streams [T, n, D] from a sublayer's output [T, D]."""
        expanded: torch.Tensor = self._expand(output, streams, post, mix)
        return expanded

    def weight_slots(self, prefix: str) -> dict[str, torch.Tensor]:
        """Returns published tensor name -> destination."""
        return {
            f"{prefix}_fn": self.fn.data,
            f"{prefix}_base": self.base.data,
            f"{prefix}_scale": self.scale.data,
        }


class HyperHead(nn.Module):
    """Collapses the streams after the last layer."""

    def __init__(
        self,
        num_streams: int,
        hidden_size: int,
        norm_eps: float,
        hc_eps: float,
        ops: OpResolver,
        make: TensorFactory,
    ) -> None:
        super().__init__()
        self._norm_eps, self._hc_eps = norm_eps, hc_eps
        self.fn = make.parameter(num_streams, num_streams * hidden_size, dtype=torch.float32)
        self.base = make.parameter(num_streams, dtype=torch.float32)
        self.scale = make.parameter(1, dtype=torch.float32)
        self._project = ops("hc_project")
        self._collapse = ops("hc_collapse")

    def forward(self, streams: torch.Tensor) -> torch.Tensor:
        """Maps [M, n, D] to [M, D]."""
        projected = self._project(streams, self.fn, self.scale, self.base, self._norm_eps)
        collapsed: torch.Tensor = self._collapse(streams, projected.sigmoid() + self._hc_eps)
        return collapsed

    def weight_slots(self, prefix: str) -> dict[str, torch.Tensor]:
        """Returns published tensor name -> destination."""
        return {
            f"{prefix}_fn": self.fn.data,
            f"{prefix}_base": self.base.data,
            f"{prefix}_scale": self.scale.data,
        }
