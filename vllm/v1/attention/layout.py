"""What the attention layers must know of the cache groups, resolved once from KVCacheConfig."""

from collections.abc import Mapping
from dataclasses import dataclass

from vllm.exceptions import ConfigError
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.kv_cache_specs.layouts import GroupKind, GroupLayout

__all__ = ["CacheLayout", "GroupKind", "GroupLayout"]


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The groups of a model's caches.

    Attributes:
        groups: Geometry by group id, the order of ``RequestSlice.tables``.
        group_of: Cache name (as in ``kv_caches``) -> group id.
    """

    groups: tuple[GroupLayout, ...]
    group_of: Mapping[str, int]

    @classmethod
    def from_kv_cache_config(cls, kv_cache_config: KVCacheConfig) -> "CacheLayout":
        """Reads the groups of a built KVCacheConfig.

        Raises:
            ConfigError: A group holds a cache kind that this attention does not know.
        """
        groups = []
        group_of = {}
        for group_id, group in enumerate(kv_cache_config.kv_cache_groups):
            groups.append(_read_group(group.kv_cache_spec))
            group_of.update(dict.fromkeys(group.layer_names, group_id))
        return cls(tuple(groups), group_of)


def _read_group(spec: KVCacheSpec) -> GroupLayout:
    layouts = {member.attention_layout() for member in spec.members()}
    if len(layouts) != 1:
        raise ConfigError(f"a KV group mixes cache geometries: {sorted(map(str, layouts))}")
    return layouts.pop()
