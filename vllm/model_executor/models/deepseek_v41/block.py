"""One transformer block, whose sublayers read the streams by the gates of the one before."""

import torch
from torch import nn

from vllm.model_executor.layers.hyper_connections import HyperConnection
from vllm.model_executor.models.causal_lm import PartsOf
from vllm.model_executor.models.deepseek_v4.attention import DeepseekV4Attention
from vllm.model_executor.models.deepseek_v4.kv_cache import LayerCacheNames
from vllm.model_executor.models.deepseek_v4.moe import DeepseekV4MoE
from vllm.model_executor.models.deepseek_v4.step import Step
from vllm.model_executor.models.deepseek_v41.config import DeepseekV41Config
from vllm.model_executor.models.deepseek_v41.entries import build_shared_source


class DeepseekV41Block(nn.Module):
    """Maps residual streams, and the weights to read them by, to the same.

    Args:
        layer: Which layer it is.
        parts: What to build from.
    """

    def __init__(self, layer: int, parts: PartsOf[DeepseekV41Config]) -> None:
        super().__init__()
        config, make = parts.config, parts.make
        self._prefix = prefix = f"layers.{layer}"
        self._eps = config.rms_norm_eps
        plan = config.layers[layer]
        within = parts.within(f"{prefix}.attn")
        self.attn = DeepseekV4Attention(
            plan,
            LayerCacheNames.of_block(prefix),
            within,
            build_shared_source(layer, plan, within),
        )
        self.ffn = DeepseekV4MoE(plan.hash_routed, parts.within(f"{prefix}.ffn"))
        self.attn_norm = make.parameter(config.hidden_size)
        self.ffn_norm = make.parameter(config.hidden_size)
        self.attn_hc, self.ffn_hc = (
            HyperConnection(
                config.hc_mult,
                config.hidden_size,
                config.rms_norm_eps,
                config.hc_eps,
                config.hc_sinkhorn_iters,
                parts.ops,
                make,
            )
            for _ in range(2)
        )
        self._rms_norm = parts.ops("rms_norm")

    def forward(
        self, streams: torch.Tensor, weights: torch.Tensor, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Maps streams [T, n, D] and the weights [T, n] to read them by; writes the caches."""
        own, post, mix = self.attn_hc.weigh(streams)
        x = self._rms_norm(self.attn_hc.collapse(streams, weights), self.attn_norm, self._eps)
        streams = self.attn_hc.write(self.attn(x, step), streams, post, mix)
        last, post, mix = self.ffn_hc.weigh(streams)
        x = self._rms_norm(self.ffn_hc.collapse(streams, own), self.ffn_norm, self._eps)
        return self.ffn_hc.write(self.ffn(x, step), streams, post, mix), last

    def store_entries(self, streams: torch.Tensor, weights: torch.Tensor, step: Step) -> None:
        """Writes the entries of a layer that makes some, and leaves the rest of it."""
        x = self._rms_norm(self.attn_hc.collapse(streams, weights), self.attn_norm, self._eps)
        self.attn.store_entries(x, step)

    def blank_window(self, step: Step) -> None:
        """Writes zeros where the layer's window rows of a step would be, of which none is read."""
        self.attn.blank_window(step)

    def weight_slots(self) -> dict[str, torch.Tensor]:
        """Returns published tensor name -> destination."""
        prefix = self._prefix
        return {
            f"{prefix}.attn_norm.weight": self.attn_norm.data,
            f"{prefix}.ffn_norm.weight": self.ffn_norm.data,
            **self.attn_hc.weight_slots(f"{prefix}.hc_attn"),
            **self.ffn_hc.weight_slots(f"{prefix}.hc_ffn"),
            **self.attn.weight_slots(f"{prefix}.attn"),
            **self.ffn.weight_slots(f"{prefix}.ffn"),
        }
