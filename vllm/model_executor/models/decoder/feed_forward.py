"""The second half of a layer: a gated MLP, or routed experts."""

from functools import partial

import torch
from torch import nn

from vllm.distributed.parallel_state import shard_size
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from vllm.model_executor.layers.spread_experts import find_share, run_own_experts
from vllm.model_executor.models.decoder.clamped_experts import ClampedExperts
from vllm.model_executor.models.decoder.config import (
    ClampedExpertsPlan,
    ExpertsPlan,
    FeedForwardPlan,
    MlpPlan,
)
from vllm.model_executor.models.decoder.step import ModelParts
from vllm.v1.attention.ops.stored import GatedExperts, StoredStack

_ACTIVATION_OPS = {"silu": "silu_and_mul", "gelu_tanh": "gelu_tanh_and_mul"}


def build_feed_forward(
    plan: FeedForwardPlan, parts: ModelParts
) -> "GatedMlp | Experts | ClampedExperts":
    """Returns the module of a plan, its tensors named within ``parts``' prefix."""
    if isinstance(plan, ClampedExpertsPlan):
        return ClampedExperts(plan, parts)
    return Experts(plan, parts) if isinstance(plan, ExpertsPlan) else GatedMlp(plan, parts)


class GatedMlp(nn.Module):
    """down(activation(gate(x)) * up(x)), gate and up in one product."""

    def __init__(self, plan: MlpPlan, parts: ModelParts) -> None:
        super().__init__()
        make, hidden = parts.make, parts.config.hidden_size
        inner = shard_size("intermediate_size", plan.inner_size, make.group)
        self.gate_up = MergedColumnParallelLinear(
            hidden, (inner, inner), make, ("gate_proj", "up_proj")
        )
        self.down = RowParallelLinear(
            "intermediate_size", plan.inner_size, hidden, make, "down_proj"
        )
        self.gate_up_bias = make.parameter(2 * inner) if plan.has_bias else None
        self.down_bias = make.parameter(hidden) if plan.has_bias else None
        self._activate = parts.ops(_ACTIVATION_OPS[plan.activation])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps the normed input [T, D] to [T, D]."""
        gate_up = self.gate_up(x)
        if self.gate_up_bias is not None:
            gate_up += self.gate_up_bias
        output: torch.Tensor = self.down(self._activate(gate_up))
        if self.down_bias is not None:
            output += self.down_bias
        return output

    def weight_slots(self, prefix: str) -> dict[str, torch.Tensor]:
        """Returns tensor name -> destination."""
        slots = {
            **self.gate_up.part_slots(0, f"{prefix}.gate_proj"),
            **self.gate_up.part_slots(1, f"{prefix}.up_proj"),
            **self.down.weight_slots(f"{prefix}.down_proj"),
        }
        if self.gate_up_bias is not None and self.down_bias is not None:
            gate, up = self.gate_up_bias.data.chunk(2)
            slots[f"{prefix}.gate_proj.bias"], slots[f"{prefix}.up_proj.bias"] = gate, up
            slots[f"{prefix}.down_proj.bias"] = self.down_bias.data
        return slots


class Experts(nn.Module):
    """Routed experts without a shared one; a softmax over all of them chooses."""

    def __init__(self, plan: ExpertsPlan, parts: ModelParts) -> None:
        super().__init__()
        make, hidden = parts.make, parts.config.hidden_size
        self.plan = plan
        self._group = make.group
        self.router = make.parameter(plan.num_experts, hidden, dtype=torch.float32)
        self._own, inner = find_share(make, plan.num_experts, plan.inner_size)
        self.gate_up = make.parameter(len(self._own), 2 * inner, hidden)
        self.down = make.parameter(len(self._own), hidden, inner)
        self._score = parts.ops("router_logits")
        self._choose, self._run = parts.ops("choose_by_softmax"), parts.ops("run_experts")
        activate = parts.ops(_ACTIVATION_OPS[plan.activation])
        self._mlp = partial(parts.ops("gated_mlp"), activate=activate)
        self._experts = GatedExperts(
            StoredStack.plain(self.gate_up.data), StoredStack.plain(self.down.data), activate
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps the normed input [T, D] to [T, D]."""
        logits = self._score(x, self.router)
        ids, weights = self._choose(logits, self.plan.num_chosen, self.plan.normalises)
        output: torch.Tensor
        if len(self._own) == self.plan.num_experts:
            output = self._run(x, ids, weights, self._run_expert, self._experts)
        else:
            output = run_own_experts(x, ids, weights, self._own, self._run_expert, self._run)
        return self._group.all_reduce(output)

    def _run_expert(self, rows: torch.Tensor, expert: int) -> torch.Tensor:
        output: torch.Tensor = self._mlp(rows, self.gate_up[expert], self.down[expert])
        return output

    def weight_slots(self, prefix: str) -> dict[str, torch.Tensor]:
        """Returns tensor name -> destination; experts are slices of the stacks."""
        slots = {f"{prefix}.gate.weight": self.router.data}
        for index, expert in enumerate(self._own):
            gate, up = self.gate_up.data[index].chunk(2)
            name = f"{prefix}.experts.{expert}"
            slots[f"{name}.gate_proj.weight"], slots[f"{name}.up_proj.weight"] = gate, up
            slots[f"{name}.down_proj.weight"] = self.down.data[index]
        return slots
