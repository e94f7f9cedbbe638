"""Layers of one kind and unequal width in one group, and the way back to their own specs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from vllm.utils.math_utils import cdiv
from vllm.v1.kv_cache_specs.base import KVCacheSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig


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


def member_specs(spec: KVCacheSpec) -> tuple[KVCacheSpec, ...]:
    """Return the specs of a group's layers, each once: those of a uniform spec, else the spec."""
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return tuple(spec.kv_cache_specs.values())
    return (spec,)


def member_spec(spec: KVCacheSpec) -> KVCacheSpec:
    """Return the spec that stands for a group: of unequal page sizes, any member's."""
    return member_specs(spec)[0]


def layer_specs(spec: KVCacheSpec, layer_names: Iterable[str]) -> dict[str, KVCacheSpec]:
    """Return each layer's own spec in a group whose spec is ``spec``."""
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return {name: spec.kv_cache_specs[name] for name in layer_names}
    return dict.fromkeys(layer_names, spec)
