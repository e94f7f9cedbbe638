"""Specs of attention over, or inside, an encoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from vllm.utils.math_utils import cdiv
from vllm.v1.kv_cache_specs.base import AttentionSpec, KVCacheSpecKind

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True, kw_only=True)
class CrossAttentionSpec(AttentionSpec):
    """Attention of a decoder over the encoder's tokens."""

    kind: ClassVar[KVCacheSpecKind] = KVCacheSpecKind.CROSS_ATTENTION

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Return the bytes of the longest encoder input."""
        num_tokens = vllm_config.scheduler_config.max_num_encoder_input_tokens
        return cdiv(num_tokens, self.block_size) * self.page_size_bytes


@dataclass(frozen=True, kw_only=True)
class EncoderOnlyAttentionSpec(AttentionSpec):
    """Attention inside an encoder: nothing outlives the step."""

    kind: ClassVar[KVCacheSpecKind] = KVCacheSpecKind.ENCODER_ONLY_ATTENTION

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Return 0."""
        return 0
