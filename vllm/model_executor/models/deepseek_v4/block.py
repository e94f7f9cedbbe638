"""One transformer block: attention and experts, each wrapped by hyper-connections."""

import torch
from torch import nn

from vllm.model_executor.layers.hyper_connections import HyperConnection
from vllm.model_executor.models.deepseek_v4.attention import DeepseekV4Attention
from vllm.model_executor.models.deepseek_v4.config import LayerPlan
from vllm.model_executor.models.deepseek_v4.entries import build_entry_source
from vllm.model_executor.models.deepseek_v4.kv_cache import LayerCacheNames
from vllm.model_executor.models.deepseek_v4.moe import DeepseekV4MoE
from vllm.model_executor.models.deepseek_v4.step import ModelParts, Step


class DeepseekV4Block(nn.Module):
    """Maps residual streams to residual streams.

    Args:
        prefix: Published prefix of its tensors and caches, such as "layers.3" or "mtp.0".
        plan: The layer's kind, ratio and routing.
        parts: What to build from.
    """

    def __init__(self, prefix: str, plan: LayerPlan, parts: ModelParts) -> None:
        super().__init__()
        config, make = parts.config, parts.make
        self._prefix = prefix
        self._eps = config.rms_norm_eps
        names, own_parts = LayerCacheNames.of_block(prefix), parts.within(f"{prefix}.attn")
        entries = build_entry_source(plan, names, own_parts)
        self.attn = DeepseekV4Attention(plan, names, own_parts, entries)
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

    def forward(self, streams: torch.Tensor, step: Step) -> torch.Tensor:
        """Maps [T, n, D] to [T, n, D]; writes the block's caches."""
        x, post, mix = self.attn_hc.read(streams)
        output = self.attn(self._rms_norm(x, self.attn_norm, self._eps), step)
        streams = self.attn_hc.write(output, streams, post, mix)
        x, post, mix = self.ffn_hc.read(streams)
        output = self.ffn(self._rms_norm(x, self.ffn_norm, self._eps), step)
        return self.ffn_hc.write(output, streams, post, mix)

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
