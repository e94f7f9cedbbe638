"""The bases of all specs.

A kind of cache is one class: everything that grouping, page layout, attention, the policy, reports
and other engines ask of it is a method or an attribute here, with the answer of a kind about which
nothing more is known (docs/how-to/cache-kind.md).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Self

from typing_extensions import override

from vllm.exceptions import ConfigError
from vllm.v1.kv_cache_specs.geometry import GroupGeometry
from vllm.v1.kv_cache_specs.layouts import GroupLayout, PageLayout
from vllm.v1.kv_cache_specs.records import find_record

if TYPE_CHECKING:
    import torch

    from vllm.config import VllmConfig


class KVQuantMode(IntEnum):
    """How cached values are quantized; per-tensor scales live outside the pages, others in rows."""

    NONE = 0
    FP8_PER_TENSOR = 1
    INT8_PER_TOKEN_HEAD = 2

    @classmethod
    def of_dtype(cls, dtype: torch.dtype) -> KVQuantMode:
        """Return how keys and values are kept in a type of ``--kv-cache-dtype``."""
        return cls.INT8_PER_TOKEN_HEAD if str(dtype) == "torch.int8" else cls.NONE


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


SCALE_BYTES = 4
"""Of the scale, in fp32, of a head's values in a row of int8."""

# Dense, window or state, tokens per row or of a window, block size, kind: groups are in this order.
PackingKey = tuple[int, int, int, str]


@dataclass(frozen=True)
class KVCacheSpec:
    """Base of all specs.

    Attributes:
        block_size: Tokens that one block of this layer covers.
        kind: As KV events name it.
        keeps_every_token: Whether every token's row is kept as long as its request lives.
        has_checkpoints: Whether a request resumes from a checkpoint of it instead: the last rows,
            or a state.
        is_zeroed: Whether its blocks are zeroed when they are taken: they are read before they are
            first written.
        is_composite: Whether it stands for layers with specs of their own (``members``).
        needs_packed_pool: Whether a model with such a layer has all its caches in one packed pool,
            because block and page sizes cannot be made equal.
    """

    block_size: int

    kind: ClassVar[KVCacheSpecKind] = KVCacheSpecKind.UNKNOWN
    keeps_every_token: ClassVar[bool] = False
    has_checkpoints: ClassVar[bool] = False
    is_zeroed: ClassVar[bool] = False
    is_composite: ClassVar[bool] = False
    needs_packed_pool: ClassVar[bool] = False

    # ---- names -------------------------------------------------------------------------------

    @property
    def label(self) -> str:
        """What people call a group of it: "full attention", "C4 entries"."""
        return self.kind.value.replace("_", " ")

    @property
    def wire_name(self) -> str:
        """What two engines compare before one reads the other's cache."""
        return type(self).__name__

    # ---- what a request needs ----------------------------------------------------------------

    def geometry(self, group_id: int, unit: int) -> GroupGeometry:
        """Describe a group of it for hits at one unit.

        Args:
            group_id: Index of the group.
            unit: Tokens under one prefix hash.

        Raises:
            ConfigError: Its blocks do not fit the unit, or it cannot be cached at one unit.
        """
        del unit
        raise ConfigError(
            f"KV cache group {group_id} ({type(self).__name__}) cannot be cached at one unit."
        )

    @property
    def window_tokens(self) -> int | None:
        """The tokens a token attends to, itself included; None: all, or it is no attention."""
        return None

    @property
    def rebuild_window(self) -> int | None:
        """The window over which a row depends on rows of the layer below; None: it does not.

        A row that can be made again from the dense rows puts off those of the next layer by it.
        """
        return None

    @property
    def serves_drafter(self) -> bool:
        """Whether a drafter fills the rows."""
        return False

    @property
    def tokens_per_row(self) -> int:
        """Tokens that a row stands for."""
        return 1

    # ---- memory ------------------------------------------------------------------------------

    def page_layout(self) -> PageLayout:
        """Return how a worker sees the layer's page.

        Raises:
            ConfigError: It is no page that a worker lays out.
        """
        raise ConfigError(f"a {type(self).__name__} has no page that this worker can lay out")

    def attention_layout(self) -> GroupLayout:
        """Return how attention reads a group of it.

        Raises:
            ConfigError: No attention here reads it.
        """
        raise ConfigError(f"cache spec {type(self).__name__} has no attention here")

    @property
    def row_dtype(self) -> torch.dtype | None:
        """The type of cached rows; None: there are none, or sums that have their own."""
        return None

    # ---- grouping ----------------------------------------------------------------------------

    def packing_key(self) -> PackingKey:
        """Return what caches of one group in a packed pool have in common.

        Raises:
            ConfigError: It cannot share a packed pool.
        """
        raise ConfigError(f"a {type(self).__name__} cannot share a packed pool with other caches")

    def uniform_key(self) -> tuple[Any, ...]:
        """Return what layers of unequal width must have in common to share a block table."""
        return ()

    def with_larger_page(self, factor: int) -> KVCacheSpec:
        """Return a spec whose page is ``factor`` times as large, for more tokens if it can."""
        return self.copy_with_new_block_size(self.block_size * factor)

    def as_full_attention(self) -> KVCacheSpec:
        """Return a spec that keeps every token, for use without the hybrid manager."""
        return self

    def with_key_sizes(self, digest: str) -> KVCacheSpec:
        """Return it with a digest of what keys are divided by, where its rows depend on that."""
        del digest
        return self

    def max_admission_blocks_per_request(
        self, max_num_batched_tokens: int, max_model_len: int
    ) -> int | None:
        """Return the most blocks a request holds at once; None: as many as its tokens have."""
        del max_num_batched_tokens, max_model_len
        return None

    def members(self) -> tuple[KVCacheSpec, ...]:
        """Return the specs of the layers it stands for: itself, unless it is composite."""
        return (self,)

    def layers(self, names: Iterable[str]) -> dict[str, KVCacheSpec]:
        """Return each layer's own spec in a group whose spec this is."""
        return dict.fromkeys(names, self)

    def narrowed(self, names: Sequence[str]) -> KVCacheSpec:
        """Return the spec of the part of a group that has these layers."""
        del names
        return self

    # ---- the interface -----------------------------------------------------------------------

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
        record = find_record(type(self))
        assert record is not None, f"Unsupported KV cache spec type {type(self).__name__}."
        base, key = record.uniform_type_base_spec, self.uniform_key()
        return all(
            isinstance(spec, base) and spec.uniform_key() == key for spec in kv_cache_specs.values()
        )


def padded_page_bytes(real: int, page_size_padded: int | None) -> int:
    """Return the bytes a page is given: the padded size if there is one, at least the real."""
    if page_size_padded is None:
        return real
    assert page_size_padded >= real, (
        f"page_size_padded {page_size_padded} is below the page's {real} bytes."
    )
    return page_size_padded


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(KVCacheSpec):
    """Keys and values of every token in a block.

    Attributes:
        num_kv_heads: Heads per token.
        head_size: Values per head.
        dtype: Of one stored value.
        kv_quant_mode: See KVQuantMode.
        page_size_padded: Bytes to give a page instead of its real size; at least that.
        key_sizes: A digest of what keys are divided by before they are stored; "": nothing.
    """

    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    kv_quant_mode: KVQuantMode = KVQuantMode.NONE
    page_size_padded: int | None = None
    key_sizes: str = ""

    @property
    def real_page_size_bytes(self) -> int:
        """Bytes a block really fills."""
        width = 2 * self.num_kv_heads * self.head_size
        return self.block_size * (width * self.dtype.itemsize + self.scale_bytes)

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales in a token's row: fp32, one of each head's keys and values."""
        has_scales = self.kv_quant_mode is KVQuantMode.INT8_PER_TOKEN_HEAD
        return 2 * self.num_kv_heads * SCALE_BYTES if has_scales else 0

    @override
    def with_key_sizes(self, digest: str) -> KVCacheSpec:
        return replace(self, key_sizes=digest) if self.scale_bytes else self

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block: the padded size if one is given."""
        return padded_page_bytes(self.real_page_size_bytes, self.page_size_padded)

    @property
    def row_dtype(self) -> torch.dtype | None:
        """The type of cached rows."""
        return self.dtype

    def page_layout(self) -> PageLayout:
        """Return ``storage_block_size`` rows, as wide as fills the page with them."""
        rows = self.storage_block_size
        width = self.real_page_size_bytes // (rows * self.dtype.itemsize)
        return PageLayout(rows, width, self.dtype)

    def with_larger_page(self, factor: int) -> KVCacheSpec:
        """Return it with a larger block, padded where a page is not proportional to its block."""
        larger = self.copy_with_new_block_size(self.block_size * factor)
        if larger.page_size_padded is not None:
            return replace(larger, page_size_padded=larger.page_size_padded * factor)
        if larger.page_size_bytes != self.page_size_bytes * factor:
            return replace(larger, page_size_padded=self.page_size_bytes * factor)
        return larger


@dataclass(frozen=True, kw_only=True)
class KeyValueSpec(AttentionSpec):
    """Keys and values that may differ in width.

    Attributes:
        head_size_v: Values per value head; ``head_size`` if not given.
    """

    head_size_v: int | None = None

    def __post_init__(self) -> None:
        if self.head_size_v is None:
            object.__setattr__(self, "head_size_v", self.head_size)

    @property
    @override
    def real_page_size_bytes(self) -> int:
        assert self.head_size_v is not None
        width = self.num_kv_heads * (self.head_size + self.head_size_v)
        return self.block_size * (width * self.dtype.itemsize + self.scale_bytes)


def get_kv_cache_spec_kind(spec: KVCacheSpec) -> KVCacheSpecKind:
    """Return the kind of a spec; UNKNOWN for groups of several kinds."""
    kinds = {member.kind for member in spec.members()}
    return kinds.pop() if len(kinds) == 1 else KVCacheSpecKind.UNKNOWN


def get_kv_cache_spec_sliding_window(spec: KVCacheSpec) -> int | None:
    """Return the window of a sliding-window spec (the common one of a uniform group) or None."""
    return spec.window_tokens
