"""A recurrent layer by the delta rule: a state per head in the place of keys and values."""

from abc import abstractmethod

import torch
from typing_extensions import override

from vllm.model_executor.models.decoder.config import GatedDeltaPlan
from vllm.model_executor.models.decoder.kv_cache import STATES
from vllm.model_executor.models.decoder.recurrence import RecurrentNet
from vllm.model_executor.models.decoder.state_pages import StatePages
from vllm.model_executor.models.decoder.step import ModelParts, Step
from vllm.v1.attention.step_tables import RecurrentRows

# Inputs of the convolution [T, C], gates [T, H * V], betas before their sigmoid [T, H], logarithms
# of decays.
Projected = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class DeltaRuleNet(RecurrentNet):
    """The recurrence of one layer, however its inputs are projected.

    What a row does to a state are fp32 tensors: the convolution's inputs [N, C], logarithms of
    decays [N, H] or [N, H, K], rates of writing [N, H].

    Letters: T rows, G heads of queries and keys of K values, H heads of values of V. The state, the
    convolution and the gates are fp32 whatever the weights' type.

    Args:
        index: The layer.
        plan: Its shape.
        parts: What to build from, within the layer's part that mixes tokens.

    Attributes:
        plan: The shape of what this rank has: of several each has its own heads and their states,
            and sums the output.
    """

    def __init__(self, index: int, plan: GatedDeltaPlan, parts: ModelParts) -> None:
        super().__init__(index, parts)
        make, ops, config = parts.make, parts.ops, parts.config
        self.plan = plan = plan.for_ranks(make.group.size)
        self._eps = config.norm.eps
        heads = plan.num_value_heads
        self.conv = make.parameter(plan.num_channels, 1, plan.conv_width, dtype=torch.float32)
        self.a_log = make.parameter(heads, dtype=torch.float32)
        self.dt_bias = make.parameter(plan.num_decays, dtype=torch.float32)
        self.norm = make.parameter(plan.value_dim, dtype=torch.float32)
        self._convolve, self._scan = ops("short_convolution"), ops("gated_delta_scan")
        self._decay_logs, self._gated_norm = ops("decay_logs"), ops("gated_rms_norm")

    @abstractmethod
    def _project(self, x: torch.Tensor) -> Projected:
        """Maps the normed input [T, D] to the parts of ``Projected``."""

    @abstractmethod
    def _map_output(self, normed: torch.Tensor) -> torch.Tensor:
        """Maps gated outputs [T, H * V] to [T, D]."""

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """Maps the normed input [T, D] to the output [T, D]; writes the layer's states.

        The last layer with a cache gives the step's wanted rows alone.
        """
        plan = self.plan
        mixed, gates, betas, logs = self._project(x)
        outputs = self._run_step((mixed.float(), logs, betas.float().sigmoid()), step)
        gates = gates.reshape(len(x), plan.num_value_heads, plan.value_dim)
        normed = self._gated_norm(
            outputs.to(x.dtype), gates, self.norm, self._eps, plan.gate_activation
        )
        if self._narrows and step.wanted is not None:
            normed = normed[step.wanted]
        return self._map_output(normed.flatten(1))

    def _run_step(self, inputs: tuple[torch.Tensor, ...], step: Step) -> torch.Tensor:
        """Takes every request's state through its rows: outputs [T, H, V]."""
        plan, kernels = self.plan, step.meta.state_runner
        channels, logs, rates = inputs
        if kernels is not None:
            return kernels.run_states(
                STATES,
                self._number,
                plan.num_key_heads,
                channels,
                self.conv.squeeze(1),
                logs,
                rates,
            )
        outputs = channels.new_empty(len(channels), plan.num_value_heads, plan.value_dim)
        self._advance(inputs, step, outputs)
        return outputs

    @override
    def _run(
        self, item: RecurrentRows, pages: StatePages, inputs: tuple[torch.Tensor, ...]
    ) -> torch.Tensor:
        plan = self.plan
        state, left = pages.read(item.source)
        channels, logs, rates = inputs
        mixed = self._convolve(channels, left, self.conv.squeeze(1))
        width = plan.num_key_heads * plan.key_dim
        queries, keys, values = torch.split(mixed, [width, width, mixed.shape[1] - 2 * width], -1)
        parts = [
            queries.view(-1, plan.num_key_heads, plan.key_dim),
            keys.view(-1, plan.num_key_heads, plan.key_dim),
            values.view(-1, plan.num_value_heads, plan.value_dim),
            logs,
            rates,
        ]
        joined = torch.cat([left, channels])
        outputs = []
        first = 0
        for store in item.stores:
            outputs.append(self._scan(*(part[first : store.end] for part in parts), state))
            pages.write(store.blocks, state, joined[store.end : store.end + len(left)])
            first = store.end
        if item.num_drafts:
            outputs.append(self._scan(*(part[first:] for part in parts), state))
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]
