"""Planning what one step of one request takes, with hits at one unit: nothing changes state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from vllm.v1.core.geometry import GroupGeometry
from vllm.v1.core.prefix.drafter_rows import stale_groups
from vllm.v1.core.prefix.held import hold_boundaries
from vllm.v1.core.prefix.lookup import dense_part, find_junction, first_output, plan_partials
from vllm.v1.core.prefix.prefix_cache import PrefixCache
from vllm.v1.core.prefix.request_cache import RequestCache
from vllm.v1.core.retention.boundaries import step_boundaries, trailing_boundaries
from vllm.v1.core.retention.policy import PrefillStep, Spare
from vllm.v1.core.retention.rebuild import Rebuild
from vllm.v1.core.values.cache_settings import StaleRow
from vllm.v1.core.values.cache_step import FirstStep, StepPlan, StepRequest
from vllm.v1.core.values.hit import PrefixHit

if TYPE_CHECKING:
    from vllm.v1.core.values.cache_settings import CacheSettings
    from vllm.v1.request import Request


class StepPlanner:
    """Works out what steps take.

    Owns: nothing.

    Args:
        prefixes: What is cached, and the rules for it.
        settings: Sizes and switches.
    """

    def __init__(self, prefixes: PrefixCache, settings: CacheSettings) -> None:
        self._prefixes = prefixes
        self._geometry = prefixes.geometry
        self._policy = prefixes.policy
        self._index = prefixes.index
        self._settings = settings
        # Decode steps take blocks for so many tokens at a time. State blocks hold as few as a
        # sixteenth of a unit; going to the pool for each would be most of a decode step's cost
        # (at a quarter of a unit it was still half of it).
        self._stride = max(1, prefixes.geometry.unit // 2)

    def publishes(self, step: StepRequest) -> bool:
        """Whether a step completes a unit that later requests may hit."""
        if step.delays_caching or not self._settings.enable_caching:
            return False
        if step.request.skip_cache_insert:
            return False
        unit, end = self._geometry.unit, min(step.end, step.request.insert_end)
        return end // unit > step.start // unit

    def plan(self, cache: RequestCache | None, step: StepRequest, num_available: int) -> StepPlan:
        """Work out what a step takes.

        Args:
            cache: The request's; None in its first step.
            step: What is asked for.
            num_available: Free blocks it may take; a short step takes some for the next, too, if
                that leaves enough.
        """
        publishes = self.publishes(step)
        if cache is None:
            plan = self._plan_first(step, publishes)
        else:
            if not publishes:
                short = self._plan_short(step, cache)
                if short is not None and short.num_blocks <= num_available:
                    return short
            plan = self._plan_next(step, cache, publishes)
        if publishes:
            self._fit_checkpoints(plan, cache, num_available)
        return plan

    def _plan_next(self, step: StepRequest, cache: RequestCache, publishes: bool) -> StepPlan:
        """Plan a step of a request that holds tables."""
        wanted = cache.published.wanted
        boundaries = self._boundaries(step, wanted, cache.rebuild) if publishes else ()
        num_dense = [table.num_missing(step.alloc_end) for table in cache.dense]
        indices = self._window_indices(step, boundaries, cache, None, cache.full_from)
        num_new = sum(num_dense) + sum(map(len, indices))
        return StepPlan(
            step,
            num_new,
            num_new,
            num_dense=num_dense,
            window_indices=indices,
            boundaries=boundaries,
            publishes=publishes,
        )

    def _window_indices(
        self,
        step: StepRequest,
        boundaries: tuple[int, ...],
        cache: RequestCache | None,
        hit: PrefixHit | None,
        full_from: int,
    ) -> list[Sequence[int]]:
        """Return per window group the block indices a step must fill."""
        indices: list[Sequence[int]] = []
        for number, group in enumerate(self._geometry.windows):
            own = boundaries
            if group.lazy_reach:
                own = tuple(position for position in boundaries if position >= full_from)
            needed = self._needed_blocks(group, step, own)
            if cache is not None:
                indices.append(cache.windows[number].find_missing(needed))
            elif hit is not None and group.lazy_reach and hit.is_partial:
                # Rows that nobody reads but where they are masked: of zeros.
                indices.append(sorted({*group.rows_below(hit.position), *needed}))
            else:
                resumes = hit is not None and hit.checkpoint is not None
                adopted = group.rows_below(hit.position) if hit and resumes else range(0)
                indices.append([i for i in needed if i not in adopted] if adopted else needed)
        return indices

    def _fit_checkpoints(
        self, plan: StepPlan, cache: RequestCache | None, num_available: int
    ) -> None:
        """Leave those of the interval out if there is no room; add spare ones if there is.

        The admission gate counts neither, so a request must be able to go on without them.
        """
        step = plan.step
        hit = plan.first.hit if plan.first is not None else None
        rebuild = cache.rebuild if cache is not None else hit.rebuild if hit is not None else None
        if plan.num_blocks > num_available:
            wanted = cache.published.wanted if cache is not None else set()
            wanted = plan.first.wanted if plan.first is not None else wanted
            boundaries = self._boundaries(step, wanted, rebuild, with_grid=False)
            indices = self._window_indices(step, boundaries, cache, hit, _full_from(plan, cache))
            self._revise(plan, indices, boundaries)
        elif self._policy.leaves_spares:
            spares = self._find_spares(step, plan, rebuild, _full_from(plan, cache))
            if spares:
                indices = self._with_spares(plan, spares, cache)
                more = sum(map(len, indices)) - sum(map(len, plan.window_indices))
                if plan.num_blocks + more <= num_available:
                    self._revise(plan, indices, plan.boundaries)
                    plan.spares = spares

    @staticmethod
    def _revise(
        plan: StepPlan, window_indices: list[Sequence[int]], boundaries: tuple[int, ...]
    ) -> None:
        """Let a plan fill other window blocks, for other boundaries."""
        more = sum(map(len, window_indices)) - sum(map(len, plan.window_indices))
        plan.window_indices, plan.boundaries = window_indices, boundaries
        plan.num_blocks += more
        plan.num_new_blocks += more

    def _with_spares(
        self, plan: StepPlan, spares: Sequence[Spare], cache: RequestCache | None
    ) -> list[Sequence[int]]:
        """Return the window blocks of a step, those of its spare checkpoints included.

        These are many and far from each other; all have the same blocks below their ends.
        """
        positions = [spare.position for spare in spares]
        indices: list[Sequence[int]] = []
        for number, group in enumerate(self._geometry.windows):
            num_blocks = self._geometry.lean_blocks[number]
            own = positions
            if group.lazy_reach:
                full_from = _full_from(plan, cache)
                own = [position for position in positions if position >= full_from]
            if not num_blocks or not own:
                indices.append(plan.window_indices[number])
                continue
            # Below this, what going on at the step's start needs is held already.
            held = (
                group.first_block(plan.step.start) if cache is None else cache.windows[number].end
            )
            needed = {*plan.window_indices[number]}
            for end in group.first_blocks(own):
                needed.update(range(max(held, end - num_blocks), end))
            indices.append(sorted(needed))
        return indices

    def _find_spares(
        self, step: StepRequest, plan: StepPlan, rebuild: Rebuild | None, full_from: int
    ) -> Sequence[Spare]:
        """Return where a prefill step leaves checkpoints that nobody asked for."""
        pool, request = self._prefixes.pool, step.request
        if step.start >= request.num_prompt_tokens or request.is_spare or not request.leaves_all:
            return ()  # a decode step, or one that asks for no more than it wants itself
        spares = self._policy.spares(
            PrefillStep(
                max(step.start, rebuild.end) if rebuild is not None else step.start,
                min(step.end, request.num_prompt_tokens),
                request.num_prompt_tokens,
                request.cache_boundaries,
                # A trailing checkpoint is given up when it is passed: there a spare one stays.
                set(plan.boundaries).difference(trailing_boundaries(self._geometry, step.end)),
                pool.num_scratch_blocks - plan.num_new_blocks,
                pool.num_spare_blocks,
                pool.num_gpu_blocks,
                full_from,
            )
        )
        known, unit, hashes = self._index.checkpoints, self._geometry.unit, request.block_hashes
        return [spare for spare in spares if hashes[spare.position // unit - 1] not in known]

    def _plan_short(self, step: StepRequest, cache: RequestCache) -> StepPlan | None:
        """Plan a step that completes no boundary; None if it would leave a hole in a table."""
        ahead = -(-step.alloc_end // self._stride) * self._stride
        alloc_end = min(ahead, self._settings.max_model_len)
        num_dense = [table.num_missing(alloc_end) for table in cache.dense]
        num_new = sum(num_dense)
        indices = []
        for window in cache.windows:
            appended = window.find_appended(step.end, alloc_end)
            if appended is None:
                return None
            num_new += len(appended)
            indices.append(appended)
        return StepPlan(step, num_new, num_new, True, num_dense, indices)

    def _boundaries(
        self,
        step: StepRequest,
        wanted: Iterable[int],
        rebuild: Rebuild | None,
        *,
        with_grid: bool = True,
    ) -> tuple[int, ...]:
        """Return where a step leaves checkpoints, those of the policy's grid among them."""
        # Window rows that are computed again are right where that ends, and from there on.
        start = step.start if rebuild is None else max(step.start, rebuild.end - 1)
        end = min(step.end, step.request.insert_end)
        if end <= start:
            return ()
        grid: Sequence[int] = ()
        if with_grid:
            grid = self._policy.grid(start, end)
            request = step.request
            if request.cache_boundaries and start < request.num_prompt_tokens:
                marked = self._policy.marked_boundaries(
                    request.num_prompt_tokens, request.cache_boundaries
                )
                grid = (*grid, *(p for p in marked if start < p <= end))
        return step_boundaries(self._geometry, start, end, wanted, grid)

    def _needed_blocks(
        self, group: GroupGeometry, step: StepRequest, boundaries: tuple[int, ...]
    ) -> Sequence[int]:
        return self._policy.window_blocks(group, step.start, step.end, step.alloc_end, boundaries)

    def _plan_first(self, step: StepRequest, publishes: bool) -> StepPlan:
        """Plan the first step of a request, from its hit if it has one."""
        found = step.lookup
        hit = found.hit if found is not None and found.num_tokens else None
        if step.num_external_tokens and self._geometry.windows:
            # A connector brings the checkpoint of its end, and the dense rows that are not here.
            assert step.delays_caching, "loads run beside the steps"
            hit = None
            if found is not None and found.hit is not None:
                hashes = step.request.block_hashes
                hit = dense_part(self._index, self._geometry, hashes, found.hit, step.start)
        first = self._plan_first_step(step.request, found.hit if found else None, hit)
        rebuild = hit.rebuild if hit is not None else None
        boundaries = self._boundaries(step, first.wanted, rebuild) if publishes else ()
        num_adopted = [len(blocks) for blocks in hit.full_blocks] if hit else []
        num_adopted = num_adopted or [0] * len(self._geometry.dense)
        for adoption in first.partials:
            num_adopted[adoption.dense_index] += 1
        num_dense = [
            max(0, group.num_dense_blocks(step.alloc_end) - adopted)
            for group, adopted in zip(self._geometry.dense, num_adopted, strict=True)
        ]
        indices = self._window_indices(step, boundaries, None, hit, first.full_from)
        num_copies = sum(adoption.is_copy for adoption in first.partials) + len(first.rebuilt)
        num_new = sum(num_dense) + sum(map(len, indices)) + num_copies
        return StepPlan(
            step,
            num_new + (hit.num_free_blocks() if hit else 0),
            num_new,
            num_dense=num_dense,
            window_indices=indices,
            boundaries=boundaries,
            publishes=publishes,
            first=first,
        )

    def _plan_first_step(
        self, request: Request, found: PrefixHit | None, hit: PrefixHit | None
    ) -> FirstStep:
        """Plan what only a first step takes: ``found`` by the lookup, of which ``hit`` is taken."""
        policy, geometry = self._policy, self._geometry
        # What is not to be published must not stand in blocks that are.
        is_private = request.skip_cache_insert
        partials = plan_partials(self._index, hit, copies_all=is_private) if hit is not None else ()
        if not geometry.windows:
            return FirstStep(hit, set(), set(), False, partials, ())
        rebuilt: tuple[int, ...] = ()
        if hit is not None and self._settings.stale_row is StaleRow.REBUILD:
            rebuilt = stale_groups(geometry, hit, request.following_tokens)
        full_from = first_output(geometry, request)
        if is_private:
            return FirstStep(hit, set(), set(), False, partials, rebuilt, full_from)
        wanted = set(policy.prompt_boundaries(request.num_prompt_tokens))
        junctions: set[int] = set()
        parts_at_hit = False
        if found is not None:
            parting = find_junction(self._index, geometry, request.block_hashes, found)
            junctions = set(policy.junction_boundaries(parting)) if parting else junctions
            parts_at_hit = bool(junctions) and parting == found.position and not found.rebuild
            junctions = set() if parts_at_hit else junctions
        for offset in request.options.cache_junctions:
            place = min(geometry.floor_unit(offset), geometry.floor_unit(request.num_tokens - 1))
            junctions.update(policy.junction_boundaries(place) if place else ())
        if hit is not None and hit.rebuild is not None:
            # Once is enough: others shall resume there.
            wanted.add(hit.position)
        if request.cache_ttls:
            wanted |= hold_boundaries(geometry, request.cache_ttls)
        wanted |= junctions
        if full_from:
            begin = hit.start if hit is not None else 0
            if hit is not None and hit.is_partial:
                # It has no rows of some layers for a while.
                begin += geometry.lazy_reach
            marks = request.cache_boundaries
            places = {*wanted, policy.full_from(request.num_prompt_tokens, marks) or full_from}
            full_from = min((p for p in places if begin < p < full_from), default=full_from)
        return FirstStep(hit, wanted, junctions, parts_at_hit, partials, rebuilt, full_from)


def _full_from(plan: StepPlan, cache: RequestCache | None) -> int:
    """Return from where a request's checkpoints hold the rows of all layers."""
    if plan.first is not None:
        return plan.first.full_from
    return cache.full_from if cache is not None else 0
