"""A recurrent layer by the delta rule: a state per head in the place of keys and values."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from vllm.model_executor.models.decoder.config import GatedDeltaPlan
from vllm.model_executor.models.decoder.kv_cache import STATES, state_shape
from vllm.model_executor.models.decoder.state_pages import StatePages
from vllm.model_executor.models.decoder.step import ModelParts, Step
from vllm.v1.attention.step_tables import RecurrentRows

# Inputs of the convolution [T, C], gates [T, H * V], betas before their sigmoid [T, H], logarithms
# of decays.
Projected = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class StateInputs:
    """What some rows of one request do to a state.

    Attributes:
        channels: fp32 [N, C]: inputs of the convolution.
        logs: fp32 [N, H] or [N, H, K]: of decays.
        rates: fp32 [N, H]: of writing.
    """

    channels: torch.Tensor
    logs: torch.Tensor
    rates: torch.Tensor

    def rows(self, rows: slice) -> "StateInputs":
        """Returns what some of the rows do."""
        return StateInputs(self.channels[rows], self.logs[rows], self.rates[rows])


class DeltaRuleNet(nn.Module):
    """The recurrence of one layer, however its inputs are projected.

    Owns: what the last step's drafts would do to the states, until they are settled; kernels that
    read pages keep it themselves.

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
        super().__init__()
        make, ops, config = parts.make, parts.ops, parts.config
        self.plan = plan = plan.for_ranks(make.group.size)
        self._number = sum(layer.recurrence is not None for layer in config.layers[:index])
        self._narrows = index == config.last_owner
        self._shape = state_shape(config.for_ranks(make.group.size))
        self._eps = config.norm.eps
        heads = plan.num_value_heads
        self.conv = make.parameter(plan.num_channels, 1, plan.conv_width, dtype=torch.float32)
        self.a_log = make.parameter(heads, dtype=torch.float32)
        self.dt_bias = make.parameter(plan.num_decays, dtype=torch.float32)
        self.norm = make.parameter(plan.value_dim, dtype=torch.float32)
        self._convolve, self._scan = ops("short_convolution"), ops("gated_delta_scan")
        self._decay_logs, self._gated_norm = ops("decay_logs"), ops("gated_rms_norm")
        self._drafts: list[StateInputs] = []

    @abstractmethod
    def _project(self, x: torch.Tensor) -> Projected:
        """Maps the normed input [T, D] to the parts of ``Projected``."""

    @abstractmethod
    def _map_output(self, normed: torch.Tensor) -> torch.Tensor:
        """Maps gated outputs [T, H * V] to [T, D]."""

    @abstractmethod
    def weight_slots(self, prefix: str) -> dict[str, torch.Tensor]:
        """Returns tensor name -> destination."""

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """Maps the normed input [T, D] to the output [T, D]; writes the layer's states.

        The last layer with a cache gives the step's wanted rows alone.
        """
        plan = self.plan
        mixed, gates, betas, logs = self._project(x)
        channels = mixed.float()
        rates = betas.float().sigmoid()
        own = StateInputs(channels, logs, rates)
        outputs = self._run_step(own, step)
        gates = gates.reshape(len(x), plan.num_value_heads, plan.value_dim)
        normed = self._gated_norm(
            outputs.to(x.dtype), gates, self.norm, self._eps, plan.gate_activation
        )
        if self._narrows and step.wanted is not None:
            normed = normed[step.wanted]
        return self._map_output(normed.flatten(1))

    def _run_step(self, own: StateInputs, step: Step) -> torch.Tensor:
        """Takes every request's state through its rows: outputs [T, H, V]."""
        plan, kernels = self.plan, step.meta.state_runner
        self._drafts = []
        if kernels is not None:
            return kernels.run_states(
                STATES,
                self._number,
                plan.num_key_heads,
                own.channels,
                self.conv.squeeze(1),
                own.logs,
                own.rates,
            )
        pages = StatePages(step.kv_caches[STATES], self._shape, self._number)
        outputs = own.channels.new_empty(len(own.channels), plan.num_value_heads, plan.value_dim)
        for item in step.meta.recurrent[step.meta.group_of[STATES]]:
            inputs = own.rows(item.rows)
            outputs[item.rows] = self._run(item, pages, inputs)
            if item.num_drafts:
                self._drafts.append(inputs.rows(slice(-item.num_drafts, None)))
        return outputs

    def settle_drafts(
        self, settled: Sequence[RecurrentRows | None], kv_caches: Mapping[str, torch.Tensor]
    ) -> None:
        """Stores the states behind the last step's accepted drafts.

        Args:
            settled: For each request of that step that had drafts, what its accepted ones read and
                leave; None: none stands.
            kv_caches: Cache name -> pages.
        """
        pages = StatePages(kv_caches[STATES], self._shape, self._number)
        for item, drafts in zip(settled, self._drafts, strict=True):
            if item is not None:
                self._run(item, pages, drafts.rows(slice(item.rows.stop)))
        self._drafts = []

    def _run(self, item: RecurrentRows, pages: StatePages, own: "StateInputs") -> torch.Tensor:
        """Takes one request's state through its rows; stores it wherever it is to be left."""
        plan = self.plan
        state, left = pages.read(item.source)
        mixed = self._convolve(own.channels, left, self.conv.squeeze(1))
        width = plan.num_key_heads * plan.key_dim
        queries, keys, values = torch.split(mixed, [width, width, mixed.shape[1] - 2 * width], -1)
        parts = [
            queries.view(-1, plan.num_key_heads, plan.key_dim),
            keys.view(-1, plan.num_key_heads, plan.key_dim),
            values.view(-1, plan.num_value_heads, plan.value_dim),
            own.logs,
            own.rates,
        ]
        joined = torch.cat([left, own.channels])
        outputs = []
        first = 0
        for store in item.stores:
            outputs.append(self._scan(*(part[first : store.end] for part in parts), state))
            pages.write(store.blocks, state, joined[store.end : store.end + len(left)])
            first = store.end
        if item.num_drafts:
            outputs.append(self._scan(*(part[first:] for part in parts), state))
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]
