"""What a layer keeps in the KV cache (specs), and how a worker lays it out (configs).

Specs are frozen values: they are compared, hashed (grouping uses them as keys), replaced and
deep-copied. Nothing here needs torch at run time; a dtype is only asked for its ``itemsize``.

    KVCacheSpec
    ├── AttentionSpec
    │   ├── FullAttentionSpec        every token
    │   │   ├── TQFullAttentionSpec  quantized slots
    │   │   ├── MLAAttentionSpec     one latent row per ``compress_ratio`` tokens (LatentRowsSpec)
    │   │   │   └── HiddenStateCacheSpec
    │   │   └── SinkFullAttentionSpec
    │   ├── SlidingWindowSpec        the last ``sliding_window`` tokens
    │   │   └── SlidingWindowMLASpec (LatentRowsSpec)
    │   │       └── CompressorStateSpec
    │   ├── ChunkedLocalAttentionSpec
    │   ├── CrossAttentionSpec       encoder tokens
    │   └── EncoderOnlyAttentionSpec nothing
    ├── RecurrentStateSpec           one state of all recurrent layers, cut over blocks
    ├── MambaSpec                    a state a layer, for code that asks for hits at whole blocks
    └── UniformTypeKVCacheSpecs      layers of one kind with different widths, one block table

The specs are defined in ``kv_cache_specs``; code imports them from here. What a kind of cache is
asked stands in ``KVCacheSpec``: nothing else tests a spec's type.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from vllm.v1.kv_cache_specs.base import (
    AttentionSpec,
    KVCacheSpec,
    KVCacheSpecKind,
    KVQuantMode,
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
)
from vllm.v1.kv_cache_specs.encoder import CrossAttentionSpec, EncoderOnlyAttentionSpec
from vllm.v1.kv_cache_specs.full import (
    FullAttentionSpec,
    HiddenStateCacheSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    TQFullAttentionSpec,
)
from vllm.v1.kv_cache_specs.geometry import GroupGeometry
from vllm.v1.kv_cache_specs.latent import LatentRowsSpec
from vllm.v1.kv_cache_specs.layouts import StateLayout, StateShape
from vllm.v1.kv_cache_specs.mamba import MambaSpec
from vllm.v1.kv_cache_specs.recurrent import RecurrentStateSpec
from vllm.v1.kv_cache_specs.uniform import UniformTypeKVCacheSpecs, member_spec
from vllm.v1.kv_cache_specs.window import (
    ChunkedLocalAttentionSpec,
    CompressorStateSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

__all__ = [
    "AttentionSpec",
    "ChunkedLocalAttentionSpec",
    "CompressorStateSpec",
    "CrossAttentionSpec",
    "EncoderOnlyAttentionSpec",
    "FullAttentionSpec",
    "HiddenStateCacheSpec",
    "KVCacheConfig",
    "KVCacheGroupSpec",
    "KVCacheSpec",
    "KVCacheSpecKind",
    "KVCacheTensor",
    "KVQuantMode",
    "LatentRowsSpec",
    "MLAAttentionSpec",
    "MambaSpec",
    "RecurrentStateSpec",
    "SinkFullAttentionSpec",
    "SlidingWindowMLASpec",
    "SlidingWindowSpec",
    "StateLayout",
    "StateShape",
    "TQFullAttentionSpec",
    "UniformTypeKVCacheSpecs",
    "get_kv_cache_spec_kind",
    "get_kv_cache_spec_sliding_window",
    "member_spec",
]


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
        extra_rows: Rows that checkpoints keep of it below those that going on reads: what a
            platform's coordinator chose.
    """

    layer_names: list[str]
    kv_cache_spec: KVCacheSpec
    is_eagle_group: bool = False
    extra_rows: int = 0

    def geometry(self, group_id: int, unit: int) -> GroupGeometry:
        """Describe the group for hits at one unit.

        Raises:
            ConfigError: Its blocks do not fit the unit, or it cannot be cached at one unit.
        """
        own = self.kv_cache_spec.geometry(group_id, unit)
        return replace(own, has_drafter_rows=self.is_eagle_group, extra=self.extra_rows)

    def layer_specs(self) -> dict[str, KVCacheSpec]:
        """Return each layer's own spec."""
        return self.kv_cache_spec.layers(self.layer_names)


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
        coordinator_path: Dotted path of the class that coordinates the groups, with a ``hit_unit``;
            None: the core's own.
    """

    num_blocks: int
    kv_cache_tensors: list[KVCacheTensor]
    kv_cache_groups: list[KVCacheGroupSpec]
    prefix_cache_retention_interval: int | str | None = None
    prefix_cache_pinned_share: float | None = None
    hit_unit: int | None = None
    coordinator_path: str | None = None

    @property
    def has_mamba_layers(self) -> bool:
        """Whether any group keeps recurrent states."""
        return any(
            spec.kind is KVCacheSpecKind.MAMBA
            for group in self.kv_cache_groups
            for spec in group.kv_cache_spec.members()
        )

    @property
    def needs_kv_cache_zeroing(self) -> bool:
        """Whether new blocks must be zeroed: a state is read before it is first written."""
        return any(
            spec.is_zeroed
            for group in self.kv_cache_groups
            for spec in group.kv_cache_spec.members()
        )
