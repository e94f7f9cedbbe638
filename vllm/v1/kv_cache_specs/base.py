"""The bases of all specs."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Self

from vllm.v1.kv_cache_specs.records import find_record

if TYPE_CHECKING:
    import torch

    from vllm.config import VllmConfig


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
        record = find_record(type(self))
        assert record is not None, f"Unsupported KV cache spec type {type(self).__name__}."
        base = record.uniform_type_base_spec
        return all(isinstance(spec, base) for spec in kv_cache_specs.values())


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
        return padded_page_bytes(self.real_page_size_bytes, self.page_size_padded)


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
    def real_page_size_bytes(self) -> int:
        """Bytes a block really fills."""
        assert self.head_size_v is not None
        width = self.num_kv_heads * (self.head_size + self.head_size_v)
        return self.block_size * width * self.dtype.itemsize
