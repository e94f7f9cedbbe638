"""All KV-cache groups of a model together: allocation, caching and hits (``hit_unit`` None)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.logger import init_logger
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.coordinator_registry import find_coordinator, register_coordinator
from vllm.v1.core.hybrid_lookup import HybridLookup
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock
from vllm.v1.core.pinned_tier import pinned_share
from vllm.v1.core.retention_masks import pinned_prefix_capacity, resolve_retention_interval
from vllm.v1.core.single_type_kv_cache_manager import (
    SlidingWindowManager,
    get_manager_for_kv_cache_spec,
)
from vllm.v1.kv_cache_interface import KVCacheConfig, SlidingWindowSpec

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_metrics import KVCacheMetricsCollector
    from vllm.v1.request import Request

logger = init_logger(__name__)


class KVCacheCoordinator(ABC):
    """The managers of all groups over one pool; each method does for all what theirs do for one.

    Owns: the pool and the managers, in group order.

    Args:
        kv_cache_config: Groups and number of blocks.
        max_model_len: Longest request in tokens.
        max_num_batched_tokens: Tokens of a step.
        use_eagle: Whether a drafter reads the cache (EAGLE, MTP).
        enable_caching: Whether prefix caching is on.
        enable_kv_cache_events: Whether the pool records events.
        dcp_world_size: Ranks of decode context parallelism.
        pcp_world_size: Ranks of prefill context parallelism.
        scheduler_block_size: Tokens on whose multiples a hit of all groups ends.
        hash_block_size: Tokens under one hash of ``Request.block_hashes``.
        metrics_collector: Samples block lifetimes, if given.

    Raises:
        ConfigError: (a ValueError) The retention interval does not fit the model.
    """

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        max_model_len: int,
        max_num_batched_tokens: int,
        use_eagle: bool,
        enable_caching: bool,
        enable_kv_cache_events: bool,
        dcp_world_size: int,
        pcp_world_size: int,
        scheduler_block_size: int,
        hash_block_size: int,
        metrics_collector: KVCacheMetricsCollector | None = None,
    ) -> None:
        self.kv_cache_config = kv_cache_config
        self.max_model_len = max_model_len
        self.enable_caching = enable_caching
        self.dcp_world_size = dcp_world_size
        self.pcp_world_size = pcp_world_size
        self.scheduler_block_size = scheduler_block_size
        self.hash_block_size = hash_block_size
        groups = kv_cache_config.kv_cache_groups
        wanted_interval = kv_cache_config.prefix_cache_retention_interval
        if wanted_interval is None:
            # Read here, not at import: the variable may be set after the module was loaded.
            wanted_interval = envs.VLLM_PREFIX_CACHE_RETENTION_INTERVAL
        self.retention_interval = resolve_retention_interval(
            wanted_interval,
            has_window_groups=any(isinstance(g.kv_cache_spec, SlidingWindowSpec) for g in groups),
            scheduler_block_size=scheduler_block_size,
        )
        self.eagle_group_ids = {i for i, group in enumerate(groups) if group.is_eagle_group}
        if use_eagle and not self.eagle_group_ids:
            self.eagle_group_ids = set(range(len(groups)))
        self.block_pool = BlockPool(
            num_gpu_blocks=kv_cache_config.num_blocks,
            enable_caching=enable_caching,
            hash_block_size=hash_block_size,
            enable_kv_cache_events=enable_kv_cache_events,
            metrics_collector=metrics_collector,
        )
        self.single_type_managers = tuple(
            get_manager_for_kv_cache_spec(
                group.kv_cache_spec,
                max_num_batched_tokens=max_num_batched_tokens,
                max_model_len=max_model_len,
                block_pool=self.block_pool,
                enable_caching=enable_caching,
                kv_cache_group_id=group_id,
                scheduler_block_size=scheduler_block_size,
                dcp_world_size=dcp_world_size,
                pcp_world_size=pcp_world_size,
            )
            for group_id, group in enumerate(groups)
        )
        assert scheduler_block_size % hash_block_size == 0
        for group_id, manager in enumerate(self.single_type_managers):
            manager.use_eagle = group_id in self.eagle_group_ids
            assert scheduler_block_size % manager.block_size == 0, (
                f"The scheduler's block size {scheduler_block_size} is no multiple of group "
                f"{group_id}'s block size {manager.block_size}."
            )

        # Most groups need all their blocks as long as the request lives.
        self._dropping_managers = tuple(
            manager for manager in self.single_type_managers if manager.drops_skipped_blocks
        )
        if enable_caching and envs.VLLM_PIN_SWA_TOKENS:
            self._enable_pinning()

    def _enable_pinning(self) -> None:
        """Let window groups pin, and say how many prefixes that is good for."""
        window_managers = [
            manager
            for manager in self.single_type_managers
            if isinstance(manager, SlidingWindowManager)
        ]
        max_pinned = int((self.block_pool.num_gpu_blocks - 1) * pinned_share(self.kv_cache_config))
        if not window_managers:
            return
        self.block_pool.enable_pinning(max_pinned, envs.VLLM_PIN_MIN_DROP_SIZE)
        logger.info(
            "VLLM_PIN_SWA_TOKENS: up to %d of %d blocks hold pinned windows, room for %d prefixes",
            max_pinned,
            self.block_pool.num_gpu_blocks,
            pinned_prefix_capacity(
                max_pinned,
                [(m.sliding_window, m.block_size, m.use_eagle) for m in window_managers],
            ),
        )

    # ---- allocation --------------------------------------------------------------------------

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[Sequence[KVCacheBlock]],
        num_encoder_tokens: int,
        total_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
    ) -> int:
        """Return how many blocks leave the free queue, over all groups."""
        num_blocks = 0
        for manager, hits in zip(self.single_type_managers, new_computed_blocks, strict=True):
            if manager.counts_encoder_tokens:
                num_blocks += manager.get_num_blocks_to_allocate(
                    request_id, num_encoder_tokens, (), 0, num_encoder_tokens
                )
            else:
                num_blocks += manager.get_num_blocks_to_allocate(
                    request_id,
                    num_tokens,
                    hits,
                    total_computed_tokens,
                    num_tokens_main_model,
                    apply_admission_cap,
                )
        return num_blocks

    def allocate_new_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[Sequence[KVCacheBlock]],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        """Adopt a request's hits, then take blocks for tokens a connector will load.

        All groups adopt before any takes a block: a new block may be evicted from the cache, and
        it must not be one of this request's own hits.
        """
        num_total = num_local_computed_tokens + num_external_computed_tokens
        starting = [
            (manager, hits)
            for manager, hits in zip(self.single_type_managers, new_computed_blocks, strict=True)
            if request_id not in manager.num_cached_block
        ]
        for manager, hits in starting:
            manager.adopt_computed_blocks(request_id, hits, num_total)
        if num_external_computed_tokens > 0:
            for manager, _ in starting:
                manager.allocate_external_blocks(request_id, num_total)

    def allocate_new_blocks(
        self,
        request_id: str,
        num_tokens: int,
        num_tokens_main_model: int,
        num_encoder_tokens: int = 0,
    ) -> tuple[list[KVCacheBlock], ...]:
        """Give a request slots for ``num_tokens`` tokens; the new blocks by group."""
        return tuple(
            manager.allocate_new_blocks(request_id, num_encoder_tokens, num_encoder_tokens)
            if manager.counts_encoder_tokens
            else manager.allocate_new_blocks(request_id, num_tokens, num_tokens_main_model)
            for manager in self.single_type_managers
        )

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Cache the request's full blocks that a hit can reach."""
        for manager in self.single_type_managers:
            manager.cache_blocks(request, num_computed_tokens, self.retention_interval)

    # ---- freeing -----------------------------------------------------------------------------

    def free(self, request_id: str) -> None:
        """Give all blocks of a request back."""
        for manager in self.single_type_managers:
            manager.free(request_id)

    def remove_skipped_blocks(self, request_id: str, total_computed_tokens: int) -> None:
        """Free the blocks no later token of the request attends to."""
        for manager in self._dropping_managers:
            manager.remove_skipped_blocks(request_id, total_computed_tokens)

    # ---- queries -----------------------------------------------------------------------------

    def has_request(self, request_id: str) -> bool:
        """Whether the request holds tables."""
        managers = self.single_type_managers
        # Allocation gives a request a table in every group, if only an empty one.
        return bool(managers) and request_id in managers[0].req_to_blocks

    def get_blocks(self, request_id: str) -> tuple[list[KVCacheBlock], ...]:
        """Return a request's tables by group."""
        return tuple(
            manager.req_to_blocks.get(request_id, []) for manager in self.single_type_managers
        )

    def get_num_common_prefix_blocks(self, running_request_id: str) -> list[int]:
        """Return per group how many leading blocks all requests with blocks share."""
        return [
            manager.get_num_common_prefix_blocks(running_request_id)
            for manager in self.single_type_managers
        ]

    def new_step_starts(self) -> None:
        """Begin a scheduling step."""
        for manager in self.single_type_managers:
            manager.new_step_starts()

    @abstractmethod
    def find_longest_cache_hit(
        self, block_hashes: list[BlockHash], max_cache_hit_length: int
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """Find the longest prefix all groups have cached.

        Args:
            block_hashes: The request's hashes, one per ``hash_block_size`` tokens.
            max_cache_hit_length: Tokens the hit may have at most.

        Returns:
            The blocks by group, and the hit's tokens.
        """


class KVCacheCoordinatorNoPrefixCache(KVCacheCoordinator):
    """Any number of groups, also none, without prefix caching."""

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Do nothing."""

    def get_num_common_prefix_blocks(self, running_request_id: str) -> list[int]:
        """Return zeros: without prefix caching no block is shared."""
        return [0] * len(self.single_type_managers)

    def find_longest_cache_hit(
        self, block_hashes: list[BlockHash], max_cache_hit_length: int
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """Find nothing."""
        return tuple([] for _ in self.single_type_managers), 0


class UnitaryKVCacheCoordinator(KVCacheCoordinator):
    """One group: its own block size is the granularity of hits."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert len(self.single_type_managers) == 1
        (self._manager,) = self.single_type_managers
        assert not self.enable_caching or self.hash_block_size == self._manager.block_size, (
            f"A single group of blocks of {self._manager.block_size} tokens needs hashes of as "
            f"many, not {self.hash_block_size}."
        )

    def find_longest_cache_hit(
        self, block_hashes: list[BlockHash], max_cache_hit_length: int
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """Find the longest cached prefix of the one group."""
        manager = self._manager
        hit_blocks = manager.find_longest_cache_hit(
            block_hashes=block_hashes,
            max_length=max_cache_hit_length,
            kv_cache_group_ids=[0],
            block_pool=self.block_pool,
            kv_cache_spec=manager.kv_cache_spec,
            drop_eagle_block=manager.use_eagle and manager.drops_eagle_block,
            alignment_tokens=manager.block_size,
            dcp_world_size=self.dcp_world_size,
            pcp_world_size=self.pcp_world_size,
        )
        return hit_blocks, len(hit_blocks[0]) * manager.block_size


class HybridKVCacheCoordinator(KVCacheCoordinator):
    """Groups of at least two specs: a hit must hold in all of them, at a scheduler block's end."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for manager in self.single_type_managers:
            assert manager.block_size % self.hash_block_size == 0, (
                f"Blocks of {manager.block_size} tokens do not divide into hashes of "
                f"{self.hash_block_size}."
            )
        self._lookup = HybridLookup(
            self.single_type_managers,
            self.block_pool,
            alignment_tokens=self.scheduler_block_size,
            context_parallel=(self.dcp_world_size, self.pcp_world_size),
        )
        # Groups of one spec are looked up together, so all must cache what a drafter among them
        # needs: they share one mask.
        for manager in self._lookup.eagle_managers:
            manager.use_eagle = True

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Cache up to the last scheduler block's end; nothing beyond can be hit.

        A drafter's group goes one block on, if it is there: its hits match one block more.
        """
        num_aligned = num_computed_tokens // self.scheduler_block_size * self.scheduler_block_size
        if num_aligned == 0:
            return
        for manager in self.single_type_managers:
            num_tokens = num_aligned
            if manager.use_eagle:
                num_tokens = min(num_computed_tokens, num_aligned + manager.block_size)
            manager.cache_blocks(request, num_tokens, self.retention_interval)

    def find_longest_cache_hit(
        self, block_hashes: list[BlockHash], max_cache_hit_length: int
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """Find the longest prefix that every group can serve."""
        return self._lookup.find(block_hashes, max_cache_hit_length)


def _make_unit_coordinator(
    kv_cache_config: KVCacheConfig,
    enable_caching: bool,
    enable_kv_cache_events: bool = False,
    **kwargs: Any,
) -> Any:
    """Build the coordinator of hits at one unit, which needs none of the other arguments."""
    # Unit hits bring a pool and a lookup of their own, loaded only where they are used.
    from vllm.v1.core.unit_coordinator import UnitKVCacheCoordinator  # noqa: PLC0415

    return UnitKVCacheCoordinator(
        kv_cache_config, enable_caching, enable_kv_cache_events=enable_kv_cache_events
    )


# Later ones are asked first.
register_coordinator("hybrid", HybridKVCacheCoordinator, lambda config, caching: True)
register_coordinator(
    "unitary",
    UnitaryKVCacheCoordinator,
    lambda config, caching: len(config.kv_cache_groups) == 1,
)
register_coordinator(
    "no_prefix_cache", KVCacheCoordinatorNoPrefixCache, lambda config, caching: not caching
)
register_coordinator(
    "unit", _make_unit_coordinator, lambda config, caching: config.hit_unit is not None
)


def get_kv_cache_coordinator(
    kv_cache_config: KVCacheConfig,
    max_model_len: int,
    max_num_batched_tokens: int,
    use_eagle: bool,
    enable_caching: bool,
    enable_kv_cache_events: bool,
    dcp_world_size: int,
    pcp_world_size: int,
    scheduler_block_size: int,
    hash_block_size: int,
    metrics_collector: KVCacheMetricsCollector | None = None,
) -> Any:
    """Build the coordinator registered for a configuration.

    Args and raises: those of ``KVCacheCoordinator``.

    Returns:
        A ``KVCacheCoordinator``; with ``hit_unit`` set, or a platform's own registration, what
        that names.
    """
    factory = find_coordinator(kv_cache_config, enable_caching).factory
    return factory(
        kv_cache_config=kv_cache_config,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        use_eagle=use_eagle,
        enable_caching=enable_caching,
        enable_kv_cache_events=enable_kv_cache_events,
        dcp_world_size=dcp_world_size,
        pcp_world_size=pcp_world_size,
        scheduler_block_size=scheduler_block_size,
        hash_block_size=hash_block_size,
        metrics_collector=metrics_collector,
    )
