"""All KV cache groups of a model together: the coordinator of hits at one unit, and the choice.

A step of one request goes through ``plan`` (what to take; changes nothing) and ``commit`` (touch
the hit's blocks, take new ones, record copies). Keys and checkpoints become visible only when
``schedule()`` ends, from what was really allocated in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import chain, islice
from math import inf
from typing import TYPE_CHECKING, cast

from typing_extensions import override

from vllm import envs
from vllm.exceptions import ConfigError, NoFreeBlocksError
from vllm.utils.hashing import BlockHash
from vllm.v1.core.coordinator_interface import Coordinator
from vllm.v1.core.pool.exports import Exports, PlacedCheckpoint, PrefixBlocks
from vllm.v1.core.prefix.drafter_rows import drop_stale
from vllm.v1.core.prefix.held import HeldPrefixes
from vllm.v1.core.prefix.located import list_checkpoints, locate_rows
from vllm.v1.core.prefix.lookup import find_prefix, first_output, hit_tables
from vllm.v1.core.prefix.prefix_cache import PrefixCache
from vllm.v1.core.prefix.publication import Publisher
from vllm.v1.core.prefix.rebuilds import Rebuilds, prefer_rebuild
from vllm.v1.core.prefix.records import explain_misses
from vllm.v1.core.prefix.request_cache import Pending, RequestCache
from vllm.v1.core.prefix.session_rows import SessionRows
from vllm.v1.core.prefix.step_planner import StepPlanner
from vllm.v1.core.prefix.waiting import DonorWaits
from vllm.v1.core.retention.sizes import max_request_blocks
from vllm.v1.core.retention.standing import CheckpointStanding
from vllm.v1.core.single_type_kv_cache_manager import DenseTable, LiveWindow
from vllm.v1.core.values.cache_settings import CacheSettings, StaleRow
from vllm.v1.core.values.cache_step import (
    NO_WORK,
    BlockCopy,
    FirstStep,
    Lookup,
    RowBounds,
    StepPlan,
    StepRequest,
    StepWork,
)
from vllm.v1.core.values.free_block_queue import KVCacheBlock
from vllm.v1.core.values.hit import Checkpoint, PrefixHit
from vllm.v1.core.values.kv_cache_blocks import KVCacheBlocks
from vllm.v1.core.whole_block.coordinator import (
    HybridKVCacheCoordinator,
    KVCacheCoordinator,
    KVCacheCoordinatorNoPrefixCache,
    UnitaryKVCacheCoordinator,
)
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.messages import BYPASSED, HeldPrefix, PrefillStats
from vllm.v1.metrics.stats import CachePolicyStats

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_metrics import KVCacheMetricsCollector
    from vllm.v1.request import Request

__all__ = [
    "CheckpointCoordinator",
    "HybridKVCacheCoordinator",
    "KVCacheCoordinator",
    "KVCacheCoordinatorNoPrefixCache",
    "UnitaryKVCacheCoordinator",
    "get_kv_cache_coordinator",
    "make_coordinator",
]


class CheckpointCoordinator(Coordinator):
    """The groups of one model over one pool.

    Owns: what is cached (``prefixes``), every request's ``RequestCache``.

    Args:
        settings: Groups, sizes and switches; ``hit_unit`` is set.

    Raises:
        ConfigError: Block sizes, the pool or the retention interval do not fit the model.
    """

    # Window rows below a token are given back once it is passed.
    resumes_anywhere = False

    def __init__(self, settings: CacheSettings) -> None:
        self.settings = settings
        self.prefixes = prefixes = PrefixCache(settings)
        self.geometry, self.policy = prefixes.geometry, prefixes.policy
        self.block_pool, self.index, self.store = prefixes.pool, prefixes.index, prefixes.store
        self._publisher = Publisher(prefixes)
        self._planner = StepPlanner(prefixes, settings)
        self.requests: dict[str, RequestCache] = {}
        # Requests that this schedule() changed, in the order of their first change.
        self._changed: dict[str, RequestCache] = {}
        self._ends_in_flight: list[KVCacheBlock] = []
        self._waiting = DonorWaits(prefixes, self.requests, self._changed)
        self._rebuilds = Rebuilds(self.geometry)
        # Requests some of whose layers leave rows out now.
        self._lazy: dict[str, RequestCache] = {}
        self.exports = Exports(self.block_pool)
        self.held: HeldPrefixes = HeldPrefixes(prefixes)
        self._session_rows = SessionRows(self.block_pool.blocks)
        self._num_steps = 0
        # Blocks that unpublished requests gave back, to be zeroed before the next step.
        self._scrubs = envs.VLLM_SCRUB_UNCACHED
        self._to_zero: list[int] = []
        # Blocks of rows that were left out, which somebody reads where they are masked.
        self._to_blank: list[int] = []
        # Requests whose rows of this schedule() others may already have been given.
        self._promised: set[str] = set()
        self._no_blocks: tuple[list[KVCacheBlock], ...] = tuple([] for _ in self.geometry.groups)

    @classmethod
    def arrange(cls, config: KVCacheConfig) -> KVCacheConfig:
        """Return a config with what this class decides about its groups: the core's nothing.

        A platform's class may say here how much checkpoints keep of a group (``extra_rows``). Asked
        where the KV cache is planned, so that workers and scheduler have the same geometry.

        Raises:
            ConfigError: It cannot coordinate these groups.
        """
        return config

    # ---- lookup ------------------------------------------------------------------------------

    def look_up(self, request: Request, max_tokens: int) -> Lookup:
        """Find the deepest boundary at most ``max_tokens`` where all groups can resume."""
        if self._changed and self.geometry.shares_whole_blocks:
            # Nobody is preempted once a request that waits is looked up: these steps run.
            self._promised.update(self._publish_pending())
        index, geometry, block_hashes = self.index, self.geometry, request.block_hashes
        output_from = first_output(geometry, request)
        hit = find_prefix(index, geometry, block_hashes, max_tokens, output_from)
        if self.settings.stale_row is StaleRow.DROP:
            find = partial(find_prefix, index, geometry, block_hashes, output_from=output_from)
            hit = drop_stale(geometry, hit, request.following_tokens, find)
        if self.policy.rebuild_tokens is not None:
            hit = prefer_rebuild(index, geometry, self.policy.rebuild_tokens, block_hashes, hit)
        blocks: list[Sequence[KVCacheBlock]] = [()] * len(geometry.groups)
        for group, full in zip(geometry.dense, hit.full_blocks, strict=True):
            blocks[group.group_id] = full
        return Lookup(KVCacheBlocks(tuple(blocks), hit), hit.start)

    def make_record(self, request: Request, found: Lookup, num_cached_tokens: int) -> PrefillStats:
        """Say where an admitted request's tokens come from, and learn from it."""
        hit = found.hit
        assert hit is not None
        cache = self.requests.get(request.request_id)
        if cache is not None and cache.is_loading:
            # Of what is loaded nothing is missed.
            dense_match = max(hit.dense_match, num_cached_tokens)
            hit = replace(
                hit,
                position=num_cached_tokens,
                dense_match=dense_match,
                given_up=0,
                rebuild=None,
                num_saved_tokens=0,
            )
        misses = explain_misses(
            self.index, self.geometry, request.block_hashes, request.num_tokens, hit
        )
        if hit.start > num_cached_tokens:
            # Admitted without its hit because the pool was too full for it.
            unused = hit.start - num_cached_tokens
            misses[BYPASSED] = misses.get(BYPASSED, 0) + unused
        leaves_little = request.skip_cache_insert or request.is_spare
        if request.num_preemptions == 0 and not leaves_little:
            self.prefixes.observe(request)
            self._note_need(request, hit)
        return PrefillStats(
            request.num_tokens,
            num_cached_tokens,
            hit.dense_match,
            misses,
            rebuild_saved_tokens=hit.num_saved_tokens if num_cached_tokens else 0,
        )

    def _note_need(self, request: Request, hit: PrefixHit) -> None:
        """Tell the policy of a request that partial checkpoints do not serve, or would not."""
        reach, needed = self.geometry.lazy_reach, hit.passed
        lost = 0 if needed is None else needed.position - hit.position
        if needed is None and not hit.is_partial and hit.checkpoint is not None:
            # Of full ones the first hit counts: it would have left such a one itself.
            is_first = hit.checkpoint.num_hits == 1
            is_short = hit.position + reach >= first_output(self.geometry, request)
            needed, lost = hit.checkpoint, reach if is_first and is_short else 0
        if needed is not None and lost > 0:
            self.policy.note_need(
                needed.kind, needed.num_behind, lost, is_partial=needed.is_partial
            )

    @override
    def claim(self, request: Request) -> None:
        hit = self.look_up(request, request.num_tokens - 1).hit
        assert hit is not None
        # Tables of windows first, and each from its end: the beginning serves others too.
        tables = reversed(hit_tables(self.geometry, hit))
        blocks = chain.from_iterable(reversed(blocks) for _, blocks in tables)
        self.block_pool.claims.claim(request.request_id, blocks)

    @override
    def should_wait(self, request: Request, found: Lookup) -> bool:
        return self._waiting.should_wait(request, found, self._num_steps)

    @override
    def announce(self, request: Request) -> None:
        self._waiting.announce(request)

    # ---- one step of one request -------------------------------------------------------------

    @override
    def num_blocks_in_full(self, step: StepRequest) -> int:
        length = min(step.request.num_tokens, self.settings.max_model_len)
        needed = max_request_blocks(self.geometry, length, self.settings.num_lookahead_tokens)
        cache = self._admitted(step)
        if cache is not None:
            needed -= sum(len(table.blocks) for table in cache.dense)
            # It advances into these, or gives them back; what others hold too stays theirs.
            live = (block for window in cache.windows for block in window.blocks)
            needed -= sum(block.ref_cnt == 1 and not block.is_null for block in live)
        if step.lookup is not None and step.lookup.hit is not None:
            full = step.lookup.hit.full_blocks
            needed -= sum(block.ref_cnt > 0 for blocks in full for block in blocks)
        return needed

    def is_ready(self, request: Request, start: int, main_end: int, alloc_end: int) -> bool:
        """Whether a step stays inside the blocks and the unit that its request is at."""
        cache = self.requests.get(request.request_id)
        if cache is None or alloc_end > cache.ready_until:
            return False
        published = cache.published
        unit = self.geometry.unit
        begin = published.num_units * unit
        # Nothing accepted lies beyond main_end, so nothing is to be published either.
        return begin <= start and main_end < begin + unit and published.unfollowed is None

    @override
    def advance(self, step: StepRequest) -> bool:
        cache = self._admitted(step)
        if cache is None:
            return False
        if cache.published.unfollowed is not None:
            self._publisher.follow(cache)
        publishes = self._planner.publishes(step)
        if self.settings.enable_caching:
            self._publisher.publish_accepted(cache)
        if step.alloc_end <= cache.ready_until and not publishes:
            return True
        num_accepted = cache.num_accepted
        passed = [block for w in cache.windows for block in w.drop_below(num_accepted)]
        if passed:
            self._note_private(cache, passed)
            self._publisher.give_back(cache, passed)
        return False

    def _admitted(self, step: StepRequest) -> RequestCache | None:
        cache = self.requests.get(step.request.request_id)
        return cache if cache is not None and cache.is_admitted else None

    def plan(self, step: StepRequest, num_available: int) -> StepPlan:
        """Work out what a step takes; see ``StepPlanner``."""
        return self._planner.plan(self._admitted(step), step, num_available)

    def commit(self, plan: StepPlan) -> tuple[list[KVCacheBlock], ...]:
        """Apply a plan that fits the pool.

        Returns:
            Per group the new dense blocks (adopted ones left out); empty for window groups.

        Raises:
            NoFreeBlocksError: The pool refuses all the same; a first step's hit was let go again.
        """
        request_id = plan.step.request.request_id
        claims = self.block_pool.claims
        if plan.first is not None:
            was_claimed = request_id in claims
            self._begin(plan.step.request, plan.first)
            # What it took of its hit is held by now.
            claims.release(request_id)
        cache = self.requests[request_id]
        is_short = plan.is_short and not plan.num_new_blocks
        if is_short and not plan.step.delays_caching and not cache.is_unannounced:
            cache.set_ready(plan.step.alloc_end)
            return self._no_blocks
        try:
            taken = iter(self.block_pool.get_new_blocks(plan.num_new_blocks))
        except NoFreeBlocksError:
            if plan.first is not None:
                self._take_back(cache, plan.first)
                if was_claimed:
                    self.claim(cache.request)
            raise
        cache.is_unannounced = plan.step.delays_caching
        if plan.step.delays_caching:
            cache.dense_from = cache.published.num_units * self.geometry.unit
        self._changed[request_id] = cache
        if plan.first is not None:
            self._take_copies(cache, plan.first, taken)
        new_blocks = self._no_blocks
        if any(plan.num_dense):
            new_blocks = tuple([] for _ in self.geometry.groups)
            for table, count in zip(cache.dense, plan.num_dense, strict=True):
                blocks = list(islice(taken, count))
                table.blocks += blocks
                new_blocks[table.geometry.group_id].extend(blocks)
        hit = plan.first.hit if plan.first is not None else None
        for window, indices in zip(cache.windows, plan.window_indices, strict=True):
            blocks = list(islice(taken, len(indices)))
            window.insert(indices, blocks)
            if hit is not None and hit.is_partial and window.geometry.lazy_reach:
                below = window.geometry.rows_below(hit.position)
                self._to_blank += [
                    block.block_id
                    for index, block in zip(indices, blocks, strict=True)
                    if index in below
                ]
        cache.ready_until = 0
        if plan.is_short:
            cache.set_ready(plan.step.alloc_end)
        if plan.publishes:
            cache.pending = Pending(plan.step.start, plan.step.end, plan.boundaries, plan.spares)
        return new_blocks

    def _begin(self, request: Request, first: FirstStep) -> None:
        """Give a request its tables; hold all that its hit needs, before any block is taken."""
        pool, hit = self.block_pool, first.hit
        cache = RequestCache(
            request,
            is_admitted=True,
            dense=tuple(DenseTable(group) for group in self.geometry.dense),
            windows=tuple(LiveWindow(group, pool.null_block) for group in self.geometry.windows),
            is_resumed=request.num_preemptions > 0,
        )
        # Admitted later than it began to wait, perhaps: last in the order of admission.
        self.requests.pop(request.request_id, None)
        self.requests[request.request_id] = cache
        cache.published.wanted = first.wanted
        cache.published.junctions = first.junctions
        cache.full_from = first.full_from
        if first.full_from:
            self._lazy[request.request_id] = cache
        if hit is None:
            return
        cache.published.num_units = hit.position // self.geometry.unit
        for table, blocks in zip(cache.dense, hit.full_blocks, strict=True):
            pool.touch(blocks)
            table.blocks = list(blocks)
        for adoption in first.partials:
            pool.touch([adoption.block])
        adopted = [*chain.from_iterable(hit.full_blocks), *(a.block for a in first.partials)]
        if not request.is_spare:
            # Behind what takes them out of their tiers.
            self.index.note_used(adopted)
        self._session_rows.note_hit(adopted, request.session)
        for adoption in first.partials:
            if not adoption.is_copy:
                cache.dense[adoption.dense_index].blocks.append(adoption.block)
        if hit.rebuild is not None:
            self._rebuilds.begin(cache, hit.rebuild)
        if hit.checkpoint is not None:
            self._resume_at(hit.checkpoint, cache, first)

    def _take_back(self, cache: RequestCache, first: FirstStep) -> None:
        """Undo ``_begin`` of a request for which there are no blocks: it waits again."""
        request_id = cache.request.request_id
        del self.requests[request_id]
        self._rebuilds.end(request_id)
        self._lazy.pop(request_id, None)
        sources = [adoption.block for adoption in first.partials if adoption.is_copy]
        held = chain(sources, *(reversed(table.blocks) for table in cache.tables()))
        # As if preempted: the conversation is at the same turn, and supersedes nothing.
        self.store.leave((), cache.origins, request_id, held, again=True)

    def _resume_at(self, checkpoint: Checkpoint, cache: RequestCache, first: FirstStep) -> None:
        """Give a request the window rows of a checkpoint."""
        lean = first.hit.lean_checkpoint if first.hit is not None else None
        cache.origins = tuple(r for r in (checkpoint, lean) if r is not None)
        if first.parts_at_hit:
            self.store.mark_junction(checkpoint)
        for window, window_blocks in zip(cache.windows, checkpoint.blocks, strict=True):
            if checkpoint.is_partial and window.geometry.lazy_reach:
                continue
            self.block_pool.touch(window_blocks)
            window.adopt(checkpoint.position, window_blocks)
        request = cache.request
        self.store.hit(checkpoint, lean, request.request_id, request.session)

    def _take_copies(
        self, cache: RequestCache, first: FirstStep, taken: Iterator[KVCacheBlock]
    ) -> None:
        """Give the hit's partly covered blocks, and what is made anew, a private copy.

        A destination is held by the table and, until the copy ran, by the copy itself.
        """
        for adoption in first.partials:
            if adoption.is_copy:
                block, table = next(taken), cache.dense[adoption.dense_index]
                self.block_pool.touch([block])
                group_id = table.geometry.group_id
                cache.copies.append(BlockCopy(group_id, adoption.block, block, adoption.keys))
                table.blocks.append(block)
        for index in first.rebuilt:
            block, window = next(taken), cache.windows[index]
            # The table's hold on the source becomes the copy's.
            source = window.replace_last(block)
            self.block_pool.touch([block])
            cache.copies.append(BlockCopy(window.geometry.group_id, source, block, ()))
            cache.rebuilt_block_id = source.block_id

    # ---- the edges of schedule() -------------------------------------------------------------

    def new_step_starts(self) -> None:
        """Begin a ``schedule()``: the previous step's copies have run."""
        self._num_steps += 1
        if self.held.next_deadline < inf:
            self.held.expire()
        if self._ends_in_flight:
            self.block_pool.free_blocks(self._ends_in_flight)
            self._ends_in_flight = []

    @override
    def commit_step(self) -> None:
        if not self._changed:
            return
        for cache in self._changed.values():
            self._publisher.publish_copies(cache)
        self._publish_pending()
        self._promised.clear()

    def _publish_pending(self) -> list[str]:
        """Publish what the steps that are allocated will have computed; return whose they are."""
        published = []
        for request_id, cache in self._changed.items():
            pending, cache.pending = cache.pending, None
            if pending is None:
                continue
            published.append(request_id)
            self._publisher.publish(cache, pending.end, pending.boundaries, pending.spares)
            if self.prefixes.pinning is not None:
                self._publisher.pin_window(cache, pending.start, pending.end)
        return published

    def take_step_work(self) -> StepWork:
        """Drain what the worker must know; the ends of copies stay held until they have run."""
        row_bounds = self._rebuilds.take_row_bounds() if self._rebuilds.running else {}
        if self._lazy:
            self._bound_outputs(row_bounds)
        if not self._changed and not row_bounds:
            return NO_WORK
        blank, self._to_blank = self._to_blank, []
        work = StepWork(row_bounds=row_bounds, new_block_ids=blank or None)
        for request_id, cache in self._changed.items():
            for copy in cache.copies:
                work.copies.append((copy.source.block_id, copy.destination.block_id))
                self._ends_in_flight += (copy.source, copy.destination)
            cache.copies = []
            if cache.rebuilt_block_id is not None:
                work.drafter_rebuilds[request_id] = cache.rebuilt_block_id
                cache.rebuilt_block_id = None
            tables = () if cache.is_unannounced else tuple(cache.take_window_tables())
            if tables:
                work.window_tables[request_id] = tables
            if cache.spared_until:
                self._publisher.give_back(cache, cache.take_spared())
        self._changed.clear()
        return work

    def _bound_outputs(self, row_bounds: dict[str, RowBounds]) -> None:
        """Say from where on requests' outputs are read, until all of their rows are.

        Mutates:
            row_bounds.
        """
        for request_id, cache in tuple(self._lazy.items()):
            if cache.request.num_computed_tokens >= cache.full_from:
                del self._lazy[request_id]
                continue
            bounds = row_bounds.get(request_id, RowBounds(write_from=()))
            row_bounds[request_id] = replace(bounds, output_from=cache.full_from)

    # ---- prefixes that other engines read and write ----------------------------------------------

    def export_prefix(self, name: str, request: Request) -> PrefixBlocks | None:
        """Hold the longest prefix that can be resumed for another engine to read."""
        max_tokens = request.num_prompt_tokens - 1
        hit = find_prefix(self.index, self.geometry, request.block_hashes, max_tokens)
        if not hit.position:
            return None
        tables = hit_tables(self.geometry, hit)
        self.exports.hold(name, [blocks for _, blocks in tables])
        ids = tuple(tuple(block.block_id for block in blocks) for _, blocks in tables)
        bases = tuple(base for base, _ in tables)
        next_token = None if hit.checkpoint is None else hit.checkpoint.next_token
        return PrefixBlocks(hit.position, 0, bases, ids, next_token)

    def list_checkpoints(
        self, block_hashes: Sequence[BlockHash], end: int
    ) -> Sequence[PlacedCheckpoint]:
        """Return the checkpoints in the first ``end`` tokens of a prompt."""
        return list_checkpoints(self.index, self.geometry, block_hashes, end)

    @override
    def find_standing(
        self, block_hashes: Sequence[BlockHash], position: int
    ) -> CheckpointStanding | None:
        record = self.index.checkpoints.get(block_hashes[position // self.geometry.unit - 1])
        return None if record is None else record.standing

    def locate_rows(
        self, block_hashes: Sequence[BlockHash], first: int, end: int
    ) -> PrefixBlocks | None:
        """Return where the dense rows of tokens ``[first, end)`` lie."""
        return locate_rows(self.index, self.geometry, block_hashes, first, end)

    @override
    def locate_checkpoint(
        self, block_hashes: Sequence[BlockHash], position: int, dense_from: int
    ) -> PrefixBlocks | None:
        if not self.geometry.windows:
            return self.locate_rows(block_hashes, dense_from, position)
        record = self.index.checkpoints.get(block_hashes[position // self.geometry.unit - 1])
        if record is None:
            return None
        return locate_rows(self.index, self.geometry, block_hashes, dense_from, position, record)

    @override
    def find_import(
        self,
        request: Request,
        num_tokens: int,
        num_external_tokens: int,
        next_token: int | None = None,
    ) -> PrefixBlocks:
        cache = self.requests[request.request_id]
        assert cache.dense_from is not None, "the request does not load"
        cache.check_alone()
        cache.loaded_next_token = next_token
        bases = [0] * len(self.geometry.groups)
        ids: list[tuple[int, ...]] = [()] * len(self.geometry.groups)
        for table in cache.dense:
            ids[table.geometry.group_id] = tuple(block.block_id for block in table.blocks)
        for window in cache.windows:
            bases[window.geometry.group_id] = window.base
            ids[window.geometry.group_id] = tuple(window.block_ids)
        return PrefixBlocks(num_tokens, cache.dense_from, tuple(bases), tuple(ids))

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Publish a prefix that a connector has written, with its checkpoint."""
        cache = self.requests[request.request_id]
        if cache.is_loading:
            cache.check_alone()
            cache.dense_from = None
            if request.skip_cache_insert:
                return
            boundaries = (num_computed_tokens,) if self.geometry.windows else ()
            self._publisher.publish(cache, num_computed_tokens, boundaries)
            if cache.loaded_next_token is not None:
                self._publisher.note_loaded(cache, num_computed_tokens, cache.loaded_next_token)

    def cache_rows(self, request: Request, num_tokens: int) -> None:
        """Publish dense rows that a connector has written, without a checkpoint."""
        cache = self.requests[request.request_id]
        if cache.is_loading:
            cache.check_alone()
            cache.dense_from = None
            if not request.skip_cache_insert:
                self._publisher.publish(cache, num_tokens, ())

    @property
    @override
    def rebuild_tokens(self) -> int | None:
        return self.policy.rebuild_tokens

    # ---- the rest of a coordinator's face ----------------------------------------------------

    def chunk_end(self, request: Request, num_new_tokens: int) -> int:
        """Shorten a prefill chunk that does not finish the prompt to a lean boundary, if it can."""
        start = request.num_computed_tokens
        return self.geometry.chunk_end(start, start + num_new_tokens, request.num_tokens) - start

    @override
    def free(self, request_id: str) -> None:
        assert request_id not in self._promised, "others were given rows of a step that runs"
        self.block_pool.claims.release(request_id)
        cache = self.requests.pop(request_id, None)
        self._changed.pop(request_id, None)
        self._rebuilds.end(request_id)
        self._lazy.pop(request_id, None)
        if cache is None or not cache.is_admitted:
            return
        if self.settings.enable_caching and not cache.is_loading:
            self._publisher.publish_accepted(cache)
        self._publisher.follow(cache)
        if cache.request.cache_ttls:
            self.held.note_end(cache)
        if cache.request.is_spare:
            self._publisher.spare_trailing(cache)
        pool = self.block_pool
        for copy in cache.copies:
            pool.free_blocks((copy.source, copy.destination))
        made = [*cache.published.kept, *cache.published.trailing]
        tables = cache.tables()
        # A sequence's tail is reused before its head.
        held = chain.from_iterable(reversed(table.blocks) for table in tables)
        replays: Sequence[int] = ()
        if self.policy.supersedes_at_once:
            replays = self.policy.prompt_boundaries(cache.request.num_prompt_tokens)
        self._note_private(cache, chain.from_iterable(table.blocks for table in tables))
        if cache.request.session is not None:
            dense_blocks = chain.from_iterable(table.blocks for table in cache.dense)
            self._session_rows.note_left(dense_blocks, cache.request.session)
        # Who leaves nothing does not go on with a conversation, as far as the cache can tell.
        again = cache.is_resumed or cache.request.skip_cache_insert
        self.store.leave(
            made,
            cache.origins,
            request_id,
            held,
            again=again,
            replays=replays,
            session=cache.request.session,
        )

    def _note_private(self, cache: RequestCache, blocks: Iterable[KVCacheBlock]) -> None:
        """Have what only an unpublished request wrote zeroed, before it gives the blocks back."""
        if not (self._scrubs and cache.request.skip_cache_insert):
            return
        holds = Counter(block.block_id for block in cache.held_blocks())
        holds.update(block.block_id for block in self._ends_in_flight)
        own = [b for b in blocks if not b.is_null and not self.index.is_cached(b)]
        # A block that lost its keys while others held it is theirs.
        self._to_zero += [b.block_id for b in own if b.ref_cnt <= max(holds[b.block_id], 1)]

    def get_num_common_prefix_blocks(self, running_request_id: str) -> list[int]:
        """Return 0 for each group: nothing is computed from what requests share."""
        del running_request_id
        return [0] * len(self._no_blocks)

    def get_blocks(self, request_id: str) -> tuple[Sequence[KVCacheBlock], ...]:
        """Return per group the dense blocks; window groups have tables of their own."""
        blocks: list[Sequence[KVCacheBlock]] = [() for _ in self.geometry.groups]
        cache = self.requests.get(request_id)
        for table in cache.dense if cache is not None else ():
            blocks[table.geometry.group_id] = table.blocks
        return tuple(blocks)

    @override
    def find_first_token(self, request_id: str, block_ids: Collection[int]) -> int | None:
        cache = self.requests.get(request_id)
        places = () if cache is None else cache.list_places()
        return min((token for token, block_id in places if block_id in block_ids), default=None)

    @override
    def list_blocks_from(self, request_id: str, num_tokens: int) -> set[int]:
        cache = self.requests.get(request_id)
        places = () if cache is None else cache.list_places(num_tokens)
        return {block_id for _, block_id in places}

    @override
    def max_blocks_of(self, num_tokens: int) -> int:
        return max_request_blocks(self.geometry, num_tokens, self.settings.num_lookahead_tokens)

    def reset_prefix_cache(self) -> bool:
        """Forget everything cached and what was learnt of it; False while blocks are held."""
        self.new_step_starts()
        done = self.prefixes.reset()
        if done:
            self.held.clear()
            self._session_rows.clear()
        return done

    @override
    def held_prefixes(self) -> Sequence[HeldPrefix]:
        return tuple(self.held.describe())

    @override
    def forget_prefix(self, name: str) -> bool:
        return self.held.forget(name)

    def end_session(self, session: int) -> int:
        """Make spare what only a session used, pins included.

        Returns:
            How many checkpoints these are; where no layer has a window, how many blocks.
        """
        ended = self.store.end_session(session)
        self.held.release(ended)
        rows = self._session_rows.list_own(session)
        self.block_pool.rejoin(rows, lambda: self.index.note_spare(rows))
        return len(ended) if self.geometry.windows else len(rows)

    def take_new_block_ids(self) -> list[int]:
        """Drain the blocks that held what nobody may read again."""
        taken, self._to_zero = self._to_zero, []
        return taken

    def remove_skipped_blocks(self, request_id: str, total_computed_tokens: int) -> None:
        """Do nothing: ``advance`` gives back what was passed."""

    @override
    def policy_stats(self) -> CachePolicyStats | None:
        return self.prefixes.policy_stats()

    def find_faults(self, num_computed: Mapping[str, int]) -> Iterator[tuple[str, str]]:
        """Say which checkpoints are too short, or pinned and gone (I4), which rows missing (I5)."""
        for fault in self.store.find_faults(self.geometry):
            yield "I4", fault
        for request_id, computed in num_computed.items():
            for fault in self.requests[request_id].find_uncovered(computed):
                yield "I5", fault

    @override
    def held_blocks(self) -> Iterator[KVCacheBlock]:
        yield from self._ends_in_flight
        for cache in self.requests.values():
            yield from cache.held_blocks()
        yield from self.exports.held_blocks()


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
) -> Coordinator:
    """Build a coordinator from the interface's arguments; see ``make_coordinator``."""
    settings = CacheSettings(
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
    return make_coordinator(settings)


def make_coordinator(settings: CacheSettings) -> Coordinator:
    """Build the coordinator for a configuration: ``hit_unit``, caching and groups choose, once.

    A platform may have a class of its own.

    Raises:
        ConfigError: (a ValueError) Blocks, pool or retention interval do not fit the model.
    """
    config = settings.kv_cache_config
    if config.hit_unit is not None:
        return find_coordinator_class(config.coordinator_path)(settings)
    if not settings.enable_caching:
        return KVCacheCoordinatorNoPrefixCache(settings)
    if len(config.kv_cache_groups) == 1:
        return UnitaryKVCacheCoordinator(settings)
    return HybridKVCacheCoordinator(settings)


def find_coordinator_class(path: str | None) -> type[CheckpointCoordinator]:
    """Return the class that a platform names; None: the core's.

    Raises:
        ConfigError: There is no such class.
    """
    if path is None:
        return CheckpointCoordinator
    module, _, name = path.rpartition(".")
    try:
        return cast("type[CheckpointCoordinator]", getattr(import_module(module), name))
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"The platform's KV cache coordinator {path!r} cannot be imported: {error}. Name a "
            "class by its dotted path in kv_cache_coordinator_path()."
        ) from error


def as_served(coordinator: Coordinator) -> CheckpointCoordinator:
    """Return an engine's coordinator to those who look at what is cached."""
    assert isinstance(coordinator, CheckpointCoordinator), "an engine's models hit at one unit"
    return coordinator
