"""What the attention layers must know of the cache groups, resolved once from KVCacheConfig."""

from collections.abc import Mapping
from dataclasses import dataclass

from vllm.exceptions import ConfigError
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_cache_specs.layouts import GroupKind, GroupLayout

__all__ = ["CacheLayout", "GroupKind", "GroupLayout"]


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The groups of a model's caches.

    A KV group of several geometries, entries of different ratios or keys beside entries, is a group
    for each of them here: the first in its place, the others behind all KV groups.

    Attributes:
        groups: Geometry by group id.
        group_of: Cache name (as in ``kv_caches``) -> group id.
        tables: KV group by group id, the order of ``RequestSlice.tables``; empty: the same numbers.
    """

    groups: tuple[GroupLayout, ...]
    group_of: Mapping[str, int]
    tables: tuple[int, ...] = ()

    def find_table(self, group_id: int) -> int:
        """Returns the KV group that addresses a group's caches."""
        return self.tables[group_id] if self.tables else group_id

    @classmethod
    def from_kv_cache_config(cls, kv_cache_config: KVCacheConfig) -> "CacheLayout":
        """Reads the groups of a built KVCacheConfig.

        Raises:
            ConfigError: A group holds a cache kind that this attention does not know.
        """
        groups: list[GroupLayout] = []
        others: list[GroupLayout] = []
        tables = list(range(len(kv_cache_config.kv_cache_groups)))
        group_of: dict[str, int] = {}
        for table_id, group in enumerate(kv_cache_config.kv_cache_groups):
            by_name = {
                name: spec.attention_layout() for name, spec in group.layer_specs().items()
            } or {"": group.kv_cache_spec.members()[0].attention_layout()}
            layouts = list(dict.fromkeys(by_name.values()))
            if len(layouts) > 1 and any(own.kind not in ("dense", "keys") for own in layouts):
                raise ConfigError(f"a KV group mixes cache geometries: {sorted(map(str, layouts))}")
            groups.append(layouts[0])
            ids = {layouts[0]: table_id}
            for own in layouts[1:]:
                ids[own] = len(tables)
                tables.append(table_id)
                others.append(own)
            group_of.update({name: ids[own] for name, own in by_name.items() if name})
        is_same = not others
        return cls((*groups, *others), group_of, () if is_same else tuple(tables))
