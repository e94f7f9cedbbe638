"""Specs of layers that keep the last tokens only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.utils.math_utils import cdiv
from vllm.v1.kv_cache_specs.base import AttentionSpec, KeyValueSpec, KVCacheSpec
from vllm.v1.kv_cache_specs.latent import LatentRowsSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True, kw_only=True)
class SlidingWindowSpec(KeyValueSpec):
    """Attention over the last ``sliding_window`` tokens, the current one included."""

    sliding_window: int

    def max_admission_blocks_per_request(
        self, max_num_batched_tokens: int, max_model_len: int
    ) -> int:
        """Return the most blocks a request holds at once.

        While a chunk is computed the window before its first token is held too; one more block
        because the window need not start at a block's first row.
        """
        num_tokens = min(self.sliding_window - 1 + max_num_batched_tokens, max_model_len)
        return cdiv(num_tokens, self.block_size) + 1

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Return the admission bound in bytes."""
        num_blocks = self.max_admission_blocks_per_request(
            vllm_config.scheduler_config.max_num_batched_tokens,
            vllm_config.model_config.max_model_len,
        )
        return num_blocks * self.page_size_bytes

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, KVCacheSpec]) -> bool:
        """Whether all are window layers of one window."""
        return super().is_uniform_with_collection(kv_cache_specs) and all(
            isinstance(spec, SlidingWindowSpec) and spec.sliding_window == self.sliding_window
            for spec in kv_cache_specs.values()
        )


@dataclass(frozen=True, kw_only=True)
class SlidingWindowMLASpec(LatentRowsSpec, SlidingWindowSpec):
    """A sliding window over latent rows."""


@dataclass(frozen=True, kw_only=True)
class CompressorStateSpec(SlidingWindowMLASpec):
    """State rows of a compressor that has not closed its window yet, one row per token.

    Attributes:
        state_ratio: Tokens that one compressed row stands for.
        state_overlap: Whether a compressed row also reads the window before its own.
    """

    state_ratio: int
    state_overlap: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        expected = self.state_ratio * (2 if self.state_overlap else 1)
        assert self.sliding_window == expected, (
            f"A compressor state of ratio {self.state_ratio} (overlap={self.state_overlap}) needs "
            f"a window of {expected} rows, got {self.sliding_window}."
        )

    @property
    def real_page_size_bytes(self) -> int:
        """Bytes a block really fills: rows are not per head."""
        return self.block_size * self.head_size * self.dtype.itemsize

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, KVCacheSpec]) -> bool:
        """Whether all are states of the same compressor shape."""
        return super().is_uniform_with_collection(kv_cache_specs) and all(
            isinstance(spec, CompressorStateSpec)
            and (spec.state_ratio, spec.state_overlap) == (self.state_ratio, self.state_overlap)
            for spec in kv_cache_specs.values()
        )


@dataclass(frozen=True, kw_only=True)
class ChunkedLocalAttentionSpec(AttentionSpec):
    """Attention within aligned chunks of ``attention_chunk_size`` tokens."""

    attention_chunk_size: int

    def max_admission_blocks_per_request(
        self, max_num_batched_tokens: int, max_model_len: int
    ) -> int:
        """Return the most blocks a request holds at once: its chunk and the step's tokens."""
        num_tokens = min(self.attention_chunk_size + max_num_batched_tokens, max_model_len)
        return cdiv(num_tokens, self.block_size)

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Return the admission bound in bytes."""
        num_blocks = self.max_admission_blocks_per_request(
            vllm_config.scheduler_config.max_num_batched_tokens,
            vllm_config.model_config.max_model_len,
        )
        return num_blocks * self.page_size_bytes

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, KVCacheSpec]) -> bool:
        """Whether all are chunked layers of one chunk size."""
        return super().is_uniform_with_collection(kv_cache_specs) and all(
            isinstance(spec, ChunkedLocalAttentionSpec)
            and spec.attention_chunk_size == self.attention_chunk_size
            for spec in kv_cache_specs.values()
        )
