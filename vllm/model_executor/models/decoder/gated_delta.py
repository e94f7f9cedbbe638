"""The delta rule with one decay a head (Qwen 3.5)."""

import torch
from typing_extensions import override

from vllm.model_executor.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from vllm.model_executor.models.decoder.config import GatedDeltaPlan
from vllm.model_executor.models.decoder.delta_rule import DeltaRuleNet, Projected
from vllm.model_executor.models.decoder.step import ModelParts

_PROJECTIONS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
# What several ranks cut those into that hold queries, keys and values.
_SPLIT = ("in_proj_q", "in_proj_k", "in_proj_v")
_SPLIT_CONV = ("conv1d_q", "conv1d_k", "conv1d_v")
SPLIT_TENSORS = {"in_proj_qkv": _SPLIT, "conv1d": _SPLIT_CONV}
"""A tensor over queries, keys and values -> its parts."""
# By key head: its query, key, values and gates; its betas and decays.
_INTERLEAVED = ("in_proj_qkvz", "in_proj_ba")


class GatedDeltaNet(DeltaRuleNet):
    """The recurrence of one layer, with one decay a head; arguments as of ``DeltaRuleNet``."""

    def __init__(self, index: int, plan: GatedDeltaPlan, parts: ModelParts) -> None:
        super().__init__(index, plan, parts)
        make, config = parts.make, parts.config
        whole_width, plan = plan.num_value_heads * plan.value_dim, self.plan
        heads, width = plan.num_value_heads, plan.num_value_heads * plan.value_dim
        self.in_sizes = [plan.num_channels, width, heads, heads]
        # Queries, keys and values lie in one tensor, but of each a rank has its own heads.
        keys = plan.num_key_heads * plan.key_dim
        self._is_split = make.group.size > 1
        self._channels = [keys, keys, width]
        self._names: tuple[str, ...] = _PROJECTIONS
        sizes = self.in_sizes
        if plan.is_interleaved:
            self._names, sizes = _INTERLEAVED, [plan.num_channels + width, 2 * heads]
        elif self._is_split:
            self._names, sizes = (*_SPLIT, *_PROJECTIONS[1:]), [*self._channels, *sizes[1:]]
        self.in_proj = MergedColumnParallelLinear(config.hidden_size, sizes, make, self._names)
        self.output = RowParallelLinear(
            "linear_num_value_heads * linear_value_head_dim",
            whole_width,
            config.hidden_size,
            make,
            "out_proj",
        )

    def _project(self, x: torch.Tensor) -> Projected:
        """Maps the normed input [T, D] to the parts of ``Projected``, of logarithms [T, H]."""
        mixed, gates, betas, decays = self._split(x)
        return mixed, gates, betas, self._decay_logs(decays, self.dt_bias, self.a_log)

    @override
    def _map_output(self, normed: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.output(normed)
        return output

    def _split(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns the convolution's inputs [T, C], gates [T, H * V], betas and decays [T, H]."""
        plan, projected = self.plan, self.in_proj(x)
        if not plan.is_interleaved:
            return torch.split(projected, self.in_sizes, -1)
        heads, repeats = plan.num_key_heads, plan.num_value_heads // plan.num_key_heads
        main, rest = torch.split(projected, [sum(self.in_sizes[:2]), sum(self.in_sizes[2:])], -1)
        width = repeats * plan.value_dim
        by_head = main.view(len(x), heads, -1)
        parts = torch.split(by_head, [plan.key_dim, plan.key_dim, width, width], -1)
        queries, keys, values, gates = (part.flatten(1) for part in parts)
        betas, decays = torch.split(rest.view(len(x), heads, -1), repeats, -1)
        mixed = torch.cat([queries, keys, values], -1)
        return mixed, gates, betas.flatten(1), decays.flatten(1)

    @override
    def weight_slots(self, prefix: str) -> dict[str, torch.Tensor]:
        slots = {
            **self.output.weight_slots(f"{prefix}.out_proj"),
            f"{prefix}.A_log": self.a_log.data,
            f"{prefix}.dt_bias": self.dt_bias.data,
            f"{prefix}.norm.weight": self.norm.data,
        }
        if self._is_split:
            parts = torch.split(self.conv.data, self._channels)
            slots |= {f"{prefix}.{n}.weight": p for n, p in zip(_SPLIT_CONV, parts, strict=True)}
        else:
            slots[f"{prefix}.conv1d.weight"] = self.conv.data
        for index, name in enumerate(self._names):
            slots |= self.in_proj.part_slots(index, f"{prefix}.{name}")
        return slots
