"""All groups of a DeepSeek-V4 on Ascend together.

Hits, checkpoints, retention and what a store should keep are the core's. Ascend's part is what its
kernels demand of the pages.
"""

from inspect import signature
from typing import Any

from vllm.exceptions import ConfigError
from vllm.v1.core.kept_blocks import kept_block_mask
from vllm.v1.core.kv_cache_coordinator import get_kv_cache_coordinator
from vllm.v1.core.unit_coordinator import UnitKVCacheCoordinator
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, UniformTypeKVCacheSpecs
from vllm_ascend.core.geometry import check_kernel_rows
from vllm_ascend.core.specs import CompressAttentionSpec, unpack_groups

_ARGUMENTS = frozenset(signature(get_kv_cache_coordinator).parameters)


class AscendHybridKVCacheCoordinator(UnitKVCacheCoordinator):
    """The core's coordinator over Ascend's pages.

    Takes the keyword arguments of ``get_kv_cache_coordinator``, all by name; those that are not
    listed here do not matter for hits at one unit.

    Owns: as ``UnitKVCacheCoordinator``.

    Raises:
        ConfigError: A block does not suit the kernels or the unit, or context parallelism is on.
        TypeError: ``get_kv_cache_coordinator`` has no such argument: a renamed one is an error
            here and never a silent default.
    """

    def __init__(
        self,
        *,
        kv_cache_config: KVCacheConfig,
        enable_caching: bool,
        enable_kv_cache_events: bool,
        use_eagle: bool,
        hash_block_size: int,
        dcp_world_size: int,
        pcp_world_size: int,
        **others: Any,
    ) -> None:
        unknown = sorted(others.keys() - _ARGUMENTS)
        if unknown:
            raise TypeError(f"{type(self).__name__} got unknown arguments: {', '.join(unknown)}")
        ranks = dcp_world_size * pcp_world_size
        if ranks != 1:
            raise ConfigError(
                f"Context parallelism over {ranks} ranks is not supported with DeepSeek-V4's "
                "hybrid cache: set both context parallel sizes to 1."
            )
        unit = kv_cache_config.hit_unit
        if unit is None or hash_block_size != unit:
            # Different numbers would write keys at one granularity and look them up at another.
            raise ConfigError(
                f"hash_block_size={hash_block_size} and the hit unit {unit} must be the same "
                "number: leave hash_block_size out."
            )
        for group in unpack_groups(kv_cache_config.kv_cache_groups):
            if isinstance(group.kv_cache_spec, CompressAttentionSpec):
                check_kernel_rows(group.kv_cache_spec.storage_block_size)
        super().__init__(
            kv_cache_config, enable_caching, enable_kv_cache_events=enable_kv_cache_events
        )
        self.use_mtp = use_eagle

    def kept_block_mask(self, group_id: int, num_tokens: int) -> list[bool]:
        """Return for each block of a prompt whether a later request can use it.

        Compressed groups are dense, window groups keep the tails below the boundaries of the
        retention policy, its interval included; with MTP also those one unit lower.
        """
        group = self.geometry.groups[group_id]
        return kept_block_mask(
            self.geometry, self.policy, group, num_tokens, has_drafter=self.use_mtp
        )


def serves(kv_cache_config: KVCacheConfig, enable_caching: bool) -> bool:
    """Whether a configuration is a hybrid cache in Ascend's pages; a coordinator predicate."""
    return kv_cache_config.hit_unit is not None and any(
        map(_holds_compressed, kv_cache_config.kv_cache_groups)
    )


def _holds_compressed(group: KVCacheGroupSpec) -> bool:
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return any(isinstance(s, CompressAttentionSpec) for s in spec.kv_cache_specs.values())
    return isinstance(spec, CompressAttentionSpec)
