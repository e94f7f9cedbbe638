"""Layers of one kind and unequal width in one group."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from vllm.utils.math_utils import cdiv
from vllm.v1.kv_cache_specs.base import KVCacheSpec
from vllm.v1.kv_cache_specs.geometry import GroupGeometry

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True)
class UniformTypeKVCacheSpecs(KVCacheSpec):
    """Layers of one type and block size, but of different widths, that share a block table.

    Attributes:
        kv_cache_specs: Spec by layer name.
    """

    is_composite: ClassVar[bool] = True

    kv_cache_specs: dict[str, KVCacheSpec]

    def __hash__(self) -> int:
        return hash((self.block_size, tuple(sorted(self.kv_cache_specs))))

    def members(self) -> tuple[KVCacheSpec, ...]:
        """Return the specs of the layers."""
        return tuple(self.kv_cache_specs.values())

    def layers(self, names: Iterable[str]) -> dict[str, KVCacheSpec]:
        """Return each layer's own spec."""
        return {name: self.kv_cache_specs[name] for name in names}

    def narrowed(self, names: Sequence[str]) -> KVCacheSpec:
        """Return the spec of some of the layers; a worker without any still knows the blocks."""
        return type(self)(self.block_size, self.layers(names)) if names else self

    @property
    def label(self) -> str:
        """What people call the group: the members are of one kind."""
        return member_spec(self).label

    @property
    def wire_name(self) -> str:
        """A member's: one group may come as one of them."""
        return member_spec(self).wire_name

    def geometry(self, group_id: int, unit: int) -> GroupGeometry:
        """Describe the group: the members differ in width alone."""
        return member_spec(self).geometry(group_id, unit)

    @property
    def window_tokens(self) -> int | None:
        """The common window; None where members have none, or different ones."""
        windows = {spec.window_tokens for spec in self.members()}
        return windows.pop() if len(windows) == 1 else None

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block in all layers together."""
        return sum(spec.page_size_bytes for spec in self.kv_cache_specs.values())

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Return the bytes of the layer that needs most blocks, in all layers."""
        num_blocks = max(
            cdiv(spec.max_memory_usage_bytes(vllm_config), spec.page_size_bytes)
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


def member_spec(spec: KVCacheSpec) -> KVCacheSpec:
    """Return the spec that stands for a group.

    Of unequal page sizes any member's does; of unequal rows that which has most of them, for its
    rows are complete first and the others' are where they are.
    """
    return min(spec.members(), key=lambda member: member.tokens_per_row)
