"""What a layer keeps in the KV cache (specs), and how a worker lays it out (configs).

Specs are frozen values: they are compared, hashed (grouping uses them as keys), replaced and
deep-copied. Nothing here needs torch at run time; a dtype is only asked for its ``itemsize``.

    KVCacheSpec
    ├── AttentionSpec
    │   ├── FullAttentionSpec        every token
    │   │   ├── TQFullAttentionSpec  quantized slots
    │   │   ├── MLAAttentionSpec     one latent row per ``compress_ratio`` tokens
    │   │   │   └── HiddenStateCacheSpec
    │   │   └── SinkFullAttentionSpec
    │   ├── SlidingWindowSpec        the last ``sliding_window`` tokens
    │   │   └── SlidingWindowMLASpec
    │   │       └── CompressorStateSpec
    │   ├── ChunkedLocalAttentionSpec
    │   ├── CrossAttentionSpec       encoder tokens
    │   └── EncoderOnlyAttentionSpec nothing
    ├── MambaSpec                    a state, not tokens
    └── UniformTypeKVCacheSpecs      layers of one kind with different widths, one block table
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, Self

from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

if TYPE_CHECKING:
    import torch

    from vllm.config import VllmConfig

# Bytes per cached token of the packed fp8 MLA row: 512 fp8 latents, 4 fp32 scales, 64 bf16 rope
# values; DeepSeek-V4's row: 448 fp8 latents, 64 bf16 rope values, 8 bytes of scales.
_FP8_DS_MLA_ROW_BYTES = 656
_FP8_DS_MLA_V4_ROW_BYTES = 584


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


class KVQuantMode(IntEnum):
    """How cached values are quantized; per-tensor scales live outside the pages."""

    NONE = 0
    FP8_PER_TENSOR = 1


@dataclass(frozen=True)
class KVCacheSpec:
    """Base of all specs.

    Attributes:
        block_size: Tokens that one block of this layer covers.
    """

    block_size: int

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of one layer."""
        raise NotImplementedError(f"{type(self).__name__} does not define its page size.")

    @property
    def storage_block_size(self) -> int:
        """Rows that one block stores (fewer than its tokens for compressed layers)."""
        return self.block_size

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Return the most bytes one request of the longest length needs in this layer."""
        raise NotImplementedError(f"{type(self).__name__} does not bound its memory.")

    def copy_with_new_block_size(self, block_size: int) -> Self:
        """Return the same spec with another block size."""
        return replace(self, block_size=block_size)

    @classmethod
    def merge(cls, specs: Sequence[Self]) -> Self:
        """Merge the specs of several layers into the spec of their group.

        Raises:
            AssertionError: They are not all equal.
        """
        assert all(spec == specs[0] for spec in specs[1:]), (
            "All layers in the same KV cache group must be the same."
        )
        return copy.deepcopy(specs[0])

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, KVCacheSpec]) -> bool:
        """Whether all these layers may share one group (and its block table) with this one.

        Raises:
            AssertionError: This spec's type is not registered.
        """
        base = KVCacheSpecRegistry.get_uniform_type_base_spec(self)
        assert base is not None, f"Unsupported KV cache spec type {type(self).__name__}."
        return all(isinstance(spec, base) for spec in kv_cache_specs.values())


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(KVCacheSpec):
    """Keys and values of every token in a block.

    Attributes:
        num_kv_heads: Heads per token.
        head_size: Values per head.
        dtype: Of one stored value.
        kv_quant_mode: See KVQuantMode.
        page_size_padded: Bytes to give a page instead of its real size; at least that.
    """

    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    kv_quant_mode: KVQuantMode = KVQuantMode.NONE
    page_size_padded: int | None = None

    @property
    def real_page_size_bytes(self) -> int:
        """Bytes a block really fills."""
        return 2 * self.block_size * self.num_kv_heads * self.head_size * self.dtype.itemsize

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block: the padded size if one is given."""
        real = self.real_page_size_bytes
        if self.page_size_padded is None:
            return real
        assert self.page_size_padded >= real, (
            f"page_size_padded {self.page_size_padded} is below the page's {real} bytes."
        )
        return self.page_size_padded


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
class FullAttentionSpec(AttentionSpec):
    """Attention over every token.

    Attributes:
        head_size_v: Values per value head; ``head_size`` if not given.
        sliding_window: The window of a layer that is stored as full attention although it has
            one (the hybrid manager is off); the block table then keeps every token.
        attention_chunk_size: Likewise for chunked local attention.
    """

    head_size_v: int | None = None
    sliding_window: int | None = None
    attention_chunk_size: int | None = None

    def __post_init__(self) -> None:
        if self.head_size_v is None:
            object.__setattr__(self, "head_size_v", self.head_size)

    @property
    def real_page_size_bytes(self) -> int:
        """Bytes a block really fills: keys and values may differ in width."""
        assert self.head_size_v is not None
        width = self.num_kv_heads * (self.head_size + self.head_size_v)
        return self.block_size * width * self.dtype.itemsize

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Return the bytes of the longest request; context parallel ranks share its tokens."""
        parallel = vllm_config.parallel_config
        ranks = parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size
        num_tokens = _cdiv(vllm_config.model_config.max_model_len, ranks)
        return _cdiv(num_tokens, self.block_size) * self.page_size_bytes

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


def _mla_page_bytes(spec: MLAAttentionSpec | SlidingWindowMLASpec) -> int:
    """Return the bytes of a page of latent rows: keys and values are the same row."""
    if spec.cache_dtype_str == "fp8_ds_mla":
        is_v4 = spec.model_version == "deepseek_v4"
        return spec.storage_block_size * (
            _FP8_DS_MLA_V4_ROW_BYTES if is_v4 else _FP8_DS_MLA_ROW_BYTES
        )
    row = spec.num_kv_heads * spec.head_size * spec.dtype.itemsize
    return spec.storage_block_size * row


def _aligned_page_bytes(spec: MLAAttentionSpec | SlidingWindowMLASpec, page_bytes: int) -> int:
    """Round a page up to the spec's alignment; an explicit padded size has been applied."""
    if spec.alignment is None or spec.page_size_padded is not None:
        return page_bytes
    return _cdiv(page_bytes, spec.alignment) * spec.alignment


@dataclass(frozen=True, kw_only=True)
class MLAAttentionSpec(FullAttentionSpec):
    """Attention over latent rows, one per ``compress_ratio`` tokens.

    Attributes:
        cache_dtype_str: The cache's own type name; "fp8_ds_mla" is a packed row.
        alignment: Pages are padded to a multiple of this many bytes.
        compress_ratio: Tokens per stored row; divides ``block_size``.
        model_version: "deepseek_v4" has its own packed row.
    """

    cache_dtype_str: str | None = None
    alignment: int | None = None
    compress_ratio: int = 1
    model_version: str | None = None

    @property
    def storage_block_size(self) -> int:
        """Rows that one block stores."""
        return self.block_size // self.compress_ratio

    @property
    def real_page_size_bytes(self) -> int:
        """Bytes a block really fills."""
        return _mla_page_bytes(self)

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block, padded and aligned."""
        return _aligned_page_bytes(self, super().page_size_bytes)


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


@dataclass(frozen=True, kw_only=True)
class SlidingWindowSpec(AttentionSpec):
    """Attention over the last ``sliding_window`` tokens, the current one included."""

    sliding_window: int
    head_size_v: int | None = None

    def __post_init__(self) -> None:
        if self.head_size_v is None:
            object.__setattr__(self, "head_size_v", self.head_size)

    @property
    def real_page_size_bytes(self) -> int:
        """Bytes a block really fills: keys and values may differ in width."""
        assert self.head_size_v is not None
        width = self.num_kv_heads * (self.head_size + self.head_size_v)
        return self.block_size * width * self.dtype.itemsize

    def max_admission_blocks_per_request(
        self, max_num_batched_tokens: int, max_model_len: int
    ) -> int:
        """Return the most blocks a request holds at once.

        While a chunk is computed the window before its first token is held too; one more block
        because the window need not start at a block's first row.
        """
        num_tokens = min(self.sliding_window - 1 + max_num_batched_tokens, max_model_len)
        return _cdiv(num_tokens, self.block_size) + 1

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
class SlidingWindowMLASpec(SlidingWindowSpec):
    """A sliding window over latent rows; extra fields as in MLAAttentionSpec."""

    cache_dtype_str: str | None = None
    alignment: int | None = None
    compress_ratio: int = 1
    model_version: str | None = None

    @property
    def storage_block_size(self) -> int:
        """Rows that one block stores."""
        return self.block_size // self.compress_ratio

    @property
    def real_page_size_bytes(self) -> int:
        """Bytes a block really fills."""
        return _mla_page_bytes(self)

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block, padded and aligned."""
        return _aligned_page_bytes(self, super().page_size_bytes)


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
        return _cdiv(num_tokens, self.block_size)

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


@dataclass(frozen=True, kw_only=True)
class CrossAttentionSpec(AttentionSpec):
    """Attention of a decoder over the encoder's tokens."""

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Return the bytes of the longest encoder input."""
        num_tokens = vllm_config.scheduler_config.max_num_encoder_input_tokens
        return _cdiv(num_tokens, self.block_size) * self.page_size_bytes


@dataclass(frozen=True, kw_only=True)
class EncoderOnlyAttentionSpec(AttentionSpec):
    """Attention inside an encoder: nothing outlives the step."""

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Return 0."""
        return 0


@dataclass(frozen=True)
class MambaSpec(KVCacheSpec):
    """A recurrent state; a block holds one state, whatever its tokens.

    Attributes:
        shapes: Shape of each state tensor.
        dtypes: Their dtypes.
        page_size_padded: Bytes to give a page instead of its real size; at least that.
        mamba_type: The attention backend's name.
        mamba_cache_mode: "none", "align" or "all".
        num_speculative_blocks: Extra states for draft tokens.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    page_size_padded: int | None = None
    mamba_type: str = "mamba2"
    mamba_cache_mode: str = "none"
    num_speculative_blocks: int = 0

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one state."""
        # Not at construction: the control plane is also built with placeholder shapes.
        real = sum(
            math.prod(shape) * dtype.itemsize
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )
        if self.page_size_padded is None:
            return real
        assert self.page_size_padded >= real, (
            f"page_size_padded {self.page_size_padded} is below the page's {real} bytes."
        )
        return self.page_size_padded

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Return the bytes of a request's states in the configured cache mode."""
        mode = vllm_config.cache_config.mamba_cache_mode
        if mode == "all":
            num_states = _cdiv(vllm_config.model_config.max_model_len, self.block_size)
        else:
            # "align" keeps the state of the last boundary beside the running one.
            num_states = 2 if mode == "align" else 1
        return (num_states + self.num_speculative_blocks) * self.page_size_bytes

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, KVCacheSpec]) -> bool:
        """Whether all are states with as many speculative blocks."""
        return super().is_uniform_with_collection(kv_cache_specs) and all(
            isinstance(spec, MambaSpec)
            and spec.num_speculative_blocks == self.num_speculative_blocks
            for spec in kv_cache_specs.values()
        )


@dataclass(frozen=True)
class UniformTypeKVCacheSpecs(KVCacheSpec):
    """Layers of one type and block size, but of different widths, that share a block table.

    Attributes:
        kv_cache_specs: Spec by layer name.
    """

    kv_cache_specs: dict[str, KVCacheSpec]

    def __hash__(self) -> int:
        return hash((self.block_size, tuple(sorted(self.kv_cache_specs))))

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block in all layers together."""
        return sum(spec.page_size_bytes for spec in self.kv_cache_specs.values())

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Return the bytes of the layer that needs most blocks, in all layers."""
        num_blocks = max(
            _cdiv(spec.max_memory_usage_bytes(vllm_config), spec.page_size_bytes)
            for spec in self.kv_cache_specs.values()
        )
        return num_blocks * self.page_size_bytes

    @classmethod
    def is_uniform_type(cls, kv_cache_specs: dict[str, KVCacheSpec]) -> bool:
        """Whether these layers have one block size and one type."""
        specs = list(kv_cache_specs.values())
        if len({spec.block_size for spec in specs}) != 1:
            return False
        return specs[0].is_uniform_with_collection(kv_cache_specs)

    @classmethod
    def from_specs(cls, kv_cache_specs: dict[str, KVCacheSpec]) -> Self | None:
        """Return the common spec of these layers, None if they are not of one type."""
        if not cls.is_uniform_type(kv_cache_specs):
            return None
        block_size = next(iter(kv_cache_specs.values())).block_size
        return cls(block_size=block_size, kv_cache_specs=kv_cache_specs)


class KVCacheSpecKind(StrEnum):
    """The kind of a spec, as KV events name it."""

    FULL_ATTENTION = "full_attention"
    MLA_ATTENTION = "mla_attention"
    SLIDING_WINDOW = "sliding_window"
    SLIDING_WINDOW_MLA = "sliding_window_mla"
    MAMBA = "mamba"
    CHUNKED_LOCAL_ATTENTION = "chunked_local_attention"
    SINK_FULL_ATTENTION = "sink_full_attention"
    ENCODER_ONLY_ATTENTION = "encoder_only_attention"
    CROSS_ATTENTION = "cross_attention"
    UNKNOWN = "unknown"


_KIND_BY_SPEC: dict[type[KVCacheSpec], KVCacheSpecKind] = {
    SinkFullAttentionSpec: KVCacheSpecKind.SINK_FULL_ATTENTION,
    MLAAttentionSpec: KVCacheSpecKind.MLA_ATTENTION,
    FullAttentionSpec: KVCacheSpecKind.FULL_ATTENTION,
    SlidingWindowMLASpec: KVCacheSpecKind.SLIDING_WINDOW_MLA,
    SlidingWindowSpec: KVCacheSpecKind.SLIDING_WINDOW,
    MambaSpec: KVCacheSpecKind.MAMBA,
    ChunkedLocalAttentionSpec: KVCacheSpecKind.CHUNKED_LOCAL_ATTENTION,
    EncoderOnlyAttentionSpec: KVCacheSpecKind.ENCODER_ONLY_ATTENTION,
    CrossAttentionSpec: KVCacheSpecKind.CROSS_ATTENTION,
}


def get_kv_cache_spec_kind(spec: KVCacheSpec) -> KVCacheSpecKind:
    """Return the kind of a spec by its most specific known class; UNKNOWN for mixed groups."""
    if isinstance(spec, UniformTypeKVCacheSpecs):
        kinds = {get_kv_cache_spec_kind(inner) for inner in spec.kv_cache_specs.values()}
        return kinds.pop() if len(kinds) == 1 else KVCacheSpecKind.UNKNOWN
    for base in type(spec).__mro__:
        kind = _KIND_BY_SPEC.get(base)
        if kind is not None:
            return kind
    return KVCacheSpecKind.UNKNOWN


def get_kv_cache_spec_sliding_window(spec: KVCacheSpec) -> int | None:
    """Return the window of a sliding-window spec (the common one of a uniform group) or None."""
    if isinstance(spec, UniformTypeKVCacheSpecs):
        windows = {get_kv_cache_spec_sliding_window(s) for s in spec.kv_cache_specs.values()}
        return windows.pop() if len(windows) == 1 else None
    return spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None


@dataclass
class KVCacheTensor:
    """One allocation of KV-cache memory.

    Attributes:
        size: Bytes.
        shared_by: Layers that use it.
        offsets: Packed pool only: byte offset of each layer's page inside a block's row.
        block_stride: Packed pool only: bytes of a block's row; the tensor is
            ``[num_blocks, block_stride]`` bytes.
    """

    size: int
    shared_by: list[str]
    offsets: dict[str, int] | None = None
    block_stride: int | None = None


@dataclass
class KVCacheGroupSpec:
    """Layers that share one block table.

    Attributes:
        layer_names: Their names.
        kv_cache_spec: The spec of the group.
        is_eagle_group: Whether a drafter's layers are in it.
    """

    layer_names: list[str]
    kv_cache_spec: KVCacheSpec
    is_eagle_group: bool = False


@dataclass
class KVCacheConfig:
    """The KV cache of one worker.

    Attributes:
        num_blocks: Blocks in the pool, the null block included.
        kv_cache_tensors: Their memory.
        kv_cache_groups: Groups, in the order block tables are given.
        prefix_cache_retention_interval: How often window state is kept: "auto", "none", 0 or a
            number of tokens; None: as the environment says.
        prefix_cache_pinned_share: Share of the pool that pinned windows may hold, where pinning is
            on; None: as the environment says.
        hit_unit: Tokens of the smallest reusable prefix; None: hits follow the block sizes.
    """

    num_blocks: int
    kv_cache_tensors: list[KVCacheTensor]
    kv_cache_groups: list[KVCacheGroupSpec]
    prefix_cache_retention_interval: int | str | None = None
    prefix_cache_pinned_share: float | None = None
    hit_unit: int | None = None

    @property
    def has_mamba_layers(self) -> bool:
        """Whether any group keeps recurrent states."""
        return any(_holds_mamba(group.kv_cache_spec) for group in self.kv_cache_groups)

    @property
    def needs_kv_cache_zeroing(self) -> bool:
        """Whether new blocks must be zeroed: a state is read before it is first written."""
        return self.has_mamba_layers


def _holds_mamba(spec: KVCacheSpec) -> bool:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return any(_holds_mamba(inner) for inner in spec.kv_cache_specs.values())
    return isinstance(spec, MambaSpec)
