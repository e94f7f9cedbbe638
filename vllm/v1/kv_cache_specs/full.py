"""Specs of layers that keep every token."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, ClassVar, Self

from typing_extensions import override

from vllm.exceptions import ConfigError
from vllm.utils.math_utils import cdiv
from vllm.v1.kv_cache_specs.base import KeyValueSpec, KVCacheSpec, KVCacheSpecKind, PackingKey
from vllm.v1.kv_cache_specs.geometry import GroupGeometry, check_block_size
from vllm.v1.kv_cache_specs.latent import LatentRowsSpec
from vllm.v1.kv_cache_specs.layouts import GroupLayout

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

    kind: ClassVar[KVCacheSpecKind] = KVCacheSpecKind.FULL_ATTENTION
    keeps_every_token: ClassVar[bool] = True

    sliding_window: int | None = None
    attention_chunk_size: int | None = None

    def geometry(self, group_id: int, unit: int) -> GroupGeometry:
        """Describe a group that keeps every row."""
        check_block_size(group_id, self.block_size, unit, is_window=False)
        return GroupGeometry(group_id, False, self.block_size)

    def attention_layout(self) -> GroupLayout:
        """Return keys and values of every token.

        Raises:
            ConfigError: Some layers have windows, which attention does not know here.
        """
        if self.sliding_window is not None:
            # Such a group mixes layers with and without the window.
            raise ConfigError(
                "window layers are stored as full attention, which has no attention here: leave "
                "the hybrid KV cache manager on"
            )
        return GroupLayout("keys", self.block_size, self.block_size)

    def packing_key(self) -> PackingKey:
        """Return its place among the dense groups."""
        return (0, 1, self.block_size, self.kind)

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
    @override
    def real_page_size_bytes(self) -> int:
        if self.tq_slot_size > 0:
            return self.block_size * self.num_kv_heads * self.tq_slot_size
        return super().real_page_size_bytes


@dataclass(frozen=True, kw_only=True)
class MLAAttentionSpec(LatentRowsSpec, FullAttentionSpec):
    """Attention over latent rows of every token.

    Attributes:
        mixes_ratios: Whether it shares a group with caches of other ratios, where blocks cover the
            same tokens: none of them then fills a block alone.
    """

    kind: ClassVar[KVCacheSpecKind] = KVCacheSpecKind.MLA_ATTENTION

    mixes_ratios: bool = False

    @property
    def label(self) -> str:
        """What people call a group of it: "C4 entries" where a row stands for four tokens."""
        return f"C{self.compress_ratio} entries" if self.compress_ratio > 1 else super().label

    def geometry(self, group_id: int, unit: int) -> GroupGeometry:
        """Describe a group with a row per ``compress_ratio`` tokens."""
        check_block_size(group_id, self.block_size, unit, is_window=False)
        return GroupGeometry(group_id, False, self.block_size, ratio=self.compress_ratio)

    def attention_layout(self) -> GroupLayout:
        """Return compressed entries."""
        rows = self.storage_block_size
        return GroupLayout("dense", self.block_size, rows, ratio=self.compress_ratio)

    def packing_key(self) -> PackingKey:
        """Return its place among the dense groups, by ratio unless it is with others'."""
        return (0, 0 if self.mixes_ratios else self.compress_ratio, self.block_size, self.kind)


@dataclass(frozen=True, kw_only=True)
class HiddenStateCacheSpec(MLAAttentionSpec):
    """Hidden states kept in the pages of the KV cache; marks them for their consumer."""


@dataclass(frozen=True, kw_only=True)
class SinkFullAttentionSpec(FullAttentionSpec):
    """Full attention with learned sink tokens in front.

    Attributes:
        sink_len: Sink tokens stored once for all requests.
    """

    kind: ClassVar[KVCacheSpecKind] = KVCacheSpecKind.SINK_FULL_ATTENTION

    sink_len: int | None = None

    def geometry(self, group_id: int, unit: int) -> GroupGeometry:
        """Refuse: sink tokens stand in blocks of their own, which no prefix hash covers."""
        return KVCacheSpec.geometry(self, group_id, unit)

    def attention_layout(self) -> GroupLayout:
        """Refuse: no attention here reads sinks from blocks."""
        return KVCacheSpec.attention_layout(self)

    def packing_key(self) -> PackingKey:
        """Refuse, as ``geometry`` does."""
        return KVCacheSpec.packing_key(self)
