"""What the scheduler talks to when a hybrid model hits at one unit (``KVCacheConfig.hit_unit``)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from vllm.distributed.kv_events import BlockStored, KVCacheEvent
from vllm.exceptions import ConfigError
from vllm.logger import init_logger
from vllm.v1.core.drafter_rows import StaleRow, drop_stale, has_stale_row
from vllm.v1.core.invariants import check_unit_cache
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.prefix_lookup import (
    BYPASSED,
    PrefixHit,
    explain_misses,
)
from vllm.v1.core.retention import (
    CacheGeometry,
    max_request_blocks,
    replay_boundaries,
    step_boundaries,
)
from vllm.v1.core.sched.output import WindowTable
from vllm.v1.core.unit_coordinator import UnitKVCacheCoordinator
from vllm.v1.engine.messages import PrefillStats
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
)
from vllm.v1.request import Request

logger = init_logger(__name__)

# Waiting costs a step, so it must save more than a step of a short prompt would take.
_MIN_DONOR_GAIN_TOKENS = 128
# A wait is given up after this many steps, and one more for each so many tokens to come.
_DONOR_STEPS = 4
_DONOR_TOKENS_PER_STEP = 256


class HitBlocks(KVCacheBlocks):
    """A prefix hit on its way from the lookup to the allocation. Holds no block yet."""

    def __init__(self, blocks: tuple[Sequence[Any], ...], hit: PrefixHit) -> None:
        super().__init__(blocks)
        self.hit = hit


def check_room_for_one(
    geometry: CacheGeometry, num_blocks: int, max_model_len: int, max_lookahead: int
) -> None:
    """Refuse a pool that cannot hold the longest request alone.

    Raises:
        ConfigError: It cannot.
    """
    needed = max_request_blocks(geometry, max_model_len, max_lookahead)
    if num_blocks - 1 < needed:
        raise ConfigError(
            f"The KV cache has {num_blocks - 1} usable blocks, but one request of max seq len "
            f"{max_model_len} needs {needed}: give more memory (--kv-cache-memory-bytes, "
            "VLLM_CPU_KVCACHE_SPACE, --gpu-memory-utilization, --num-gpu-blocks-override) or "
            "lower --max-model-len."
        )


@dataclass(frozen=True, slots=True)
class PendingPublication:
    """What a request's step will have computed, published when ``schedule()`` ends."""

    request: Request
    start: int
    end: int
    boundaries: tuple[int, ...]
    spare: tuple[int, ...] = ()


class UnitKVCacheManager:
    """Allocation, hits and publication for hybrid models.

    Owns: the coordinator, publications of the current ``schedule()``, admission records.

    Args:
        kv_cache_config: Groups, number of blocks and ``hit_unit``.
        max_model_len: Longest request in tokens.
        enable_caching: Whether prefixes are kept and looked up.
        max_lookahead: Draft tokens a step may need slots for.
        stale_row: What becomes of a drafter's row that another next token made.

    Raises:
        ConfigError: The pool cannot hold one request of ``max_model_len`` tokens.
    """

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        max_model_len: int,
        *,
        enable_caching: bool = True,
        max_lookahead: int = 0,
        coordinator: UnitKVCacheCoordinator | None = None,
        stale_row: StaleRow = StaleRow.REBUILD,
    ) -> None:
        self.coordinator = coordinator or UnitKVCacheCoordinator(kv_cache_config, enable_caching)
        self.policy = self.coordinator.policy
        self.geometry = self.coordinator.geometry
        self.block_pool = self.coordinator.block_pool
        self.kv_cache_config = kv_cache_config
        self.enable_caching = enable_caching
        self.max_model_len = max_model_len
        self.num_kv_cache_groups = len(self.geometry.groups)
        self.empty_kv_cache_blocks = KVCacheBlocks(tuple(() for _ in self.geometry.groups))
        self._max_lookahead = max_lookahead
        self._stale_row = stale_row
        self._pending: dict[str, PendingPublication] = {}
        self._prefill_stats: dict[str, PrefillStats] = {}
        # Requests whose prompt is not published yet: others may wait for them.
        self._prefilling: dict[str, Request] = {}
        self._wait_deadlines: dict[str, int] = {}
        self._step = 0
        check_room_for_one(self.geometry, kv_cache_config.num_blocks, max_model_len, max_lookahead)

    # ---- counts ------------------------------------------------------------------------------

    @property
    def usage(self) -> float:
        """The share of blocks that requests hold, 0..1."""
        return self.block_pool.get_usage()

    def can_ever_fit(self, request: Request) -> bool:
        """Whether the pool could run the request alone, at its full length."""
        length = min(self.max_model_len, request.num_prompt_tokens + request.max_tokens)
        needed = max_request_blocks(self.geometry, length, self._max_lookahead)
        return needed < self.block_pool.num_gpu_blocks

    def take_prefill_stats(self, request_id: str) -> PrefillStats | None:
        """Drain the record of a request's last admission."""
        return self._prefill_stats.pop(request_id, None)

    # ---- lookup ------------------------------------------------------------------------------

    def get_computed_blocks(self, request: Request) -> tuple[KVCacheBlocks, int]:
        """Find the longest reusable prefix; at least the last token is always left to compute.

        Returns:
            The hit, to be handed to ``allocate_slots``, and its tokens. Takes no block.
        """
        num_dense = len(self.geometry.dense)
        if not self.enable_caching or request.skip_reading_prefix_cache:
            hit = PrefixHit.nothing(num_dense)
        else:
            hit = self._find_hit(request)
        blocks: list[Sequence[Any]] = [() for _ in self.geometry.groups]
        for group, full in zip(self.geometry.dense, hit.full_blocks, strict=True):
            blocks[group.group_id] = full
        return HitBlocks(tuple(blocks), hit), hit.position

    def _find_hit(self, request: Request) -> PrefixHit:
        find = partial(self.coordinator.find_longest_cache_hit, request.block_hashes)
        hit = find(request.num_tokens - 1)
        if self._stale_row is StaleRow.DROP:
            hit = drop_stale(self.geometry, hit, request.all_token_ids, find)
        return hit

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
            num_external_computed_tokens: Tokens a connector loads; none can here.
            delay_cache_blocks: Publish nothing for this step.
            num_encoder_tokens: Encoder tokens; none here.
            full_sequence_must_fit: Refuse unless the whole prompt will fit.
            reserved_blocks: Free blocks that are spoken for.

        Returns:
            The new dense blocks by group, or None when the pool is too full; then no block was
            taken.

        Raises:
            ValueError: There is nothing to compute.
        """
        if num_new_tokens <= 0:
            raise ValueError("num_new_tokens must be greater than 0")
        assert num_external_computed_tokens == 0
        assert num_encoder_tokens == 0
        request_id = request.request_id
        is_new = not self.coordinator.has_request(request_id)
        hit = self._hit_of(new_computed_blocks, num_new_computed_tokens) if is_new else None
        start = request.num_computed_tokens + num_new_computed_tokens
        step_end = min(start + num_new_tokens, self.max_model_len)
        # Drafts are not known to be accepted: only tokens the request has may be published.
        end = min(step_end, request.num_tokens)
        alloc_end = min(step_end + num_lookahead_tokens, self.max_model_len)
        unit = self.geometry.unit
        publishes = self.enable_caching and not delay_cache_blocks and end // unit > start // unit
        if not is_new:
            self.coordinator.note_next_token(request_id, request.all_token_ids)
            self._publish_accepted(request)
        if not is_new and not publishes and not full_sequence_must_fit:
            available = self.block_pool.get_num_free_blocks() - reserved_blocks
            advanced = self.coordinator.try_advance(
                request_id, _num_accepted(request), end, alloc_end, self.max_model_len, available
            )
            if advanced is not None:
                return KVCacheBlocks(advanced)
        wanted, junctions = self._wanted_boundaries(request, new_computed_blocks, is_new=is_new)
        boundaries: tuple[int, ...] = ()
        if publishes:
            interval = self.coordinator.interval
            boundaries = step_boundaries(self.geometry, start, end, wanted, interval)
        if not is_new:
            self.coordinator.release_passed(request_id, _num_accepted(request))
        rebuilds = (
            hit is not None
            and self._stale_row is StaleRow.REBUILD
            and has_stale_row(self.geometry, hit, request.all_token_ids)
        )
        plan = self.coordinator.plan_step(
            request_id, start, end, alloc_end, boundaries, hit, rebuilds_drafter_row=rebuilds
        )
        available = self.block_pool.get_num_free_blocks() - reserved_blocks
        spare: tuple[int, ...] = ()
        if self.coordinator.adaptation is not None and publishes:
            spare = self.coordinator.find_spare(
                request.block_hashes,
                start,
                min(end, request.num_prompt_tokens),
                boundaries,
                plan.num_new_blocks,
                request.num_prompt_tokens,
            )
        if spare:
            boundaries = tuple(sorted((*boundaries, *spare)))
            larger = self.coordinator.plan_step(
                request_id, start, end, alloc_end, boundaries, hit, rebuilds_drafter_row=rebuilds
            )
            if larger.num_new_blocks + larger.num_blocks_touched <= available:
                plan = larger
            else:
                spare, boundaries = (), plan.boundaries
        needed = plan.num_new_blocks + plan.num_blocks_touched
        if full_sequence_must_fit:
            needed = max(needed, self._full_sequence_blocks(request, hit))
        if needed > available:
            return None
        is_resumed = request.num_preemptions > 0
        new_blocks = self.coordinator.commit(request_id, plan, is_resumed=is_resumed)
        if is_new:
            self.coordinator.want_boundaries(request_id, wanted, are_junctions=False)
            self.coordinator.want_boundaries(request_id, junctions, are_junctions=True)
            self._prefilling[request_id] = request
        if publishes:
            self._pending[request_id] = PendingPublication(request, start, end, boundaries, spare)
        if is_new:
            self._record_admission(request, hit, new_computed_blocks)
        return KVCacheBlocks(new_blocks)

    def _publish_accepted(self, request: Request) -> None:
        """Publish what drafts accepted since the last publication completed.

        A step publishes the tokens known when it is scheduled. Drafts that it proves right are
        computed by then, so their boundaries must not wait until the window moves on, or the
        request ends. ``request`` holds tables.
        """
        # Tokens behind a stop are computed, but no part of the request.
        end = min(_num_accepted(request), request.num_tokens)
        first = self.coordinator.num_published_units(request.request_id) * self.geometry.unit
        if not self.enable_caching or end < first + self.geometry.unit:
            return
        wanted = self.coordinator.wanted_boundaries(request.request_id)
        self.coordinator.publish(
            request.request_id,
            request.block_hashes,
            request.all_token_ids,
            end,
            step_boundaries(self.geometry, first, end, wanted, self.coordinator.interval),
            request.cache_salt,
        )

    def _wanted_boundaries(
        self, request: Request, looked_up: KVCacheBlocks | None, *, is_new: bool
    ) -> tuple[set[int], set[int]]:
        """Return the boundaries whose checkpoints a request keeps, and which are junctions."""
        if not is_new:
            return self.coordinator.wanted_boundaries(request.request_id), set()
        lean = self.policy.keeps_lean
        wanted = set(
            replay_boundaries(
                self.geometry,
                request.num_prompt_tokens,
                keeps_lean=lean,
                keeps_coarse=self.policy.keeps_coarse,
            )
        )
        junctions: set[int] = set()
        if self.policy.keeps_junctions and isinstance(looked_up, HitBlocks):
            position = self._find_junction(request, looked_up.hit)
            junctions = {p for p in (position, self.geometry.floor_lean(position)) if p > 0}
            if not lean:
                junctions &= {position}
        return wanted | junctions, junctions

    def _find_junction(self, request: Request, hit: PrefixHit) -> int:
        """Return where a cached continuation parts from a prompt without a checkpoint; 0: nowhere.

        A checkpoint that stands there already becomes a junction: it is not superseded any more.
        """
        num_units = hit.dense_match // self.geometry.unit
        if num_units == 0:
            return 0
        hashes = request.block_hashes
        following = hashes[num_units] if num_units < len(hashes) else None
        if not self.block_pool.has_other_continuation(hashes[num_units - 1], following):
            return 0
        if hit.checkpoint is not None and hit.position == hit.dense_match:
            hit.checkpoint.is_junction = True
            self.block_pool.set_cold(hit.checkpoint, False)
            return 0
        return hit.dense_match

    # ---- waiting for a running donor ---------------------------------------------------------

    def should_wait(self, request: Request, looked_up: KVCacheBlocks) -> bool:
        """Whether a running prefill is about to publish more of a waiting request's prefix.

        The donor is asked to leave a checkpoint where the two part. Waiting is bounded in steps, so
        a donor that does not get on holds nobody up for long.
        """
        if not self.enable_caching or not isinstance(looked_up, HitBlocks):
            return False
        if request.skip_reading_prefix_cache:
            return False
        first = looked_up.hit.dense_match // self.geometry.unit
        donor, shared_units = self._find_donor(request, first)
        gain = shared_units * self.geometry.unit - looked_up.hit.position
        if donor is None or gain < _MIN_DONOR_GAIN_TOKENS:
            self._wait_deadlines.pop(request.request_id, None)
            return False
        limit = self._step + _DONOR_STEPS + gain // _DONOR_TOKENS_PER_STEP
        if self._step >= self._wait_deadlines.setdefault(request.request_id, limit):
            return False
        self._ask_donor(donor, shared_units * self.geometry.unit)
        return True

    def _ask_donor(self, donor: Request, position: int) -> None:
        """Let a running prefill leave checkpoints where a waiting request parts from it."""
        request_id = donor.request_id
        asked = {p for p in (position, self.geometry.floor_lean(position)) if p > 0}
        new = asked - self.coordinator.wanted_boundaries(request_id)
        self.coordinator.want_boundaries(request_id, asked, are_junctions=True)
        pending = self._pending.get(request_id)
        if pending is None:
            return
        # The donor's chunk of this very schedule() is allocated already, but not computed.
        inside = {p for p in new if pending.start < p <= pending.end} - set(pending.boundaries)
        added = [p for p in sorted(inside) if self.coordinator.try_add_boundary(request_id, p)]
        if added:
            boundaries = tuple(sorted({*pending.boundaries, *added}))
            self._pending[request_id] = replace(pending, boundaries=boundaries)

    def _find_donor(self, request: Request, first: int) -> tuple[Request | None, int]:
        """Return the prefill that shares most beyond what is published, and the units shared."""
        best, best_units = None, 0
        hashes = request.block_hashes
        limit = (request.num_tokens - 1) // self.geometry.unit
        for donor in self._prefilling.values():
            theirs = donor.block_hashes
            if self.coordinator.num_published_units(donor.request_id) != first:
                continue
            units = first
            end = min(limit, donor.num_prompt_tokens // self.geometry.unit)
            while units < end and theirs[units] == hashes[units]:
                units += 1
            if units > first and units > best_units:
                best, best_units = donor, units
        return best, best_units

    @staticmethod
    def _hit_of(blocks: KVCacheBlocks | None, num_tokens: int) -> PrefixHit | None:
        if num_tokens == 0 or blocks is None:
            return None
        assert isinstance(blocks, HitBlocks), "hits come from get_computed_blocks"
        assert blocks.hit.position == num_tokens, "a hit is taken whole or not at all"
        return blocks.hit

    def _full_sequence_blocks(self, request: Request, hit: PrefixHit | None) -> int:
        """Return the free blocks a request would use until its prompt is computed."""
        length = min(request.num_tokens, self.max_model_len)
        needed = max_request_blocks(self.geometry, length, self._max_lookahead)
        if hit is not None:
            shared = sum(block.ref_cnt > 0 for blocks in hit.full_blocks for block in blocks)
            needed -= shared
        return needed

    def _record_admission(
        self, request: Request, hit: PrefixHit | None, looked_up: KVCacheBlocks | None
    ) -> None:
        """Commit the lookup's outcome once, now that the request is admitted."""
        num_tokens = request.num_tokens
        if not self.enable_caching or request.skip_reading_prefix_cache:
            cached, matched, misses = 0, 0, {BYPASSED: num_tokens}
        else:
            found = looked_up.hit if isinstance(looked_up, HitBlocks) else self._find_hit(request)
            cached, matched = (hit.position if hit else 0), found.dense_match
            misses = explain_misses(
                self.block_pool, self.geometry, request.block_hashes, num_tokens, found
            )
            if found.position > cached:
                # Admitted without its hit because the pool was too full for it.
                misses[BYPASSED] = misses.get(BYPASSED, 0) + found.position - cached
        if self.enable_caching and request.num_preemptions == 0:
            self.coordinator.observe(request.block_hashes, request.num_prompt_tokens)
        self._prefill_stats[request.request_id] = PrefillStats(num_tokens, cached, matched, misses)

    def chunk_end(self, request: Request, num_new_tokens: int) -> int:
        """Shorten a prefill chunk that does not finish the prompt to a lean boundary, if it can."""
        start = request.num_computed_tokens
        end = self.geometry.chunk_end(start, start + num_new_tokens, request.num_tokens)
        return end - start

    # ---- the edges of schedule() -------------------------------------------------------------

    def new_step_starts(self) -> None:
        """Begin a ``schedule()``: the previous step's copies have run."""
        self._step += 1
        self.coordinator.release_copies()

    def commit_step(self) -> None:
        """End a ``schedule()``: publish what it allocated."""
        self.coordinator.publish_copies()
        for request_id, pending in self._pending.items():
            request = pending.request
            self.coordinator.publish(
                request_id,
                request.block_hashes,
                request.all_token_ids,
                pending.end,
                pending.boundaries,
                request.cache_salt,
                pending.spare,
            )
            if self.policy.pinned_share is not None:
                hashes = request.block_hashes
                self.coordinator.pin_window(request_id, hashes, pending.start, pending.end)
            if pending.end >= self.geometry.floor_unit(request.num_prompt_tokens):
                self._prefilling.pop(request_id, None)
        self._pending.clear()

    def take_block_copies(self) -> list[tuple[int, int]]:
        """Drain the (source, destination) block ids the step must copy before its forward pass."""
        return self.coordinator.take_copies()

    def take_drafter_rebuilds(self) -> dict[str, int]:
        """Drain the requests whose drafter makes its hit's last row anew; see the coordinator."""
        return self.coordinator.take_drafter_rebuilds()

    def take_window_tables(self) -> dict[str, tuple[WindowTable, ...]]:
        """Drain the window tables that changed, by request."""
        return self.coordinator.take_window_tables()

    # ---- the rest of the manager's face ------------------------------------------------------

    def free(self, request: Request) -> None:
        """Give back everything a request holds; what it published stays cached."""
        if self.coordinator.has_request(request.request_id):
            self._publish_accepted(request)
            self.coordinator.note_next_token(request.request_id, request.all_token_ids)
        self._pending.pop(request.request_id, None)
        self._prefilling.pop(request.request_id, None)
        self._wait_deadlines.pop(request.request_id, None)
        self.coordinator.free(request.request_id)

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """Return a request's dense blocks by group."""
        blocks: list[Sequence[Any]] = [() for _ in self.geometry.groups]
        for group in self.coordinator.dense:
            blocks[group.geometry.group_id] = group.tables.get(request_id, ())
        return KVCacheBlocks(tuple(blocks))

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """Return a request's dense block ids by group; empty lists for window groups."""
        return self.coordinator.get_block_ids(request_id)

    def get_num_common_prefix_blocks(self, running_request_id: str) -> list[int]:
        """Return zeros: attention here does not share work between requests."""
        return [0] * self.num_kv_cache_groups

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Do nothing: prefixes are published by ``commit_step``."""

    def create_kv_cache_blocks(self, blocks: tuple[list[Any], ...]) -> KVCacheBlocks:
        """Wrap blocks by group."""
        return KVCacheBlocks(blocks) if any(blocks) else self.empty_kv_cache_blocks

    def take_events(self) -> list[KVCacheEvent]:
        """Drain the KV events, with the kind and the window of each stored prefix's group."""
        events = self.block_pool.take_events()
        for event in events:
            if isinstance(event, BlockStored) and event.group_idx is not None:
                spec = self.kv_cache_config.kv_cache_groups[event.group_idx].kv_cache_spec
                event.kv_cache_spec_kind = get_kv_cache_spec_kind(spec).value
                event.kv_cache_spec_sliding_window = get_kv_cache_spec_sliding_window(spec)
        return events

    def take_new_block_ids(self) -> list[int]:
        """Return no ids: no group needs its new blocks zeroed."""
        return []

    def reset_prefix_cache(self) -> bool:
        """Forget everything cached; False while requests hold blocks."""
        self.coordinator.release_copies()
        done = self.coordinator.reset_prefix_cache()
        if not done:
            logger.warning(
                "The prefix cache was not reset: %.1f%% of the KV blocks are in use.",
                100 * self.usage,
            )
        return done

    def check_invariants(self, num_computed: dict[str, int] | None = None) -> None:
        """Check I1..I5.

        Args:
            num_computed: Tokens computed and accepted by request, for I5; None leaves I5 out.

        Raises:
            InvariantError: One does not hold.
        """
        check_unit_cache(self.coordinator, num_computed)

    @property
    def max_concurrency(self) -> float:
        """How many requests of full length the pool can hold."""
        needed = max_request_blocks(self.geometry, self.max_model_len, self._max_lookahead)
        return (self.block_pool.num_gpu_blocks - 1) / needed

    @property
    def num_cacheable_tokens(self) -> int:
        """About how many tokens of dense rows the pool can hold."""
        per_token = sum(1 / group.block_size for group in self.geometry.dense)
        return int((self.block_pool.num_gpu_blocks - 1) / per_token) if per_token else 0


def _num_accepted(request: Request) -> int:
    """Return the computed tokens that stand, whatever the steps in flight bring."""
    return request.num_computed_tokens - request.num_output_placeholders
