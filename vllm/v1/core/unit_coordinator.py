"""All KV cache groups of a hybrid model together, with hits at one unit.

A step of one request goes through ``plan_step`` (what to take; changes nothing) and ``commit``
(touch the hit's blocks, take new ones, record copies). Keys and checkpoints become visible only in
``publish``, when ``schedule()`` ends, from what was really allocated in it.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from vllm import envs
from vllm.logger import init_logger
from vllm.v1.core.drafter_rows import can_rebuild
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock
from vllm.v1.core.pinned_tier import pinned_share
from vllm.v1.core.policy.adaptation import Adaptation
from vllm.v1.core.policy.spare import spare_boundaries
from vllm.v1.core.prefix_lookup import PrefixHit, find_prefix
from vllm.v1.core.retention import (
    CacheGeometry,
    GroupGeometry,
    RetentionPolicy,
    max_checkpoint_blocks,
    needed_window_blocks,
    num_dropped_blocks,
    parse_retention,
    trailing_boundaries,
)
from vllm.v1.core.sched.output import WindowTable
from vllm.v1.core.unit_block_pool import Checkpoint, UnitBlockPool
from vllm.v1.core.unit_groups import DenseGroup, WindowGroup
from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger(__name__)


@dataclass(frozen=True, slots=True)
class PartialAdoption:
    """What to do with a partly covered dense block of a hit.

    Attributes:
        dense_index: Position among the dense groups.
        block: The block that holds the rows.
        keys: Its keys at or below the boundary.
        is_copy: Copy it whole into a private block; else take it as it is, because nobody holds
            it and nothing above the boundary is cached in it.
    """

    dense_index: int
    block: KVCacheBlock
    keys: tuple[BlockHash, ...]
    is_copy: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one request's step takes. Making one changes nothing.

    Attributes:
        start: Tokens computed before the step.
        end: Tokens computed after it, drafts not counted.
        boundaries: Boundaries in ``(start, end]`` whose checkpoints the step leaves behind.
        hit: The prefix hit of a request's first step.
        partials: What becomes of the hit's partly covered blocks.
        num_dense_new: Per dense group the blocks to take, copies' destinations left out.
        window_indices: Per window group the block indices to fill.
        num_new_blocks: All of those, copies' destinations included.
        num_blocks_touched: Free blocks that the hit takes out of the tiers.
        rebuilt: Window groups whose last row of the hit is made anew, in a private copy.
    """

    start: int
    end: int
    boundaries: tuple[int, ...]
    hit: PrefixHit | None
    partials: tuple[PartialAdoption, ...]
    num_dense_new: tuple[int, ...]
    window_indices: tuple[tuple[int, ...], ...]
    num_new_blocks: int
    num_blocks_touched: int
    rebuilt: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """A whole-block copy that the next step runs before its forward pass; both ends are held."""

    request_id: str
    group_id: int
    source: KVCacheBlock
    destination: KVCacheBlock
    keys: tuple[BlockHash, ...]


@dataclass(slots=True)
class RequestCacheState:
    """What a request that holds tables has published.

    Attributes:
        num_units: Units whose keys are out, those of its hit included.
        ready_until: Position up to which its tables need no change.
        trailing: Checkpoints it carries along and replaces as it advances.
        wanted: Boundaries it wants kept: replay boundaries and junctions.
        junctions: Those of them where prompts part.
        origin: The checkpoint it resumed at.
        lean_origin: The lean one below that.
        kept: Checkpoints it made that outlive its advance.
        is_resumed: Whether it was preempted before, and goes on with the turn it was at.
        unfollowed: A checkpoint it made before the token that follows was known.
    """

    num_units: int = 0
    ready_until: int = 0
    trailing: list[Checkpoint] = field(default_factory=list)
    wanted: set[int] = field(default_factory=set)
    junctions: set[int] = field(default_factory=set)
    origin: Checkpoint | None = None
    lean_origin: Checkpoint | None = None
    kept: list[Checkpoint] = field(default_factory=list)
    is_resumed: bool = False
    unfollowed: Checkpoint | None = None


class UnitKVCacheCoordinator:
    """The groups of one model over one pool.

    Owns: the pool, the group managers, copies not yet run, what each request has published, what
    was learnt of the traffic.

    Args:
        kv_cache_config: Groups and number of blocks; ``hit_unit`` is set.
        enable_caching: Whether anything is kept for later requests.
        enable_kv_cache_events: Whether stored and removed prefixes are recorded.
        policy: Which checkpoints are kept; None: as the config or the environment says.

    Raises:
        ConfigError: Block sizes or the retention interval do not fit the model.
    """

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        enable_caching: bool,
        policy: RetentionPolicy | None = None,
        enable_kv_cache_events: bool = False,
    ) -> None:
        self.geometry = CacheGeometry.from_config(kv_cache_config)
        if policy is None:
            wanted = kv_cache_config.prefix_cache_retention_interval
            if wanted is None and envs.is_set("VLLM_PREFIX_CACHE_RETENTION_INTERVAL"):
                # The variable's "none" reads as None, which is not the same as leaving it out.
                wanted = envs.VLLM_PREFIX_CACHE_RETENTION_INTERVAL
                wanted = "none" if wanted is None else wanted
            policy = parse_retention(wanted, self.geometry)
            if enable_caching and envs.VLLM_PIN_SWA_TOKENS:
                policy = replace(
                    policy,
                    pinned_share=pinned_share(kv_cache_config),
                    pin_min_drop_blocks=envs.VLLM_PIN_MIN_DROP_SIZE,
                )
        self.policy = policy
        self.block_pool = UnitBlockPool(
            kv_cache_config.num_blocks,
            [group.group_id for group in self.geometry.dense],
            enable_caching,
            [group.group_id for group in self.geometry.windows],
            enable_kv_cache_events,
            max_pinned=self._max_pinned(kv_cache_config.num_blocks),
        )
        pool = self.block_pool
        self.dense = tuple(DenseGroup(g, pool) for g in self.geometry.dense)
        self.windows = tuple(WindowGroup(g, pool) for g in self.geometry.windows)
        self.adaptation: Adaptation | None = None
        if policy.adapts and enable_caching:
            self.block_pool.drops_duplicates = True
            self.adaptation = Adaptation(self.geometry, kv_cache_config.num_blocks - 1)
        # Requests whose step left spare checkpoints, and where it ends.
        self._spared: dict[str, int] = {}
        # Decode steps take blocks for so many tokens at a time. State blocks hold as few as a
        # sixteenth of a unit; going to the pool for each would be most of a decode step's cost.
        self._stride = max(1, self.geometry.unit // 4)
        self.copies: list[BlockCopy] = []
        self._sources_in_flight: list[KVCacheBlock] = []
        # Request -> block of the checkpoint whose last row it makes anew.
        self._rebuilds: dict[str, int] = {}
        self._states: dict[str, RequestCacheState] = {}
        # Requests with window tables that the worker has not seen.
        self._dirty: set[str] = set()
        self._no_blocks: tuple[list[KVCacheBlock], ...] = tuple([] for _ in self.geometry.groups)

    def _max_pinned(self, num_blocks: int) -> int | None:
        """Return how many blocks may be pinned, and say how many prefixes that is good for."""
        share = self.policy.pinned_share
        if share is None:
            return None
        max_pinned = int((num_blocks - 1) * share)
        each = max_checkpoint_blocks(self.geometry)
        logger.info(
            "VLLM_PIN_SWA_TOKENS: up to %d of %d blocks hold pinned windows, room for %d prefixes "
            "of %d blocks",
            max_pinned,
            num_blocks,
            max_pinned // each if each else 0,
            each,
        )
        return max_pinned

    # ---- lookup ------------------------------------------------------------------------------

    def find_longest_cache_hit(
        self, block_hashes: Sequence[BlockHash], max_cache_hit_length: int
    ) -> PrefixHit:
        """Return the deepest boundary at most ``max_cache_hit_length`` where all groups resume."""
        return find_prefix(self.block_pool, self.geometry, block_hashes, max_cache_hit_length)

    # ---- one step of one request -------------------------------------------------------------

    def has_request(self, request_id: str) -> bool:
        """Whether the request holds tables."""
        return request_id in self._states

    def release_passed(self, request_id: str, position: int) -> None:
        """Free the window blocks that going on at ``position`` does not need."""
        for group in self.windows:
            group.drop_below(request_id, position)

    def try_advance(
        self,
        request_id: str,
        accepted: int,
        end: int,
        alloc_end: int,
        limit: int,
        num_available: int,
    ) -> tuple[list[KVCacheBlock], ...] | None:
        """Take the blocks of a short step that completes no boundary, such as a decode step.

        The same as planning and committing, without the parts such a step does not have. Blocks are
        taken for a few steps at a time, but for no position from ``limit`` on; those that going on
        at ``accepted`` does not need are given back.

        Returns:
            Per group the new dense blocks; None if ``num_available`` blocks are too few for that
            or the step needs a plan, and then no block was taken: a plan takes what it must.
        """
        state = self._states[request_id]
        if alloc_end <= state.ready_until:
            return self._no_blocks
        self.release_passed(request_id, accepted)
        ahead = -(-alloc_end // self._stride) * self._stride
        needed = self._find_appended(request_id, end, min(ahead, limit))
        if needed is None or needed[0] > num_available:
            return None
        num_new, num_dense, appended = needed
        taken = iter(self.block_pool.get_new_blocks(num_new))
        new_blocks = self._no_blocks
        if any(num_dense):
            new_blocks = tuple([] for _ in self.geometry.groups)
            for dense, count in zip(self.dense, num_dense, strict=True):
                blocks = [next(taken) for _ in range(count)]
                dense.extend(request_id, blocks)
                new_blocks[dense.geometry.group_id].extend(blocks)
        for window, indices in zip(self.windows, appended, strict=True):
            if indices:
                window.insert(request_id, indices, [next(taken) for _ in indices])
                self._dirty.add(request_id)
        dense_end = min((group.capacity(request_id) for group in self.dense), default=alloc_end)
        window_end = min(group.capacity(request_id) for group in self.windows)
        state.ready_until = min(dense_end, window_end)
        return new_blocks

    def _find_appended(
        self, request_id: str, end: int, alloc_end: int
    ) -> tuple[int, list[int], list[range]] | None:
        """Return the blocks in all, per dense group and by window group that a short step takes."""
        num_dense = [group.num_missing(request_id, alloc_end, 0) for group in self.dense]
        num_new = sum(num_dense)
        appended = []
        for group in self.windows:
            indices = group.find_appended(request_id, end, alloc_end)
            if indices is None:
                return None
            num_new += len(indices)
            appended.append(indices)
        return num_new, num_dense, appended

    def plan_step(
        self,
        request_id: str,
        start: int,
        end: int,
        alloc_end: int,
        boundaries: tuple[int, ...],
        hit: PrefixHit | None,
        *,
        rebuilds_drafter_row: bool = False,
    ) -> StepPlan:
        """Work out what a step takes.

        Args:
            request_id: The request.
            start: Tokens computed before the step, a hit included.
            end: Tokens computed after it, drafts not counted.
            alloc_end: ``end`` with drafts and lookahead.
            boundaries: Boundaries whose checkpoints the step leaves behind.
            hit: The hit of a request that holds nothing yet.
            rebuilds_drafter_row: Whether the drafter's last row of the hit is made anew.
        """
        partials = self._plan_partials(hit) if hit is not None else ()
        num_partial = [0] * len(self.dense)
        for partial in partials:
            num_partial[partial.dense_index] = 1
        num_dense_new = tuple(
            group.num_missing(
                request_id, alloc_end, (len(hit.full_blocks[i]) if hit else 0) + num_partial[i]
            )
            for i, group in enumerate(self.dense)
        )
        window_indices = []
        for group in self.windows:
            geometry = group.geometry
            needed = self._needed_blocks(geometry, start, end, alloc_end, boundaries)
            adopted = range(0)
            if hit is not None and hit.position:
                adopted = geometry.block_range(geometry.first_needed(hit.position), hit.position)
            window_indices.append(tuple(group.find_missing(request_id, needed, adopted)))
        rebuilt = self._plan_rebuilds(hit) if rebuilds_drafter_row else ()
        num_copies = sum(partial.is_copy for partial in partials) + len(rebuilt)
        return StepPlan(
            start=start,
            end=end,
            boundaries=boundaries,
            hit=hit,
            partials=partials,
            num_dense_new=num_dense_new,
            window_indices=tuple(window_indices),
            num_new_blocks=sum(num_dense_new) + sum(map(len, window_indices)) + num_copies,
            num_blocks_touched=self._num_touched(hit),
            rebuilt=rebuilt,
        )

    def _plan_rebuilds(self, hit: PrefixHit | None) -> tuple[int, ...]:
        if hit is None:
            return ()
        groups = enumerate(self.windows)
        return tuple(i for i, group in groups if can_rebuild(group.geometry, hit.position))

    def _needed_blocks(
        self,
        group: GroupGeometry,
        start: int,
        end: int,
        alloc_end: int,
        boundaries: tuple[int, ...],
    ) -> Sequence[int]:
        if self.policy.private_window:
            return needed_window_blocks(group, end, alloc_end, boundaries)
        # As engines do that write every row of a chunk to pages: for comparison only.
        return group.block_range(min(start, group.first_needed(end)), alloc_end)

    def _plan_partials(self, hit: PrefixHit) -> tuple[PartialAdoption, ...]:
        plans = []
        for i, entry in enumerate(hit.partial_blocks):
            if entry is None:
                continue
            block, last_key = entry
            keys = tuple(self.block_pool.keys_of(block))
            below = keys[: keys.index(last_key) + 1]
            is_copy = block.ref_cnt > 0 or len(keys) > len(below)
            plans.append(PartialAdoption(i, block, below, is_copy))
        return tuple(plans)

    @staticmethod
    def _num_touched(hit: PrefixHit | None) -> int:
        if hit is None or hit.checkpoint is None:
            return 0
        blocks = [block for group in hit.full_blocks for block in group]
        blocks += [entry[0] for entry in hit.partial_blocks if entry is not None]
        blocks += hit.checkpoint.all_blocks()
        return len({block.block_id for block in blocks if block.ref_cnt == 0})

    def commit(
        self, request_id: str, plan: StepPlan, *, is_resumed: bool = False
    ) -> tuple[list[KVCacheBlock], ...]:
        """Apply a plan that fits the pool.

        Args:
            request_id: The request.
            plan: What to take.
            is_resumed: Whether the request was preempted before.

        Returns:
            Per group the new dense blocks (adopted ones left out); empty for window groups.
        """
        hit = plan.hit
        if hit is not None and hit.position:
            self._adopt(request_id, hit, plan.partials)
        if request_id not in self._states:
            state = RequestCacheState(plan.start // self.geometry.unit, is_resumed=is_resumed)
            if hit is not None:
                state.origin, state.lean_origin = hit.checkpoint, hit.lean_checkpoint
            self._states[request_id] = state
        self._states[request_id].ready_until = 0
        self._dirty.add(request_id)
        taken = iter(self.block_pool.get_new_blocks(plan.num_new_blocks))
        for partial in plan.partials:
            if partial.is_copy:
                self._add_copy(request_id, partial, next(taken))
        for index in plan.rebuilt:
            self._add_private_tail(request_id, self.windows[index], next(taken))
        new_blocks: tuple[list[KVCacheBlock], ...] = tuple([] for _ in self.geometry.groups)
        for group, count in zip(self.dense, plan.num_dense_new, strict=True):
            blocks = [next(taken) for _ in range(count)]
            group.extend(request_id, blocks)
            new_blocks[group.geometry.group_id].extend(blocks)
        for window, indices in zip(self.windows, plan.window_indices, strict=True):
            window.insert(request_id, indices, [next(taken) for _ in indices])
        return new_blocks

    def try_add_boundary(self, request_id: str, position: int) -> bool:
        """Take the blocks of one more checkpoint inside a chunk that is not computed yet.

        Args:
            request_id: A request whose step was committed in this ``schedule()``.
            position: A boundary inside the step.

        Returns:
            Whether there was room.
        """
        missing = []
        for group in self.windows:
            geometry = group.geometry
            needed = geometry.block_range(geometry.first_needed(position), position)
            missing.append(group.find_missing(request_id, needed, range(0)))
        count = sum(map(len, missing))
        if count > self.block_pool.get_num_free_blocks():
            return False
        taken = iter(self.block_pool.get_new_blocks(count))
        for group, indices in zip(self.windows, missing, strict=True):
            group.insert(request_id, indices, [next(taken) for _ in indices])
        self._dirty.add(request_id)
        return True

    def _adopt(self, request_id: str, hit: PrefixHit, partials: Sequence[PartialAdoption]) -> None:
        """Hold everything the hit needs before any new block is taken."""
        assert hit.checkpoint is not None
        pool = self.block_pool
        for group, blocks in zip(self.dense, hit.full_blocks, strict=True):
            pool.touch(blocks)
            group.adopt(request_id, blocks)
        for partial in partials:
            pool.touch([partial.block])
            if not partial.is_copy:
                self.dense[partial.dense_index].extend(request_id, [partial.block])
        for window, blocks_of in zip(self.windows, hit.checkpoint.blocks, strict=True):
            pool.touch(blocks_of)
            window.adopt(request_id, hit.position, blocks_of)
        hit.checkpoint.num_hits += 1
        hit.checkpoint.num_live += 1
        for record in (hit.checkpoint, hit.lean_checkpoint):
            if record is not None and record.is_spare:
                pool.promote(record)
        if self.adaptation is not None:
            hit.checkpoint.num_owners += 1

    def _add_copy(self, request_id: str, partial: PartialAdoption, block: KVCacheBlock) -> None:
        group = self.dense[partial.dense_index]
        # The destination is held by the table and, until the copy ran, by the copy itself.
        self.block_pool.touch([block])
        group_id = group.geometry.group_id
        self.copies.append(BlockCopy(request_id, group_id, partial.block, block, partial.keys))
        group.extend(request_id, [block])

    def _add_private_tail(self, request_id: str, window: WindowGroup, block: KVCacheBlock) -> None:
        """Replace the last block of an adopted checkpoint by a copy that may be written."""
        source = window.replace_last(request_id, block)
        # The table's hold on the source is the copy's now; the destination has one of each.
        self.block_pool.touch([block])
        group_id = window.geometry.group_id
        self.copies.append(BlockCopy(request_id, group_id, source, block, ()))
        self._rebuilds[request_id] = source.block_id

    # ---- end of schedule() -------------------------------------------------------------------

    def want_boundaries(
        self, request_id: str, boundaries: Iterable[int], *, are_junctions: bool
    ) -> None:
        """Keep checkpoints of boundaries that the request has yet to pass."""
        state = self._states[request_id]
        state.wanted.update(boundaries)
        if are_junctions:
            state.junctions.update(boundaries)

    def wanted_boundaries(self, request_id: str) -> set[int]:
        """Return the boundaries a request wants kept."""
        return self._states[request_id].wanted

    def num_published_units(self, request_id: str) -> int:
        """Return the units whose keys a request has published, those of its hit included."""
        return self._states[request_id].num_units

    def publish(
        self,
        request_id: str,
        block_hashes: Sequence[BlockHash],
        token_ids: Sequence[int],
        end: int,
        boundaries: Sequence[int],
        cache_salt: str | None,
        spare: Collection[int] = (),
    ) -> None:
        """Make the prefixes a step completes visible to later lookups.

        Args:
            request_id: The request.
            block_hashes: Its chained hashes, one per unit, covering at least ``end``.
            token_ids: Its tokens, as far as they are known.
            end: Tokens computed after the step, drafts not counted.
            boundaries: Boundaries the step completes, to keep a checkpoint of.
            cache_salt: The request's salt, which is in its hashes; events carry its digest.
            spare: Those of the boundaries that nobody asked for.
        """
        state = self._states[request_id]
        if spare:
            self._spared[request_id] = end
        self._publish_keys(request_id, state, block_hashes, token_ids, end, cache_salt)
        for position in boundaries:
            token = token_ids[position] if position < len(token_ids) else None
            prefix_hash = block_hashes[position // self.geometry.unit - 1]
            is_spare = position in spare
            self._publish_checkpoint(request_id, state, prefix_hash, position, token, is_spare)
        self._drop_passed_records(state, end)

    def _publish_keys(
        self,
        request_id: str,
        state: RequestCacheState,
        block_hashes: Sequence[BlockHash],
        token_ids: Sequence[int],
        end: int,
        cache_salt: str | None,
    ) -> None:
        unit = self.geometry.unit
        for group in self.dense:
            step = max(unit, group.geometry.ratio)
            first = state.num_units * unit // step * step
            ends = range(first + step, end + 1, step)
            if not ends:
                continue
            group_id = group.geometry.group_id
            # The hash of a prefix of p tokens is at p // unit - 1, that of one unit less before it.
            at, stop, stride = ends[0] // unit - 1, end // unit, step // unit
            keys = block_hashes[at:stop:stride]
            parents = [
                block_hashes[at - 1] if at else None,
                *block_hashes[at + stride - 1 : stop - 1 : stride],
            ]
            self.block_pool.add_keys(group.blocks_below(request_id, ends), group_id, keys, parents)
            before = block_hashes[first // unit - 1] if first else None
            span = token_ids[first : ends[-1]]
            salt = cache_salt if first == 0 else None
            self.block_pool.record_stored(keys, before, span, step, group_id, salt)
        state.num_units = max(state.num_units, end // unit)

    def _publish_checkpoint(
        self,
        request_id: str,
        state: RequestCacheState,
        prefix_hash: BlockHash,
        position: int,
        next_token: int | None,
        is_spare: bool,
    ) -> None:
        policy = self.policy
        is_junction = position in state.junctions
        interval = self.interval
        on_grid = interval > 0 and position % interval == 0 and not is_spare
        record = Checkpoint(
            prefix_hash,
            position,
            tuple(group.blocks_for(request_id, position) for group in self.windows),
            next_token,
            is_kept=position in state.wanted or on_grid,
            is_junction=is_junction,
            # Its lean boundary is close below and needs no state of long compressors.
            is_cold=policy.keeps_lean and position % self.geometry.lean != 0 and not is_junction,
            is_spare=is_spare,
        )
        if self.block_pool.add_checkpoint(record) and not is_spare:
            if next_token is None:
                state.unfollowed = record
            (state.kept if record.is_kept else state.trailing).append(record)
            if self.adaptation is not None and record.is_kept:
                record.num_owners += 1

    def note_next_token(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Tell a checkpoint which token followed, now that it may be known."""
        state = self._states[request_id]
        record = state.unfollowed
        if record is not None and record.position < len(token_ids):
            record.next_token = token_ids[record.position]
            state.unfollowed = None

    def _drop_passed_records(self, state: RequestCacheState, end: int) -> None:
        """Withdraw trailing checkpoints that newer ones replace, unless somebody resumed there."""
        current = trailing_boundaries(self.geometry, end)
        remaining = []
        for record in state.trailing:
            if record.position in current:
                remaining.append(record)
            elif record.num_hits == 0 and not record.is_kept:
                self.block_pool.dissolve(record)
        state.trailing = remaining

    def pin_window(
        self, request_id: str, block_hashes: Sequence[BlockHash], start: int, end: int
    ) -> None:
        """Pin the checkpoint at which a long step ends; a short step, as in decode, pins nothing.

        Args:
            request_id: The request, whose step from ``start`` to ``end`` was just published.
            block_hashes: Its chained hashes.
            start: Tokens computed before the step.
            end: Tokens computed after it.
        """
        if num_dropped_blocks(self.geometry, start, end) < self.policy.pin_min_drop_blocks:
            return
        record = self.block_pool.checkpoints.get(block_hashes[end // self.geometry.unit - 1])
        if record is None or not self.block_pool.pin(record):
            return
        record.is_kept = True
        state = self._states[request_id]
        if record in state.trailing:
            state.trailing.remove(record)
            state.kept.append(record)

    def _supersede(self, records: Sequence[Checkpoint]) -> None:
        if self.policy.supersedes:
            for record in records:
                if not record.is_junction and record.num_live == 0:
                    self.block_pool.set_cold(record, True)

    def _age_checkpoints(self, state: RequestCacheState) -> None:
        """Order a leaving request's checkpoints for eviction: they age from now.

        What a conversation began at the time before last is superseded. What it began at this time
        is not: a second answer to the same turn, or an edit of the last one, resumes there, and
        giving it up at once was measured to cost more than it frees.
        """
        made = [*state.kept, *state.trailing]
        began_at = tuple(r for r in (state.origin, state.lean_origin) if r is not None)
        older = began_at
        if state.origin is not None:
            state.origin.num_live -= 1
            if state.is_resumed:
                older = state.origin.older
            else:
                self._supersede(state.origin.older)
                # Cut here, or a long conversation's records would hold each other for ever.
                state.origin.older = ()
        if self.adaptation is not None:
            owned = state.kept if state.origin is None else [*state.kept, state.origin]
            for record in owned:
                record.num_owners -= 1
        for record in made:
            record.older = older
        for record in (*made, *began_at):
            self.block_pool.refresh(record)

    def publish_copies(self) -> None:
        """Let copies carry their source's keys below the boundary."""
        unit = self.geometry.unit
        for copy in self.copies:
            for prefix_hash in copy.keys:
                parent = self.block_pool.parent_of(prefix_hash)
                self.block_pool.add_key(copy.destination, copy.group_id, prefix_hash, parent)
                # Its tokens were told when the source was stored.
                self.block_pool.record_stored((prefix_hash,), parent, (), unit, copy.group_id)

    def take_copies(self) -> list[tuple[int, int]]:
        """Drain the copies the step must run; their ends stay held until ``release_copies``."""
        pairs = [(c.source.block_id, c.destination.block_id) for c in self.copies]
        for copy in self.copies:
            self._sources_in_flight += (copy.source, copy.destination)
        self.copies = []
        return pairs

    def take_drafter_rebuilds(self) -> dict[str, int]:
        """Drain which requests make their hit's last drafter row anew, and the block it was in."""
        rebuilds, self._rebuilds = self._rebuilds, {}
        return rebuilds

    def release_copies(self) -> None:
        """Let go of the ends of copies that have run."""
        self.block_pool.free_blocks(self._sources_in_flight)
        self._sources_in_flight = []

    @property
    def copy_holds(self) -> list[KVCacheBlock]:
        """Blocks held by copies, once per hold."""
        pending = [block for c in self.copies for block in (c.source, c.destination)]
        return pending + self._sources_in_flight

    def reset_prefix_cache(self) -> bool:
        """Forget everything cached and what was learnt of it; False while blocks are held."""
        done = self.block_pool.reset_prefix_cache()
        if done and self.adaptation is not None:
            self.adaptation.reset()
            self.block_pool.regular.rule = self.adaptation.rule
        return done

    # ---- what is learnt ----------------------------------------------------------------------

    @property
    def interval(self) -> int:
        """Tokens between two checkpoints that prompts leave; 0: none."""
        return self.policy.interval if self.adaptation is None else self.adaptation.interval

    def observe(self, block_hashes: Sequence[BlockHash], num_tokens: int) -> None:
        """Learn from an admitted prompt."""
        if self.adaptation is not None:
            self.adaptation.observe(block_hashes, num_tokens, self.block_pool.dense_share)
            self.block_pool.regular.rule = self.adaptation.rule

    def find_spare(
        self,
        block_hashes: Sequence[BlockHash],
        start: int,
        end: int,
        boundaries: Collection[int],
        num_taken: int,
        num_tokens: int,
    ) -> tuple[int, ...]:
        """Return where a prefill step leaves checkpoints in memory that nothing else needs now.

        Args:
            block_hashes: The request's chained hashes.
            start: Tokens computed before the step.
            end: Tokens of the prompt computed after it.
            boundaries: Where it leaves checkpoints anyway.
            num_taken: Blocks it takes anyway.
            num_tokens: Tokens of the prompt.
        """
        pool = self.block_pool
        num_free = pool.num_scratch - num_taken
        num_older = pool.num_spare
        size = pool.num_gpu_blocks
        places = spare_boundaries(
            self.geometry, start, end, num_tokens, boundaries, num_free, num_older, size
        )
        known, unit = pool.checkpoints, self.geometry.unit
        return tuple(p for p in places if block_hashes[p // unit - 1] not in known)

    # ---- tables ------------------------------------------------------------------------------

    def free(self, request_id: str) -> None:
        """Give back everything a request holds, its unscheduled copies included."""
        kept = []
        for copy in self.copies:
            if copy.request_id == request_id:
                self.block_pool.free_blocks((copy.source, copy.destination))
            else:
                kept.append(copy)
        self.copies = kept
        state = self._states.pop(request_id, None)
        for group in self.dense:
            group.free(request_id)
        for window in self.windows:
            window.free(request_id)
        self._dirty.discard(request_id)
        self._rebuilds.pop(request_id, None)
        self._spared.pop(request_id, None)
        if state is not None:
            self._age_checkpoints(state)

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """Return per group the dense block ids; window groups have tables of their own."""
        ids: tuple[list[int], ...] = tuple([] for _ in self.geometry.groups)
        for group in self.dense:
            blocks = group.tables.get(request_id, ())
            ids[group.geometry.group_id].extend(block.block_id for block in blocks)
        return ids

    def take_window_tables(self) -> dict[str, tuple[WindowTable, ...]]:
        """Drain the window tables that changed since they were last taken, by request."""
        changed = {request_id: self._take_tables_of(request_id) for request_id in self._dirty}
        self._dirty.clear()
        # Their rows are written in the step the tables are for, and read by nobody: what takes the
        # blocks next writes later.
        for request_id, end in self._spared.items():
            for group in self.windows:
                group.drop_below(request_id, end, shallow_first=True)
        self._spared.clear()
        return {request_id: tables for request_id, tables in changed.items() if tables}

    def _take_tables_of(self, request_id: str) -> tuple[WindowTable, ...]:
        tables = []
        for group in self.windows:
            table = group.tables.get(request_id)
            if table is not None and table.is_dirty:
                ids = [block.block_id for block in table.blocks]
                tables.append(WindowTable(group.geometry.group_id, table.base, ids))
                table.is_dirty = False
        return tuple(tables)
