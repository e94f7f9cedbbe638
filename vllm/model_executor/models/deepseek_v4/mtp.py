"""The multi-token-prediction block: drafts the token after the next one."""

import torch
from torch import nn

from vllm.model_executor.layers.hyper_connections import HyperHead
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.models.deepseek_v4.block import DeepseekV4Block
from vllm.model_executor.models.deepseek_v4.config import LayerPlan
from vllm.model_executor.models.deepseek_v4.step import ModelParts, Step


class DeepseekV4MTP(nn.Module):
    """A window-only block over the main model's last streams and the next token's embedding."""

    def __init__(self, parts: ModelParts) -> None:
        super().__init__()
        config, make = parts.config, parts.make.within("mtp.0")
        self._eps = config.rms_norm_eps
        self.block = DeepseekV4Block("mtp.0", LayerPlan("window", 0, hash_routed=False), parts)
        width = config.hidden_size
        self.e_proj = ReplicatedLinear(width, (width,), make, ("e_proj",))
        self.h_proj = ReplicatedLinear(width, (width,), make, ("h_proj",))
        self.enorm = make.parameter(config.hidden_size)
        self.hnorm = make.parameter(config.hidden_size)
        self.norm = make.parameter(config.hidden_size)
        self.hc_head = HyperHead(
            config.hc_mult,
            config.hidden_size,
            config.rms_norm_eps,
            config.hc_eps,
            parts.ops,
            make,
        )
        self._rms_norm = parts.ops("rms_norm")

    def forward(
        self, streams: torch.Tensor, next_embeddings: torch.Tensor, step: Step
    ) -> torch.Tensor:
        """Runs the block at positions t.

        Args:
            streams: [T, n, D] of positions t: the main model's, or this block's for later drafts.
            next_embeddings: [T, D] of the tokens at t + 1.
            step: The step of positions t.

        Returns:
            The block's streams [T, n, D].
        """
        embedded = self.e_proj(self._rms_norm(next_embeddings, self.enorm, self._eps))
        normed = self._rms_norm(streams, self.hnorm, self._eps)
        hidden = self.h_proj(normed.flatten(0, 1)).view_as(streams)
        mixed: torch.Tensor = self.block(hidden + embedded.unsqueeze(1), step)
        return mixed

    def collapse(self, streams: torch.Tensor) -> torch.Tensor:
        """Maps [M, n, D] to the normed hidden states [M, D] of the token at t + 2."""
        normed: torch.Tensor = self._rms_norm(self.hc_head(streams), self.norm, self._eps)
        return normed

    def weight_slots(self) -> dict[str, torch.Tensor]:
        """Returns published tensor name -> destination."""
        return {
            **self.block.weight_slots(),
            **self.e_proj.part_slots(0, "mtp.0.e_proj"),
            **self.h_proj.part_slots(0, "mtp.0.h_proj"),
            "mtp.0.enorm.weight": self.enorm.data,
            "mtp.0.hnorm.weight": self.hnorm.data,
            "mtp.0.norm.weight": self.norm.data,
            **self.hc_head.weight_slots("mtp.0.hc_head"),
        }
