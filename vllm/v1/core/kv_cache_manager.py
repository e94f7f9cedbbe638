"""What the scheduler talks to about KV-cache blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from vllm import envs
from vllm.distributed.kv_events import AnyKVCacheEvent, BlockStored
from vllm.exceptions import NoFreeBlocksError
from vllm.logger import init_logger
from vllm.v1.core.invariants import check_cache
from vllm.v1.core.kv_cache_coordinator import make_coordinator
from vllm.v1.core.pool.exports import PrefixBlocks
from vllm.v1.core.prompt_scores import PromptScores
from vllm.v1.core.shared_pool import SharedPool
from vllm.v1.core.values.cache_settings import CacheSettings
from vllm.v1.core.values.cache_step import Lookup, StepRequest, StepWork
from vllm.v1.core.values.free_block_queue import KVCacheBlock
from vllm.v1.core.values.kv_cache_blocks import KVCacheBlocks
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
)
from vllm.v1.messages import BYPASSED, PrefillStats
from vllm.v1.metrics.stats import PrefixCacheStats
from vllm.v1.request import Request

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_metrics import KVCacheMetricsCollector

__all__ = ["KVCacheBlocks", "KVCacheManager", "Request"]

logger = init_logger(__name__)


class KVCacheManager:
    """Look up, plan, fit, commit, record: the cache of one engine.

    A coordinator knows the rules of hits, at whole blocks or at one unit; here is what every step
    of every request goes through.

    Owns: the coordinator, what is known of prompts' log probabilities, prefix-cache statistics.

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

    Raises:
        ConfigError: (a ValueError) Blocks, pool or retention interval do not fit the model.
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
    ) -> None:
        settings = CacheSettings(
            kv_cache_config=kv_cache_config,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens or max_model_len,
            scheduler_block_size=scheduler_block_size,
            hash_block_size=hash_block_size,
            enable_caching=enable_caching,
            use_eagle=use_eagle,
            enable_kv_cache_events=enable_kv_cache_events,
            dcp_world_size=dcp_world_size,
            pcp_world_size=pcp_world_size,
            metrics_collector=metrics_collector,
        )
        self._build(settings, log_stats=log_stats)

    @classmethod
    def from_settings(cls, settings: CacheSettings) -> KVCacheManager:
        """Build the manager of an engine; its scheduler counts admissions, not lookups."""
        manager = cls.__new__(cls)
        manager._build(settings, log_stats=False)
        return manager

    def _build(self, settings: CacheSettings, *, log_stats: bool) -> None:
        self.enable_caching = settings.enable_caching
        self.kv_cache_config = settings.kv_cache_config
        self.max_model_len = settings.max_model_len
        self.coordinator = make_coordinator(settings)
        self.block_pool = self.coordinator.block_pool
        self.prompt_scores = PromptScores(settings.hash_block_size)
        groups = self.kv_cache_config.kv_cache_groups
        self.num_kv_cache_groups = len(groups)
        # Shared by all callers, who pass it on and never change it.
        self.empty_kv_cache_blocks = KVCacheBlocks(tuple(() for _ in groups))
        self.prefix_cache_stats = PrefixCacheStats() if log_stats else None
        self._zeroes_blocks = (
            self.kv_cache_config.needs_kv_cache_zeroing or envs.VLLM_SCRUB_UNCACHED
        )
        # By group, for events: (kind, window).
        self._group_descriptions = [
            (
                get_kv_cache_spec_kind(group.kv_cache_spec).value,
                get_kv_cache_spec_sliding_window(group.kv_cache_spec),
            )
            for group in groups
        ]

    # ---- lookup ------------------------------------------------------------------------------

    def look_up(self, request: Request) -> Lookup:
        """Find the longest reusable prefix; at least the last token is always left to compute.

        Returns:
            The hit, to be handed to ``allocate_slots``. Takes no block.
        """
        # By the interface's name: code written against it wraps or replaces that.
        blocks, num_tokens = self.get_computed_blocks(request)
        return Lookup(blocks, num_tokens)

    def get_computed_blocks(self, request: Request) -> tuple[KVCacheBlocks, int]:
        """Return the blocks and the tokens of the hit; counts the query."""
        limit = self._find_limit(request)
        if limit is None:
            return self.empty_kv_cache_blocks, 0
        found = self.coordinator.look_up(request, limit)
        if self.prefix_cache_stats is not None:
            self.prefix_cache_stats.record(
                num_tokens=request.num_tokens,
                num_hits=found.num_tokens,
                preempted=request.num_preemptions > 0,
            )
        return found.blocks, found.num_tokens

    def _find_limit(self, request: Request) -> int | None:
        """Return the tokens that a hit may have at most; None: nothing is read."""
        if not self.enable_caching:
            return None
        # The last token is computed whatever the cache holds: its logits are needed.
        longest = request.num_tokens - 1
        if not request.skip_reading_prefix_cache:
            return longest
        if request.num_scores is None:
            return None
        return min(longest, self.prompt_scores.find_limit(request))

    def claim(self, request: Request) -> None:
        """Let what a request that begins to wait would hit be reused last, until it is admitted."""
        if self.enable_caching and not request.skip_reading_prefix_cache:
            self.coordinator.claim(request)

    def should_wait(self, request: Request, found: Lookup) -> bool:
        """Whether a running prefill is about to publish more of a waiting request's prefix."""
        if request.num_scores is not None and self.enable_caching:
            return self.prompt_scores.is_coming(request)
        return self.coordinator.should_wait(request, found)

    def announce(self, request: Request) -> None:
        """Let running prefills leave what a request that waits would hit; there is no room yet."""
        if self.enable_caching and not request.skip_reading_prefix_cache:
            self.coordinator.announce(request)

    def record_admission(self, request: Request, found: Lookup | None, start: int) -> PrefillStats:
        """Say where the tokens of a request come from that was just admitted.

        Args:
            request: The request; its first step is allocated.
            found: What ``look_up`` found; None: not asked, or not taken for want of room.
            start: Tokens it need not compute, loaded ones included.

        Returns:
            A record whose hits and misses sum to the request's tokens, exactly.
        """
        num_tokens = request.num_tokens
        num_cached = min(start, num_tokens)
        reads_nothing = request.skip_reading_prefix_cache and request.num_scores is None
        if not self.enable_caching or reads_nothing:
            return PrefillStats(num_tokens, num_cached, 0, {BYPASSED: num_tokens - num_cached})
        if request.num_scores is not None:
            self.prompt_scores.admit(request, num_cached)
        if found is None or request.num_scores is not None:
            # What is cached and may not be used is passed over, not missing.
            found = self.coordinator.look_up(request, num_tokens - 1)
        return self.coordinator.make_record(request, found, num_cached)

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
        if num_new_tokens <= 0 and num_external_computed_tokens == 0:
            raise ValueError("num_new_tokens must be greater than 0 without external tokens")
        start = request.num_computed_tokens + num_external_computed_tokens
        start = min(start + num_new_computed_tokens, self.max_model_len)
        main_end = start + num_new_tokens
        alloc_end = min(main_end + num_lookahead_tokens, self.max_model_len)
        is_ready = self.coordinator.is_ready
        if not full_sequence_must_fit and is_ready(request, start, main_end, alloc_end):
            return self.empty_kv_cache_blocks
        lookup = None
        if new_computed_blocks is not None:
            lookup = Lookup(new_computed_blocks, num_new_computed_tokens)
        step = StepRequest(
            request,
            start,
            main_end,
            min(main_end, request.num_tokens),
            alloc_end,
            lookup,
            num_external_computed_tokens,
            num_encoder_tokens,
            delay_cache_blocks,
        )
        return self._fit(step, reserved_blocks, full_sequence_must_fit)

    def _fit(self, step: StepRequest, num_reserved: int, must_fit: bool) -> KVCacheBlocks | None:
        """Plan a step and commit it if it fits beside ``num_reserved`` free blocks."""
        coordinator, pool = self.coordinator, self.block_pool
        if must_fit:
            num_available = pool.get_num_free_blocks() - num_reserved
            if coordinator.num_blocks_in_full(step) > num_available:
                return None
        # Even if the step does not fit: these blocks are of no use to the request any more.
        if coordinator.advance(step):
            return self.empty_kv_cache_blocks
        num_available = pool.get_num_free_blocks() - num_reserved
        plan = coordinator.plan(step, num_available)
        if plan.num_blocks > num_available:
            return None
        try:
            new_blocks = coordinator.commit(plan)
        except NoFreeBlocksError as refusal:
            # What was counted as free is not given: the request waits, the others go on.
            request_id = step.request.request_id
            logger.warning("No blocks for a step of request %s: %s", request_id, refusal)
            return None
        return self.create_kv_cache_blocks(new_blocks)

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Cache the request's full blocks, if caching is on; after a delayed allocation."""
        if self.enable_caching:
            self.coordinator.cache_blocks(request, num_computed_tokens)

    def cache_rows(self, request: Request, num_tokens: int) -> None:
        """Cache dense rows that a connector has written: where windows can be rebuilt, they hit."""
        if self.enable_caching:
            self.coordinator.cache_rows(request, num_tokens)

    def free(self, request: Request) -> None:
        """Give all blocks of a request back; what is cached stays cached until reused."""
        self.coordinator.free(request.request_id)
        self.prompt_scores.pause(request)

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
        if not self.coordinator.reset_prefix_cache():
            return False
        self.prompt_scores.reset()
        if self.prefix_cache_stats is not None:
            self.prefix_cache_stats.reset = True
        return True

    # ---- the edges of schedule() -------------------------------------------------------------

    def new_step_starts(self) -> None:
        """Begin a ``schedule()``."""
        self.coordinator.new_step_starts()

    def take_step_work(self) -> StepWork:
        """Drain what the worker must know before it runs the step."""
        work = self.coordinator.take_step_work()
        if self._zeroes_blocks:
            blocks = [*(work.new_block_ids or ()), *self.take_new_block_ids()]
            work = replace(work, new_block_ids=blocks)
        return work

    def take_new_block_ids(self) -> list[int]:
        """Drain the ids of blocks taken in this step, for a worker that zeroes them."""
        return self.coordinator.take_new_block_ids()

    def take_events(self) -> list[AnyKVCacheEvent]:
        """Drain the KV events, with the kind and the window of each stored block's group."""
        events = self.block_pool.take_events()
        for event in events:
            if not isinstance(event, BlockStored) or event.group_idx is None:
                continue
            if not 0 <= event.group_idx < len(self._group_descriptions):
                logger.warning("Group index `%s` not in KV cache metadata", event.group_idx)
                continue
            kind, window = self._group_descriptions[event.group_idx]
            event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window = kind, window
        return events

    # ---- what other engines read, and write into it ------------------------------------------

    def export_prefix(self, name: str, request: Request) -> PrefixBlocks | None:
        """Hold a request's longest cached prefix for another engine, until ``release_export``.

        Returns:
            Where its rows lie; None, with nothing held, if none is cached.
        """
        if not self.enable_caching:
            return None
        return self.coordinator.export_prefix(name, request)

    def release_export(self, name: str) -> bool:
        """Let go of an exported prefix; False if there is none of the name."""
        return self.coordinator.exports.release(name)

    # ---- queries and statistics --------------------------------------------------------------

    def make_prefix_cache_stats(self) -> PrefixCacheStats | None:
        """Return the statistics gathered since the last call and begin anew; None if off."""
        stats = self.prefix_cache_stats
        if stats is not None:
            self.prefix_cache_stats = PrefixCacheStats()
        return stats

    @property
    def usage(self) -> float:
        """The share of blocks that requests hold, 0..1."""
        return self.block_pool.get_usage()

    def can_ever_fit(self, request: Request) -> bool:
        """Whether the pool could run the request alone, at its full length."""
        num_tokens = min(request.num_prompt_tokens + request.max_tokens, self.max_model_len)
        num_usable = self.block_pool.num_gpu_blocks - 1 - self.block_pool.num_reserved_blocks
        return self.coordinator.max_blocks_of(num_tokens) <= num_usable

    def num_blocks_to_finish_prompt(self, request: Request) -> int:
        """Return the blocks that a request in prefill, or loading, will still take."""
        length = min(request.num_tokens, self.max_model_len)
        step = StepRequest(request, request.num_computed_tokens, length, length, length)
        return self.coordinator.num_blocks_in_full(step)

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

    def check_invariants(self, num_computed: dict[str, int] | None = None) -> None:
        """Check I1..I5; see ``vllm.v1.core.invariants``.

        Args:
            num_computed: Tokens computed and accepted by request, for I5; None leaves I5 out.

        Raises:
            InvariantError: One does not hold.
        """
        check_cache(self.coordinator, num_computed)


class SharedKVCacheManager(KVCacheManager):
    """The manager of a pool of which tenants have shares: what is kept for others is not free."""

    def _fit(self, step: StepRequest, num_reserved: int, must_fit: bool) -> KVCacheBlocks | None:
        pool = self.block_pool
        assert isinstance(pool, SharedPool), "shares are of pools that hit at one unit"
        pool.serve(step.request.tenant)
        return super()._fit(step, num_reserved + pool.num_kept, must_fit)
