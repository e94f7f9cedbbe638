"""What the scheduler talks to about KV-cache blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from vllm.distributed.kv_events import BlockStored, KVCacheEvent
from vllm.logger import init_logger
from vllm.v1.core.admission_record import whole_block_prefill_stats
from vllm.v1.core.kv_cache_blocks import KVCacheBlocks
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator, get_kv_cache_coordinator
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.pool_invariants import check_pool
from vllm.v1.core.sched.output import WindowTable
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
)
from vllm.v1.messages import PrefillStats
from vllm.v1.metrics.stats import PrefixCacheStats
from vllm.v1.request import Request

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_metrics import KVCacheMetricsCollector
    from vllm.v1.core.unit_kv_cache_manager import UnitKVCacheManager


__all__ = ["KVCacheBlocks", "KVCacheManager", "Request", "make_kv_cache_manager"]

logger = init_logger(__name__)


class KVCacheManager:
    """Allocation, hits and statistics when hits are whole blocks (``hit_unit`` None).

    Owns: the coordinator, prefix-cache statistics, the records of admissions not yet taken.

    Args:
        kv_cache_config: Groups and number of blocks.
        max_model_len: Longest request in tokens.
        scheduler_block_size: Tokens on whose multiples a hit ends.
        hash_block_size: Tokens under one hash of ``Request.block_hashes``.
        max_num_batched_tokens: Tokens of a step; None stands for ``max_model_len``.
        enable_caching: Whether prefixes are kept and looked up.
        use_eagle: Whether a drafter reads the cache.
        log_stats: Whether hit statistics are gathered.
        enable_kv_cache_events: Whether stored and removed blocks are recorded.
        dcp_world_size: Ranks of decode context parallelism.
        pcp_world_size: Ranks of prefill context parallelism.
        metrics_collector: Samples block lifetimes, if given.
        coordinator: One built already, instead of the one registered for the configuration.

    Raises:
        ConfigError: (a ValueError) The retention interval does not fit the model.
    """

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        max_model_len: int,
        scheduler_block_size: int,
        hash_block_size: int,
        max_num_batched_tokens: int | None = None,
        enable_caching: bool = True,
        use_eagle: bool = False,
        log_stats: bool = False,
        enable_kv_cache_events: bool = False,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
        metrics_collector: KVCacheMetricsCollector | None = None,
        coordinator: KVCacheCoordinator | None = None,
    ) -> None:
        self.max_model_len = max_model_len
        self.enable_caching = enable_caching
        self.kv_cache_config = kv_cache_config
        self.coordinator = coordinator or get_kv_cache_coordinator(
            kv_cache_config=kv_cache_config,
            max_model_len=max_model_len,
            max_num_batched_tokens=(
                max_model_len if max_num_batched_tokens is None else max_num_batched_tokens
            ),
            use_eagle=use_eagle,
            enable_caching=enable_caching,
            enable_kv_cache_events=enable_kv_cache_events,
            dcp_world_size=dcp_world_size,
            pcp_world_size=pcp_world_size,
            scheduler_block_size=scheduler_block_size,
            hash_block_size=hash_block_size,
            metrics_collector=metrics_collector,
        )
        self.block_pool = self.coordinator.block_pool
        groups = kv_cache_config.kv_cache_groups
        self.num_kv_cache_groups = len(groups)
        # Shared by all callers, who pass it on and never change it.
        self.empty_kv_cache_blocks = KVCacheBlocks(tuple(() for _ in groups))
        self.prefix_cache_stats = PrefixCacheStats() if log_stats else None
        self._prefill_stats: dict[str, PrefillStats] = {}
        # By group, for events: (kind, window).
        self._group_descriptions = [
            (
                get_kv_cache_spec_kind(group.kv_cache_spec).value,
                get_kv_cache_spec_sliding_window(group.kv_cache_spec),
            )
            for group in groups
        ]

    # ---- lookup ------------------------------------------------------------------------------

    def get_computed_blocks(self, request: Request) -> tuple[KVCacheBlocks, int]:
        """Find the request's longest cached prefix; at least one token is left to compute.

        Returns:
            The blocks, to be handed to ``allocate_slots``, and their tokens. Takes no block.
        """
        if not self.enable_caching or request.skip_reading_prefix_cache:
            return self.empty_kv_cache_blocks, 0
        # The last token is computed whatever the cache holds: its logits are needed.
        blocks, num_tokens = self.coordinator.find_longest_cache_hit(
            request.block_hashes, request.num_tokens - 1
        )
        if self.prefix_cache_stats is not None:
            self.prefix_cache_stats.record(
                num_tokens=request.num_tokens,
                num_hits=num_tokens,
                preempted=request.num_preemptions > 0,
            )
        return self.create_kv_cache_blocks(blocks), num_tokens

    # ---- allocation --------------------------------------------------------------------------

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_encoder_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
    ) -> KVCacheBlocks | None:
        """Take the blocks of one step of one request.

            | computed | new computed | external |  new  | lookahead |
            |<-- total computed (main model) --->|
            |<-- tokens of the main model ------------>|
            |<-- tokens that need a slot -------------------------->|

        Args:
            request: The request; on its first call it holds nothing.
            num_new_tokens: Tokens to compute, drafts included.
            num_new_computed_tokens: Tokens of the hit, on the first call.
            new_computed_blocks: The hit, from ``get_computed_blocks``.
            num_lookahead_tokens: Slots to have ready beyond the step for a drafter.
            num_external_computed_tokens: Tokens a connector loads.
            delay_cache_blocks: Do not cache yet: a connector is still writing.
            num_encoder_tokens: Encoder tokens, for cross attention.
            full_sequence_must_fit: Refuse unless the whole sequence will fit.
            reserved_blocks: Free blocks that are spoken for.

        Returns:
            The blocks taken for new tokens by group (the hit's and a connector's left out), or
            None when the pool is too full; then no block was taken or touched.

        Raises:
            ValueError: There is nothing to compute and nothing to load.
        """
        if num_new_tokens == 0 and num_external_computed_tokens == 0:
            raise ValueError(
                "num_new_tokens must be greater than 0 when there are no external computed tokens"
            )
        coordinator = self.coordinator
        request_id = request.request_id
        hit = self.empty_kv_cache_blocks if new_computed_blocks is None else new_computed_blocks
        num_local = request.num_computed_tokens + num_new_computed_tokens
        num_computed = min(num_local + num_external_computed_tokens, self.max_model_len)
        num_main_model = num_computed + num_new_tokens
        num_need_slot = min(num_main_model + num_lookahead_tokens, self.max_model_len)
        num_available = self.block_pool.get_num_free_blocks() - reserved_blocks
        if full_sequence_must_fit:
            num_full = min(request.num_tokens, self.max_model_len)
            num_needed = coordinator.get_num_blocks_to_allocate(
                request_id=request_id,
                num_tokens=num_full,
                new_computed_blocks=hit.blocks,
                num_encoder_tokens=num_encoder_tokens,
                total_computed_tokens=num_computed,
                num_tokens_main_model=num_full,
                apply_admission_cap=True,
            )
            if num_needed > num_available:
                return None

        # Even if the step does not fit: these blocks are of no use to the request any more.
        coordinator.remove_skipped_blocks(request_id, num_computed)
        num_needed = coordinator.get_num_blocks_to_allocate(
            request_id=request_id,
            num_tokens=num_need_slot,
            new_computed_blocks=hit.blocks,
            num_encoder_tokens=num_encoder_tokens,
            total_computed_tokens=num_computed,
            num_tokens_main_model=num_main_model,
        )
        if num_needed > self.block_pool.get_num_free_blocks() - reserved_blocks:
            return None

        is_known = coordinator.has_request(request_id)
        if not is_known:
            self._prefill_stats[request_id] = whole_block_prefill_stats(
                num_tokens=request.num_tokens,
                num_cached_tokens=min(num_computed, request.num_tokens),
                granularity=coordinator.scheduler_block_size,
                is_bypassed=not self.enable_caching or request.skip_reading_prefix_cache,
            )
        if any(hit.blocks) or num_external_computed_tokens > 0:
            coordinator.allocate_new_computed_blocks(
                request_id, hit.blocks, num_local, num_computed - num_local
            )
        new_blocks = self.empty_kv_cache_blocks.blocks
        if num_needed > 0 or not is_known:
            # Most decode steps stay inside the blocks their request has.
            new_blocks = coordinator.allocate_new_blocks(
                request_id, num_need_slot, num_main_model, num_encoder_tokens
            )
        if self.enable_caching and not delay_cache_blocks:
            # Drafts may be rejected: only tokens the request really has are cached.
            coordinator.cache_blocks(request, min(num_main_model, request.num_tokens))
        return self.create_kv_cache_blocks(new_blocks)

    def should_wait(self, request: Request, looked_up: KVCacheBlocks) -> bool:
        """Whether a running prefill will soon publish more of a waiting request's prefix: never.

        Prefixes of a step are published while it is scheduled, so nothing is worth waiting for.
        """
        return False

    def can_ever_fit(self, request: Request) -> bool:
        """Whether the pool could run the request alone, at its full length."""
        num_tokens = min(request.num_prompt_tokens + request.max_tokens, self.max_model_len)
        return self._num_blocks_of(num_tokens) <= self._num_usable_blocks

    @property
    def max_concurrency(self) -> float:
        """How many requests of full length the pool can hold."""
        return self._num_usable_blocks / max(self._num_blocks_of(self.max_model_len), 1)

    @property
    def _num_usable_blocks(self) -> int:
        return self.block_pool.num_gpu_blocks - 1 - self.block_pool.num_reserved_blocks

    def _num_blocks_of(self, num_tokens: int) -> int:
        """Return the most blocks one request of a length holds at once."""
        return sum(
            manager.get_num_blocks_to_allocate(
                # No request has this id, so nothing it holds is subtracted.
                "",
                num_tokens,
                (),
                0,
                num_tokens,
                apply_admission_cap=True,
            )
            for manager in self.coordinator.single_type_managers
        )

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Cache the request's full blocks, if caching is on; after a delayed allocation."""
        if self.enable_caching:
            self.coordinator.cache_blocks(request, num_computed_tokens)

    def free(self, request: Request) -> None:
        """Give all blocks of a request back; the cached ones stay cached until reused."""
        self._prefill_stats.pop(request.request_id, None)
        self.coordinator.free(request.request_id)

    def remove_skipped_blocks(self, request_id: str, total_computed_tokens: int) -> None:
        """Free the blocks no later token of the request attends to."""
        self.coordinator.remove_skipped_blocks(request_id, total_computed_tokens)

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Un-cache blocks, for example because their contents turned out to be invalid."""
        self.block_pool.evict_blocks(block_ids)

    def reset_prefix_cache(self) -> bool:
        """Forget everything cached.

        Returns:
            False, with nothing changed, while requests hold blocks.
        """
        if not self.block_pool.reset_prefix_cache():
            return False
        if self.prefix_cache_stats is not None:
            self.prefix_cache_stats.reset = True
        return True

    # ---- the edges of schedule() -------------------------------------------------------------

    def new_step_starts(self) -> None:
        """Begin a ``schedule()``."""
        self.coordinator.new_step_starts()

    def chunk_end(self, request: Request, num_new_tokens: int) -> int:
        """Return how many of ``num_new_tokens`` to compute: all, chunks may end anywhere."""
        return num_new_tokens

    def commit_step(self) -> None:
        """End a ``schedule()``: nothing to do, blocks are cached as they are allocated."""

    def take_block_copies(self) -> list[tuple[int, int]]:
        """Drain the (source, destination) block ids to copy before the forward pass: none."""
        return []

    def take_window_tables(
        self, request_ids: Sequence[str] | None = None
    ) -> dict[str, tuple[WindowTable, ...]]:
        """Drain the window tables that changed: none, tables here only grow."""
        return {}

    def take_drafter_rebuilds(self) -> dict[str, int]:
        """Drain the requests whose drafter makes its hit's last row anew: none."""
        return {}

    def take_new_block_ids(self) -> list[int]:
        """Drain the ids of blocks taken in this step, for a worker that zeroes them."""
        return [
            block_id
            for manager in self.coordinator.single_type_managers
            for block_id in manager.take_new_block_ids()
        ]

    def take_events(self) -> list[KVCacheEvent]:
        """Drain the KV events, with the kind and the window of each stored block's group."""
        events = self.block_pool.take_events()
        for event in events:
            if isinstance(event, BlockStored) and event.group_idx is not None:
                self._describe_group(event, event.group_idx)
        return events

    def _describe_group(self, event: BlockStored, group_idx: int) -> None:
        if not 0 <= group_idx < len(self._group_descriptions):
            logger.warning("Group index `%s` not in KV cache metadata", group_idx)
            return
        event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window = self._group_descriptions[
            group_idx
        ]

    # ---- queries and statistics --------------------------------------------------------------

    @property
    def usage(self) -> float:
        """The share of blocks that requests hold, 0..1."""
        return self.block_pool.get_usage()

    def get_num_common_prefix_blocks(self, running_request_id: str) -> list[int]:
        """Return per group how many leading blocks all requests with blocks share."""
        return self.coordinator.get_num_common_prefix_blocks(running_request_id)

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """Return a request's blocks by group."""
        return self.create_kv_cache_blocks(self.coordinator.get_blocks(request_id))

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """Return a request's block ids by group."""
        return self.get_blocks(request_id).get_block_ids()

    def create_kv_cache_blocks(self, blocks: tuple[Sequence[KVCacheBlock], ...]) -> KVCacheBlocks:
        """Wrap blocks by group; all empty groups give the one shared empty object."""
        return KVCacheBlocks(blocks) if any(blocks) else self.empty_kv_cache_blocks

    def make_prefix_cache_stats(self) -> PrefixCacheStats | None:
        """Return the statistics gathered since the last call and begin anew; None if off."""
        stats = self.prefix_cache_stats
        if stats is not None:
            self.prefix_cache_stats = PrefixCacheStats()
        return stats

    def take_prefill_stats(self, request_id: str) -> PrefillStats | None:
        """Drain the record of a request's last admission."""
        return self._prefill_stats.pop(request_id, None)

    def check_invariants(self, num_computed: dict[str, int] | None = None) -> None:
        """Check I1..I4; ``num_computed`` is for managers that can check I5.

        Raises:
            InvariantError: One does not hold.
        """
        check_pool(
            self.block_pool,
            [
                blocks
                for manager in self.coordinator.single_type_managers
                for blocks in manager.req_to_blocks.values()
            ],
        )


def make_kv_cache_manager(
    kv_cache_config: KVCacheConfig,
    max_model_len: int,
    scheduler_block_size: int,
    hash_block_size: int,
    max_num_batched_tokens: int | None = None,
    enable_caching: bool = True,
    use_eagle: bool = False,
    log_stats: bool = False,
    enable_kv_cache_events: bool = False,
    dcp_world_size: int = 1,
    pcp_world_size: int = 1,
    metrics_collector: KVCacheMetricsCollector | None = None,
    num_lookahead_tokens: int = 0,
    stale_row: str = "rebuild",
) -> KVCacheManager | UnitKVCacheManager:
    """Build the manager for a configuration: ``hit_unit`` chooses, once.

    Args and raises: those of ``KVCacheManager``, and of a drafter: ``num_lookahead_tokens``, the
    slots it may write beyond a step's tokens, and ``stale_row``, a ``StaleRow``.
    """
    coordinator = get_kv_cache_coordinator(
        kv_cache_config=kv_cache_config,
        max_model_len=max_model_len,
        max_num_batched_tokens=(
            max_model_len if max_num_batched_tokens is None else max_num_batched_tokens
        ),
        use_eagle=use_eagle,
        enable_caching=enable_caching,
        enable_kv_cache_events=enable_kv_cache_events,
        dcp_world_size=dcp_world_size,
        pcp_world_size=pcp_world_size,
        scheduler_block_size=scheduler_block_size,
        hash_block_size=hash_block_size,
        metrics_collector=metrics_collector,
    )
    if kv_cache_config.hit_unit is not None:
        # It imports KVCacheBlocks from here, and only hybrid models need it.
        from vllm.v1.core.drafter_rows import StaleRow  # noqa: PLC0415
        from vllm.v1.core.unit_kv_cache_manager import UnitKVCacheManager  # noqa: PLC0415

        return UnitKVCacheManager(
            kv_cache_config,
            max_model_len,
            enable_caching=enable_caching,
            max_lookahead=num_lookahead_tokens,
            coordinator=coordinator,
            stale_row=StaleRow(stale_row),
        )
    return KVCacheManager(
        kv_cache_config,
        max_model_len,
        scheduler_block_size,
        hash_block_size,
        enable_caching=enable_caching,
        log_stats=log_stats,
        coordinator=coordinator,
    )
