"""What the attention layers must know of the cache groups, resolved once from KVCacheConfig."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from vllm.exceptions import ConfigError
from vllm.v1.kv_cache_interface import (
    CompressorStateSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    member_specs,
)

GroupKind = Literal["window", "state", "dense", "keys"]


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """Geometry of one KV group.

    Attributes:
        kind: "window" (the last tokens' latent rows), "state" (open compressor rows), "dense"
            (compressed entries, kept forever) or "keys" (keys and values of every token, or of a
            window's).
        block_size: Tokens one block covers.
        rows_per_block: Rows one block stores.
        ratio: Tokens per compressed entry; 1 for "window" and "keys".
        window: Tokens attended, the query's own included; 0: all, or another kind.
        has_overlap: A "state" group whose entries also read the window before theirs.
    """

    kind: GroupKind
    block_size: int
    rows_per_block: int
    ratio: int = 1
    window: int = 0
    has_overlap: bool = False


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
    layouts = {_read_layer(member) for member in member_specs(spec)}
    if len(layouts) != 1:
        raise ConfigError(f"a KV group mixes cache geometries: {sorted(map(str, layouts))}")
    return layouts.pop()


def _read_layer(spec: KVCacheSpec) -> GroupLayout:
    # The state spec first: it is a sliding-window spec too.
    if isinstance(spec, CompressorStateSpec):
        return GroupLayout(
            "state",
            spec.block_size,
            spec.block_size,
            ratio=spec.state_ratio,
            has_overlap=spec.state_overlap,
        )
    if isinstance(spec, SlidingWindowMLASpec):
        return GroupLayout("window", spec.block_size, spec.block_size, window=spec.sliding_window)
    if isinstance(spec, MLAAttentionSpec):
        return GroupLayout(
            "dense", spec.block_size, spec.storage_block_size, ratio=spec.compress_ratio
        )
    if isinstance(spec, SlidingWindowSpec):
        return GroupLayout("keys", spec.block_size, spec.block_size, window=spec.sliding_window)
    if isinstance(spec, FullAttentionSpec) and not isinstance(spec, SinkFullAttentionSpec):
        if spec.sliding_window is not None:
            # Such a group mixes layers with and without the window.
            raise ConfigError(
                "window layers are stored as full attention, which has no attention here: leave "
                "the hybrid KV cache manager on"
            )
        return GroupLayout("keys", spec.block_size, spec.block_size)
    raise ConfigError(
        f"cache spec {type(spec).__name__} has no attention here; known: SlidingWindowMLASpec, "
        "MLAAttentionSpec, CompressorStateSpec, SlidingWindowSpec, FullAttentionSpec"
    )
