"""Specs of layers that keep every token."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Self

from vllm.utils.math_utils import cdiv
from vllm.v1.kv_cache_specs.base import KeyValueSpec, KVCacheSpec
from vllm.v1.kv_cache_specs.latent import LatentRowsSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def _assert_same_fields(specs: Sequence[KVCacheSpec], names: Sequence[str]) -> None:
    first = specs[0]
    for name in names:
        assert all(getattr(spec, name) == getattr(first, name) for spec in specs[1:]), (
            f"All layers in the same KV cache group must have the same {name}."
        )


def _merge_optional(values: set[int | None], what: str) -> int | None:
    """Return the one value that is not None (None if there is none)."""
    present = values - {None}
    if len(present) > 1:
        raise ValueError(
            f"All layers in the same KV cache group must have the same {what}, got "
            f"{sorted(v for v in present if v is not None)}."
        )
    return next(iter(present), None)


@dataclass(frozen=True, kw_only=True)
class FullAttentionSpec(KeyValueSpec):
    """Attention over every token.

    Attributes:
        sliding_window: The window of a layer that is stored as full attention although it has
            one (the hybrid manager is off); the block table then keeps every token.
        attention_chunk_size: Likewise for chunked local attention.
    """

    sliding_window: int | None = None
    attention_chunk_size: int | None = None

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Return the bytes of the longest request; context parallel ranks share its tokens."""
        parallel = vllm_config.parallel_config
        ranks = parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size
        num_tokens = cdiv(vllm_config.model_config.max_model_len, ranks)
        return cdiv(num_tokens, self.block_size) * self.page_size_bytes

    @classmethod
    def merge(cls, specs: Sequence[Self]) -> Self:
        """Merge layers that differ at most in having the group's window (or chunk) or none.

        Raises:
            AssertionError: Another spec type, or a different shape.
            ValueError: Two different windows or chunk sizes.
        """
        first = specs[0]
        assert all(type(spec) is type(first) for spec in specs), (
            "All attention layers in the same KV cache group must be of the same spec type, got "
            f"{sorted({type(spec).__name__ for spec in specs})}."
        )
        optional = ("sliding_window", "attention_chunk_size")
        _assert_same_fields(specs, [f.name for f in fields(first) if f.name not in optional])
        window = _merge_optional({spec.sliding_window for spec in specs}, "window size")
        chunk = _merge_optional({spec.attention_chunk_size for spec in specs}, "chunk size")
        assert window is None or chunk is None, (
            "Sliding window and chunked local attention layers cannot share a KV cache group."
        )
        return replace(copy.deepcopy(first), sliding_window=window, attention_chunk_size=chunk)


@dataclass(frozen=True, kw_only=True)
class TQFullAttentionSpec(FullAttentionSpec):
    """Full attention whose keys and values are packed into quantized slots.

    Attributes:
        tq_slot_size: Bytes of one token's slot in one head; 0: stored unpacked.
    """

    tq_slot_size: int = 0

    @property
    def real_page_size_bytes(self) -> int:
        """Bytes a block really fills."""
        if self.tq_slot_size > 0:
            return self.block_size * self.num_kv_heads * self.tq_slot_size
        return super().real_page_size_bytes


@dataclass(frozen=True, kw_only=True)
class MLAAttentionSpec(LatentRowsSpec, FullAttentionSpec):
    """Attention over latent rows of every token."""


@dataclass(frozen=True, kw_only=True)
class HiddenStateCacheSpec(MLAAttentionSpec):
    """Hidden states kept in the pages of the KV cache; marks them for their consumer."""


@dataclass(frozen=True, kw_only=True)
class SinkFullAttentionSpec(FullAttentionSpec):
    """Full attention with learned sink tokens in front.

    Attributes:
        sink_len: Sink tokens stored once for all requests.
    """

    sink_len: int | None = None
