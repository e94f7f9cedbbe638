"""Specs of attention over, or inside, an encoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.utils.math_utils import cdiv
from vllm.v1.kv_cache_specs.base import AttentionSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True, kw_only=True)
class CrossAttentionSpec(AttentionSpec):
    """Attention of a decoder over the encoder's tokens."""

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Return the bytes of the longest encoder input."""
        num_tokens = vllm_config.scheduler_config.max_num_encoder_input_tokens
        return cdiv(num_tokens, self.block_size) * self.page_size_bytes


@dataclass(frozen=True, kw_only=True)
class EncoderOnlyAttentionSpec(AttentionSpec):
    """Attention inside an encoder: nothing outlives the step."""

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Return 0."""
        return 0
