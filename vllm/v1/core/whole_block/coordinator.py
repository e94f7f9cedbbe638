"""The coordinators of hits at whole blocks, by vLLM 0.23's rules and under its names.

They serve code written against that interface. The models of an engine hit at one unit:
``vllm.v1.core.kv_cache_coordinator.CheckpointCoordinator``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from typing_extensions import override

from vllm.exceptions import NoFreeBlocksError
from vllm.utils.hashing import BlockHash
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.coordinator_interface import Coordinator
from vllm.v1.core.pool.exports import Exports, PlacedCheckpoint, PrefixBlocks
from vllm.v1.core.retention.pinning import PinSettings, log_pins, resolve_pins
from vllm.v1.core.retention.standing import CheckpointStanding
from vllm.v1.core.values.cache_settings import CacheSettings
from vllm.v1.core.values.cache_step import NO_WORK, Lookup, StepPlan, StepRequest, StepWork
from vllm.v1.core.values.free_block_queue import KVCacheBlock
from vllm.v1.core.values.kv_cache_blocks import KVCacheBlocks
from vllm.v1.core.whole_block.lookup import HybridLookup
from vllm.v1.core.whole_block.managers import SlidingWindowManager
from vllm.v1.core.whole_block.masks import num_window_tail_blocks, resolve_retention_interval
from vllm.v1.core.whole_block.records import whole_block_prefill_stats
from vllm.v1.core.whole_block.registration import get_manager_for_kv_cache_spec

if TYPE_CHECKING:
    from vllm.v1.messages import HeldPrefix, PrefillStats
    from vllm.v1.metrics.stats import CachePolicyStats
    from vllm.v1.request import Request


class KVCacheCoordinator(Coordinator):
    """The groups of one model, with hits at whole blocks.

    Owns: the pool, the managers of the groups.

    Args:
        settings: Groups, sizes and switches.

    Raises:
        ConfigError: (a ValueError) The retention interval does not fit the model.
    """

    resumes_anywhere = True

    def __init__(self, settings: CacheSettings) -> None:
        self.settings = settings
        self.kv_cache_config = settings.kv_cache_config
        self.max_model_len = settings.max_model_len
        self.enable_caching = settings.enable_caching
        self.scheduler_block_size = settings.scheduler_block_size
        self.hash_block_size = settings.hash_block_size
        groups = self.kv_cache_config.kv_cache_groups
        retention_interval = resolve_retention_interval(
            settings.retention,
            has_window_groups=any(g.kv_cache_spec.window_tokens is not None for g in groups),
            scheduler_block_size=settings.scheduler_block_size,
        )
        self.eagle_group_ids = {i for i, group in enumerate(groups) if group.is_eagle_group}
        if settings.use_eagle and not self.eagle_group_ids:
            self.eagle_group_ids = set(range(len(groups)))
        pool = BlockPool(
            num_gpu_blocks=self.kv_cache_config.num_blocks,
            enable_caching=settings.enable_caching,
            hash_block_size=settings.hash_block_size,
            enable_kv_cache_events=settings.enable_kv_cache_events,
            metrics_collector=settings.metrics_collector,
        )
        self.block_pool = pool
        self.single_type_managers = tuple(
            get_manager_for_kv_cache_spec(
                group.kv_cache_spec,
                max_num_batched_tokens=settings.max_num_batched_tokens,
                max_model_len=settings.max_model_len,
                block_pool=pool,
                enable_caching=settings.enable_caching,
                kv_cache_group_id=group_id,
                scheduler_block_size=settings.scheduler_block_size,
                dcp_world_size=settings.dcp_world_size,
                pcp_world_size=settings.pcp_world_size,
            )
            for group_id, group in enumerate(settings.kv_cache_config.kv_cache_groups)
        )
        # Most groups need all their blocks as long as the request lives.
        self._dropping_managers = tuple(
            manager for manager in self.single_type_managers if manager.drops_skipped_blocks
        )
        self._stepping_managers = tuple(m for m in self.single_type_managers if m.minds_steps)
        # Of all groups: cleared in every step.
        self._taken_blocks: list[KVCacheBlock] = []
        for manager in self.single_type_managers:
            manager.taken_blocks = self._taken_blocks
        self.exports = Exports(pool)
        self.retention_interval = retention_interval
        assert settings.scheduler_block_size % settings.hash_block_size == 0
        for group_id, manager in enumerate(self.single_type_managers):
            manager.use_eagle = group_id in self.eagle_group_ids
            assert settings.scheduler_block_size % manager.block_size == 0, (
                f"The scheduler's block size {settings.scheduler_block_size} is no multiple of "
                f"group {group_id}'s block size {manager.block_size}."
            )
        self._no_hits: tuple[Sequence[KVCacheBlock], ...] = ((),) * len(groups)
        pinning = resolve_pins(self.kv_cache_config) if settings.enable_caching else None
        if pinning is not None:
            self._enable_pinning(pinning)

    def _enable_pinning(self, pinning: PinSettings) -> None:
        """Let window groups pin."""
        window_managers = [
            manager
            for manager in self.single_type_managers
            if isinstance(manager, SlidingWindowManager)
        ]
        if not window_managers:
            return
        num_blocks = self.block_pool.num_gpu_blocks - 1
        self.block_pool.enable_pinning(int(num_blocks * pinning.share))
        shapes = [(m.sliding_window, m.block_size, m.use_eagle) for m in window_managers]
        kept = [m.block_size for m in self.single_type_managers if m.is_downward_closed]
        num_tokens = int(num_blocks / sum(1 / size for size in kept)) if kept else 0
        window_blocks = sum(num_window_tail_blocks(*shape) for shape in shapes)
        log_pins(pinning, num_blocks, window_blocks, num_tokens)
        for manager in window_managers:
            manager.pin_min_drop_blocks = pinning.min_drop_blocks

    # ---- what managers do, for all groups --------------------------------------------------------

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

    @override
    def get_blocks(self, request_id: str) -> tuple[list[KVCacheBlock], ...]:
        return tuple(
            manager.req_to_blocks.get(request_id, []) for manager in self.single_type_managers
        )

    @override
    def find_first_token(self, request_id: str, block_ids: Collection[int]) -> int | None:
        found = [
            index * manager.block_size
            for manager in self.single_type_managers
            for index, block in enumerate(manager.req_to_blocks.get(request_id, ()))
            if block.block_id in block_ids
        ]
        return min(found, default=None)

    @override
    def list_blocks_from(self, request_id: str, num_tokens: int) -> set[int]:
        return {
            block.block_id
            for manager in self.single_type_managers
            for block in manager.req_to_blocks.get(request_id, ())[
                num_tokens // manager.block_size :
            ]
        }

    @override
    def get_num_common_prefix_blocks(self, running_request_id: str) -> list[int]:
        return [
            manager.get_num_common_prefix_blocks(running_request_id)
            for manager in self.single_type_managers
        ]

    def new_step_starts(self) -> None:
        """Begin a scheduling step."""
        self._taken_blocks.clear()
        for manager in self._stepping_managers:
            manager.new_step_starts()

    # ---- what only hits at one unit have ---------------------------------------------------------

    def claim(self, request: Request) -> None:
        """Claim nothing: one queue in the order of use is what the interface knows."""

    def should_wait(self, request: Request, found: Lookup) -> bool:
        """Wait for nobody."""
        return False

    def announce(self, request: Request) -> None:
        """Ask nobody: every full block is left."""

    def is_ready(self, request: Request, start: int, main_end: int, alloc_end: int) -> bool:
        """Return False: every step is planned."""
        return False

    def chunk_end(self, request: Request, num_new_tokens: int) -> int:
        """Let chunks end anywhere."""
        return num_new_tokens

    def commit_step(self) -> None:
        """Do nothing: steps are published as they are allocated."""

    def take_step_work(self) -> StepWork:
        """Return nothing: no copies, and no tables but those that are given out."""
        return NO_WORK

    def held_prefixes(self) -> Sequence[HeldPrefix]:
        """Return none: that cannot be asked for."""
        return ()

    def forget_prefix(self, name: str) -> bool:
        """Return False: there is none."""
        return False

    def end_session(self, session: int) -> int:
        """Return 0: nothing is known of sessions."""
        del session
        return 0

    def policy_stats(self) -> CachePolicyStats | None:
        """Return None: nothing is learnt."""
        return None

    def find_faults(self, num_computed: Mapping[str, int]) -> Iterator[tuple[str, str]]:
        """Find none beyond what the index sees."""
        yield from ()

    @override
    def reset_prefix_cache(self) -> bool:
        return self.block_pool.reset_prefix_cache()

    def cache_rows(self, request: Request, num_tokens: int) -> None:
        """Publish full blocks that a connector has written."""
        self.cache_blocks(request, num_tokens)

    @property
    def rebuild_tokens(self) -> int | None:
        """None: windows are never computed again."""
        return None

    @override
    def export_prefix(self, name: str, request: Request) -> PrefixBlocks | None:
        found = self.look_up(request, request.num_prompt_tokens - 1)
        if not found.num_tokens:
            return None
        self.exports.hold(name, found.blocks.blocks)
        ids = tuple(tuple(group) for group in found.blocks.get_block_ids())
        return PrefixBlocks(found.num_tokens, 0, (0,) * len(ids), ids)

    @override
    def find_import(
        self,
        request: Request,
        num_tokens: int,
        num_external_tokens: int,
        next_token: int | None = None,
    ) -> PrefixBlocks:
        tables = self.get_blocks(request.request_id)
        ids = tuple(tuple(block.block_id for block in table) for table in tables)
        return PrefixBlocks(num_tokens, num_tokens - num_external_tokens, (0,) * len(ids), ids)

    def list_checkpoints(
        self, block_hashes: Sequence[BlockHash], end: int
    ) -> Sequence[PlacedCheckpoint]:
        """Return nothing: there are none."""
        return ()

    def find_standing(
        self, block_hashes: Sequence[BlockHash], position: int
    ) -> CheckpointStanding | None:
        """Return None: there are no checkpoints."""
        return None

    def locate_rows(
        self, block_hashes: Sequence[BlockHash], first: int, end: int
    ) -> PrefixBlocks | None:
        """Return None: what hits at whole blocks is not kept elsewhere."""
        return None

    def locate_checkpoint(
        self, block_hashes: Sequence[BlockHash], position: int, dense_from: int
    ) -> PrefixBlocks | None:
        """Return None: there are no checkpoints."""
        return None

    # ---- one step of one request -------------------------------------------------------------

    def look_up(self, request: Request, max_tokens: int) -> Lookup:
        """Find the longest cached prefix of at most ``max_tokens``."""
        blocks, num_tokens = self.find_longest_cache_hit(request.block_hashes, max_tokens)
        return Lookup(KVCacheBlocks(blocks), num_tokens)

    def make_record(self, request: Request, found: Lookup, num_cached_tokens: int) -> PrefillStats:
        """Give every token of an admitted request one source; nothing is known of evictions."""
        return whole_block_prefill_stats(
            num_tokens=request.num_tokens,
            num_cached_tokens=num_cached_tokens,
            granularity=self.scheduler_block_size,
            num_found_tokens=found.num_tokens,
        )

    @override
    def num_blocks_in_full(self, step: StepRequest) -> int:
        num_tokens = min(step.request.num_tokens, self.max_model_len)
        return self.get_num_blocks_to_allocate(
            step.request.request_id,
            num_tokens,
            self._hits(step),
            step.num_encoder_tokens,
            step.start,
            num_tokens,
            apply_admission_cap=True,
        )

    def _hits(self, step: StepRequest) -> Sequence[Sequence[KVCacheBlock]]:
        return self._no_hits if step.lookup is None else step.lookup.blocks.blocks

    def advance(self, step: StepRequest) -> bool:
        """Free the blocks no later token of the request attends to, even if the step won't fit."""
        for manager in self._dropping_managers:
            manager.remove_skipped_blocks(step.request.request_id, step.start)
        return False

    def plan(self, step: StepRequest, num_available: int) -> StepPlan:
        """Count what a step takes; the managers choose the blocks."""
        num_blocks = self.get_num_blocks_to_allocate(
            step.request.request_id,
            step.alloc_end,
            self._no_hits if step.lookup is None else step.lookup.blocks.blocks,
            step.num_encoder_tokens,
            step.start,
            step.main_end,
        )
        return StepPlan(step, num_blocks, num_blocks)

    def commit(self, plan: StepPlan) -> tuple[Sequence[KVCacheBlock], ...]:
        """Adopt the hit, take blocks, and cache what the step fills.

        Raises:
            NoFreeBlocksError: The pool refuses all the same; a new request holds nothing then, one
                that has tables what it held.
        """
        request_id = plan.step.request.request_id
        is_known, num_taken = self.has_request(request_id), len(self._taken_blocks)
        try:
            new_blocks = self._take(plan, is_known=is_known)
        except NoFreeBlocksError:
            if is_known:
                self._give_back(request_id, self._taken_blocks[num_taken:])
            else:
                self.free(request_id)
            del self._taken_blocks[num_taken:]
            raise
        caches = self.enable_caching and not plan.step.request.skip_cache_insert
        if caches and not plan.step.delays_caching:
            # Drafts may be rejected: only tokens the request really has are cached.
            self.cache_blocks(plan.step.request, plan.step.end)
        return new_blocks

    def _take(self, plan: StepPlan, *, is_known: bool) -> tuple[Sequence[KVCacheBlock], ...]:
        """Adopt the hit, and take blocks group by group."""
        step = plan.step
        request_id = step.request.request_id
        num_external = step.num_external_tokens
        if step.lookup is not None or num_external > 0:
            hits = self._hits(step)
            if any(hits) or num_external > 0:
                num_local = step.start - num_external
                self.allocate_new_computed_blocks(request_id, hits, num_local, num_external)
        new_blocks: tuple[Sequence[KVCacheBlock], ...] = self._no_hits
        if plan.num_blocks > 0 or not is_known:
            # Most decode steps stay inside the blocks their request has.
            new_blocks = self.allocate_new_blocks(
                request_id, step.alloc_end, step.main_end, step.num_encoder_tokens
            )
        return new_blocks

    def _give_back(self, request_id: str, taken: Sequence[KVCacheBlock]) -> None:
        """Take out of a request's tables what this step put there before a group got nothing."""
        new = set(taken)
        for manager in self.single_type_managers:
            table = manager.req_to_blocks[request_id]
            while table and table[-1] in new:
                table.pop()
        self.block_pool.free_blocks(reversed(taken))

    @override
    def max_blocks_of(self, num_tokens: int) -> int:
        return sum(
            # No request has this id, so nothing it holds is subtracted.
            manager.get_num_blocks_to_allocate("", num_tokens, (), 0, num_tokens, True)
            for manager in self.single_type_managers
        )

    def take_new_block_ids(self) -> list[int]:
        """Drain the ids of blocks taken in this step."""
        block_ids = [block.block_id for block in self._taken_blocks]
        self._taken_blocks.clear()
        return block_ids

    def held_blocks(self) -> Iterator[KVCacheBlock]:
        """Iterate over the blocks of all tables, once per hold."""
        for manager in self.single_type_managers:
            for table in manager.req_to_blocks.values():
                yield from table
        yield from self.exports.held_blocks()

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

    def __init__(self, settings: CacheSettings) -> None:
        super().__init__(settings)
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
            dcp_world_size=self.settings.dcp_world_size,
            pcp_world_size=self.settings.pcp_world_size,
        )
        return hit_blocks, len(hit_blocks[0]) * manager.block_size


class HybridKVCacheCoordinator(KVCacheCoordinator):
    """Groups of at least two specs: a hit must hold in all of them, at a scheduler block's end."""

    def __init__(self, settings: CacheSettings) -> None:
        super().__init__(settings)
        for manager in self.single_type_managers:
            assert manager.block_size % self.hash_block_size == 0, (
                f"Blocks of {manager.block_size} tokens do not divide into hashes of "
                f"{self.hash_block_size}."
            )
        self._lookup = HybridLookup(
            self.single_type_managers,
            self.block_pool,
            alignment_tokens=self.scheduler_block_size,
            context_parallel=(settings.dcp_world_size, settings.pcp_world_size),
        )
        # Groups of one spec are looked up together, so all must cache what a drafter among them
        # needs: they share one mask.
        for manager in self._lookup.eagle_managers:
            manager.use_eagle = True
        # No group is cached less far than one that keeps all its blocks, unless a drafter's is.
        self._last_cached = None
        if not self._lookup.eagle_managers:
            managers = (m for m in self.single_type_managers if m.is_downward_closed)
            self._last_cached = next(managers, None)

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Cache up to the last scheduler block's end; nothing beyond can be hit.

        A drafter's group goes one block on, if it is there: its hits match one block more.
        """
        num_aligned = num_computed_tokens // self.scheduler_block_size * self.scheduler_block_size
        if num_aligned == 0:
            return
        last = self._last_cached
        if last is not None:
            num_cached_blocks = last.num_cached_block.get(request.request_id, 0)
            if num_cached_blocks * last.block_size >= num_aligned:
                # Most steps end no scheduler block.
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
