"""A gated short convolution in the place of attention (LFM2).

    b, c, x = parts of the input's projection;    output = projection of c * conv(b * x)

The convolution is causal and takes every channel by itself. Source: the releases' config.json.
"""

import torch
from typing_extensions import override

from vllm.exceptions import ConfigError
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.models.decoder.config import ShortConvolutionPlan
from vllm.model_executor.models.decoder.recurrence import Inputs, RecurrentNet
from vllm.model_executor.models.decoder.state_pages import StatePages
from vllm.model_executor.models.decoder.step import ModelParts, Step
from vllm.v1.attention.step_tables import RecurrentRows


class ShortConvolution(RecurrentNet):
    """The convolution of one layer; it and what gates it are fp32 whatever the weights' type.

    Args:
        index: The layer.
        plan: Its shape.
        parts: What to build from, within the layer's ``conv``.

    Raises:
        ConfigError: It is to be built on another device than a CPU.
    """

    def __init__(self, index: int, plan: ShortConvolutionPlan, parts: ModelParts) -> None:
        super().__init__(index, parts)
        make, hidden = parts.make, parts.config.hidden_size
        if make.device.type != "cpu":
            raise ConfigError(
                f"LFM2's short convolutions run on a CPU, not on {make.device}: use the CPU "
                "platform (VLLM_TARGET_DEVICE=cpu)."
            )
        self.plan = plan
        self.in_proj = ReplicatedLinear(hidden, (3 * plan.num_channels,), make, ("in_proj",))
        self.conv = make.parameter(plan.num_channels, 1, plan.conv_width, dtype=torch.float32)
        self.output = ReplicatedLinear(plan.num_channels, (hidden,), make, ("out_proj",))
        self._convolve = parts.ops("causal_convolution")

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """Maps the normed input [T, D] to the output [T, D]; writes the layer's states.

        The last layer with a cache gives the step's wanted rows alone.
        """
        before, after, values = self.in_proj(x).float().chunk(3, -1)
        channels = before * values
        mixed = torch.empty_like(channels)
        self._advance((channels,), step, mixed)
        mixed = after * mixed
        if self._narrows and step.wanted is not None:
            mixed = mixed[step.wanted]
        output: torch.Tensor = self.output(mixed.to(x.dtype))
        return output

    @override
    def _run(self, item: RecurrentRows, pages: StatePages, inputs: Inputs) -> torch.Tensor:
        (channels,) = inputs
        state, left = pages.read(item.source)
        joined = torch.cat([left, channels])
        for store in item.stores:
            pages.write(store.blocks, state, joined[store.end : store.end + len(left)])
        mixed: torch.Tensor = self._convolve(channels, left, self.conv.squeeze(1))
        return mixed

    @override
    def weight_slots(self, prefix: str) -> dict[str, torch.Tensor]:
        return {
            **self.in_proj.part_slots(0, f"{prefix}.in_proj"),
            f"{prefix}.conv.weight": self.conv.data,
            **self.output.part_slots(0, f"{prefix}.out_proj"),
        }
