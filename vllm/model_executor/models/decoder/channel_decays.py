"""The delta rule with a decay for each channel of a head's keys (Kimi Linear, GLM 5.3 Flash).

Decays and gates are products of two narrow matrices each. Source: arXiv:2510.26692.
"""

import torch
from typing_extensions import override

from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.models.decoder.config import GatedDeltaPlan
from vllm.model_executor.models.decoder.delta_rule import DeltaRuleNet, Projected
from vllm.model_executor.models.decoder.step import ModelParts

_NAMES = ("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj", "g_a_proj")
_CONVOLUTIONS = ("q_conv1d", "k_conv1d", "v_conv1d")


class ChannelDecayNet(DeltaRuleNet):
    """The recurrence of one layer, with a decay a channel; arguments as of ``DeltaRuleNet``."""

    def __init__(self, index: int, plan: GatedDeltaPlan, parts: ModelParts) -> None:
        super().__init__(index, plan, parts)
        make, hidden = parts.make, parts.config.hidden_size
        whole_width, plan = plan.num_value_heads * plan.value_dim, self.plan
        keys, values = plan.num_key_heads * plan.key_dim, plan.num_value_heads * plan.value_dim
        self._channels = [keys, keys, values]
        rank = plan.value_dim
        sizes = (*self._channels, plan.num_value_heads, rank, rank)
        self.in_proj = MergedColumnParallelLinear(hidden, sizes, make, _NAMES)
        self.decays = ReplicatedLinear(rank, (len(self.dt_bias),), make, ("f_b_proj",))
        self.gates = ReplicatedLinear(rank, (values,), make, ("g_b_proj",))
        self._bounded_decay_logs = parts.ops("bounded_decay_logs")
        self.output = RowParallelLinear(
            "linear_attn_config.num_heads * head_dim", whole_width, hidden, make, "o_proj"
        )

    def _project(self, x: torch.Tensor) -> Projected:
        """Maps the normed input [T, D] to the parts of ``Projected``, of logarithms [T, H, K]."""
        plan = self.plan
        rank = plan.value_dim
        sizes = [plan.num_channels, plan.num_value_heads, rank, rank]
        mixed, betas, decays, gates = torch.split(self.in_proj(x), sizes, -1)
        by_channel = self.decays(decays).view(len(x), plan.num_value_heads, plan.key_dim)
        bias = self.dt_bias.view(plan.num_value_heads, plan.key_dim)
        rates = self.a_log.unsqueeze(1)
        if plan.decay_bound:
            logs = self._bounded_decay_logs(by_channel, bias, rates, plan.decay_bound)
        else:
            logs = self._decay_logs(by_channel, bias, rates)
        return mixed, self.gates(gates), betas, logs

    @override
    def _map_output(self, normed: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.output(normed)
        return output

    @override
    def weight_slots(self, prefix: str) -> dict[str, torch.Tensor]:
        rates = self.a_log.data
        slots = {
            **self.output.weight_slots(f"{prefix}.o_proj"),
            **self.decays.part_slots(0, f"{prefix}.f_b_proj"),
            **self.gates.part_slots(0, f"{prefix}.g_b_proj"),
            f"{prefix}.A_log": rates if self.plan.decay_bound else rates.view(1, 1, -1, 1),
            f"{prefix}.dt_bias": self.dt_bias.data,
            f"{prefix}.o_norm.weight": self.norm.data,
        }
        parts = torch.split(self.conv.data, self._channels)
        slots |= {f"{prefix}.{n}.weight": p for n, p in zip(_CONVOLUTIONS, parts, strict=True)}
        for index, name in enumerate(_NAMES):
            slots |= self.in_proj.part_slots(index, f"{prefix}.{name}")
        return slots
