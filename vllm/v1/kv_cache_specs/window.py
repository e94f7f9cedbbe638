"""Specs of layers that keep the last tokens only."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from vllm.utils.math_utils import cdiv
from vllm.v1.kv_cache_specs.base import (
    AttentionSpec,
    KeyValueSpec,
    KVCacheSpec,
    KVCacheSpecKind,
    PackingKey,
)
from vllm.v1.kv_cache_specs.full import FullAttentionSpec, MLAAttentionSpec
from vllm.v1.kv_cache_specs.geometry import GroupGeometry, check_block_size
from vllm.v1.kv_cache_specs.latent import LatentRowsSpec
from vllm.v1.kv_cache_specs.layouts import GroupLayout

if TYPE_CHECKING:
    import torch

    from vllm.config import VllmConfig

_FullSpec = TypeVar("_FullSpec", bound=FullAttentionSpec)


def _with_fields_of(spec: KVCacheSpec, spec_class: type[_FullSpec]) -> _FullSpec:
    """Build a spec of another class from the fields that both have."""
    names = {field.name for field in fields(spec)} & {field.name for field in fields(spec_class)}
    return spec_class(**{name: getattr(spec, name) for name in names})


@dataclass(frozen=True, kw_only=True)
class SlidingWindowSpec(KeyValueSpec):
    """Attention over the last ``sliding_window`` tokens, the current one included."""

    kind: ClassVar[KVCacheSpecKind] = KVCacheSpecKind.SLIDING_WINDOW
    has_checkpoints: ClassVar[bool] = True

    sliding_window: int

    @property
    def window_tokens(self) -> int | None:
        """The window."""
        return self.sliding_window

    @property
    def rebuild_window(self) -> int | None:
        """The window: a row follows from the layer below's rows in it."""
        return self.sliding_window

    def geometry(self, group_id: int, unit: int) -> GroupGeometry:
        """Describe a group that keeps the rows before the next token's own."""
        check_block_size(group_id, self.block_size, unit, is_window=True)
        return GroupGeometry(group_id, True, self.block_size, keep=self.sliding_window - 1)

    def attention_layout(self) -> GroupLayout:
        """Return keys and values of a window."""
        return GroupLayout("keys", self.block_size, self.block_size, window=self.sliding_window)

    def packing_key(self) -> PackingKey:
        """Return its place among the window groups."""
        return (1, self.sliding_window, self.block_size, self.kind)

    def uniform_key(self) -> tuple[Any, ...]:
        """Return the window."""
        return ("window", self.sliding_window)

    def as_full_attention(self) -> KVCacheSpec:
        """Return keys and values of every token; attention still masks by the window."""
        return _with_fields_of(self, FullAttentionSpec)

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


@dataclass(frozen=True, kw_only=True)
class SlidingWindowMLASpec(LatentRowsSpec, SlidingWindowSpec):
    """A sliding window over latent rows."""

    kind: ClassVar[KVCacheSpecKind] = KVCacheSpecKind.SLIDING_WINDOW_MLA
    needs_packed_pool: ClassVar[bool] = True

    def packing_key(self) -> PackingKey:
        """Return its place among the window groups, those of its section."""
        return (1, self.sliding_window, self.block_size, f"{self.kind} {self.section}")

    def geometry(self, group_id: int, unit: int) -> GroupGeometry:
        """Describe a window, of layers that may leave rows out."""
        return replace(super().geometry(group_id, unit), lazy_reach=self.lazy_reach)

    def attention_layout(self) -> GroupLayout:
        """Return latent rows of a window."""
        return GroupLayout("window", self.block_size, self.block_size, window=self.sliding_window)

    def as_full_attention(self) -> KVCacheSpec:
        """Return latent rows of every token."""
        return _with_fields_of(self, MLAAttentionSpec)


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

    @property
    def label(self) -> str:
        """What people call a group of it: "C128 state"."""
        return f"C{self.state_ratio} state"

    @property
    def wire_name(self) -> str:
        """Its class and ratio: the block size alone does not tell them apart."""
        return f"{super().wire_name}({self.state_ratio})"

    @property
    def rebuild_window(self) -> int | None:
        """None: a row is a sum over the layer's own input at its token."""
        return None

    @property
    def row_dtype(self) -> torch.dtype | None:
        """None: sums have a type of their own, whatever that of cached rows."""
        return None

    def geometry(self, group_id: int, unit: int) -> GroupGeometry:
        """Describe a group that keeps the rows of the compressed row which is still open."""
        check_block_size(group_id, self.block_size, unit, is_window=True)
        keep = self.state_ratio if self.state_overlap else 0
        return GroupGeometry(group_id, True, self.block_size, align=self.state_ratio, keep=keep)

    def attention_layout(self) -> GroupLayout:
        """Return open compressor rows."""
        return GroupLayout(
            "state",
            self.block_size,
            self.block_size,
            ratio=self.state_ratio,
            has_overlap=self.state_overlap,
        )

    def packing_key(self) -> PackingKey:
        """Return its place behind the window groups."""
        return (2, self.state_ratio, self.block_size, f"overlap {int(self.state_overlap)}")

    def uniform_key(self) -> tuple[Any, ...]:
        """Return the compressor's shape."""
        return ("state", self.state_ratio, self.state_overlap)


@dataclass(frozen=True, kw_only=True)
class ChunkedLocalAttentionSpec(AttentionSpec):
    """Attention within aligned chunks of ``attention_chunk_size`` tokens."""

    kind: ClassVar[KVCacheSpecKind] = KVCacheSpecKind.CHUNKED_LOCAL_ATTENTION

    attention_chunk_size: int

    def uniform_key(self) -> tuple[Any, ...]:
        """Return the chunk size."""
        return ("chunk", self.attention_chunk_size)

    def as_full_attention(self) -> KVCacheSpec:
        """Return keys and values of every token; attention still masks by the chunk."""
        return _with_fields_of(self, FullAttentionSpec)

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
