"""DeepSeek-V4's experts where ranks hold whole ones; the shared expert is cut as without."""

import torch
from torch import nn

from vllm.distributed.parallel_state import shard_size
from vllm.model_executor.layers.linear import ReplicatedLinear, TensorFactory
from vllm.model_executor.layers.spread_experts import run_own_experts
from vllm.model_executor.models.deepseek_v4.step import ModelParts
from vllm.v1.attention.ops.reference import clamped_swiglu_


class SwigluExpert(nn.Module):
    """One gated expert, its matrices plain or quantised.

    Args:
        name: Published name of the expert, such as "experts.3".
        hidden_size, inner_size: D, and what this rank holds of M.
        limit: Clamp of gate and up.
        make: Allocates the weights.
    """

    def __init__(
        self, name: str, hidden_size: int, inner_size: int, limit: float, make: TensorFactory
    ) -> None:
        super().__init__()
        self._limit = limit
        sizes = (inner_size, inner_size)
        self.gate_up = ReplicatedLinear(hidden_size, sizes, make, (f"{name}.w1", f"{name}.w3"))
        self.down = ReplicatedLinear(inner_size, (hidden_size,), make, (f"{name}.w2",))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [N, D] to [N, D]."""
        output: torch.Tensor = self.down(clamped_swiglu_(self.gate_up(x), self._limit))
        return output

    def weight_slots(self, prefix: str) -> dict[str, torch.Tensor]:
        """Returns published tensor name -> destination."""
        return {
            **self.gate_up.part_slots(0, f"{prefix}.w1"),
            **self.gate_up.part_slots(1, f"{prefix}.w3"),
            **self.down.part_slots(0, f"{prefix}.w2"),
        }


class SpreadExperts(nn.Module):
    """This rank's routed experts, and its part of the shared one."""

    def __init__(self, parts: ModelParts) -> None:
        super().__init__()
        config, make = parts.config, parts.make
        hidden, inner, limit = config.hidden_size, config.moe_intermediate_size, config.swiglu_limit
        self._own = make.share.find_experts(config.n_routed_experts)
        self.routed = nn.ModuleList(
            SwigluExpert(f"experts.{expert}", hidden, inner, limit, make) for expert in self._own
        )
        part = shard_size("moe_intermediate_size", inner, make.group)
        self.shared = SwigluExpert("shared_experts", hidden, part, limit, make)
        self._run = parts.ops("run_experts")

    def forward(
        self, x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Maps [T, D] to this rank's part of the sum, [T, D]."""
        routed = run_own_experts(x, expert_ids, weights, self._own, self._run_expert, self._run)
        output: torch.Tensor = routed.add_(self.shared(x))
        return output

    def _run_expert(self, rows: torch.Tensor, expert: int) -> torch.Tensor:
        output: torch.Tensor = self.routed[expert](rows)
        return output

    def weight_slots(self, prefix: str) -> dict[str, torch.Tensor]:
        """Returns published tensor name -> destination."""
        slots = self.shared.weight_slots(f"{prefix}.shared_experts")
        for expert, module in zip(self._own, self.routed, strict=True):
            assert isinstance(module, SwigluExpert)
            slots.update(module.weight_slots(f"{prefix}.experts.{expert}"))
        return slots
