"""Waiting for a running prefill that is about to publish more of a request's prefix."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from vllm.exceptions import NoFreeBlocksError
from vllm.v1.core.prefix.prefix_cache import PrefixCache
from vllm.v1.core.prefix.request_cache import RequestCache
from vllm.v1.core.retention.donors import (
    MIN_GAIN_TOKENS,
    Donor,
    find_donor,
    max_wait_steps,
    num_shared_units,
)
from vllm.v1.core.values.cache_step import Lookup

if TYPE_CHECKING:
    from vllm.v1.request import Request


class DonorWaits:
    """Lets waiting requests wait, and running ones leave checkpoints for them.

    Owns: the deadlines in the ``RequestCache`` of waiting requests.

    Args:
        prefixes: Their geometry, and the pool where checkpoints for others take their blocks.
        requests: What the cache knows of every request; the coordinator's.
        changed: Requests that this ``schedule()`` changed; likewise.
    """

    def __init__(
        self,
        prefixes: PrefixCache,
        requests: dict[str, RequestCache],
        changed: dict[str, RequestCache],
    ) -> None:
        self._geometry = prefixes.geometry
        self._pool = prefixes.pool
        self._requests = requests
        self._changed = changed

    def should_wait(self, request: Request, found: Lookup, now: int) -> bool:
        """Whether a running prefill is about to publish more of a waiting request's prefix.

        The donor is asked to leave a checkpoint where the two part. Waiting is bounded in steps, so
        a donor that does not get on holds nobody up for long.
        """
        if found.hit is None or request.skip_cache_insert:
            return False
        unit = self._geometry.unit
        rebuild = found.hit.rebuild
        if rebuild is not None and self._is_rebuilt(request, rebuild.end):
            return self._may_wait(request, rebuild.end - rebuild.start, now)
        # Whoever has published its prompt shares no more than is cached: it is passed over there.
        running = [c for c in self._requests.values() if c.is_admitted and _publishes(c)]
        donors = [
            Donor(
                cache.request.block_hashes,
                cache.published.num_units,
                min(cache.request.num_prompt_tokens, cache.request.insert_end) // unit,
            )
            for cache in running
        ]
        chosen, num_shared = find_donor(
            donors,
            request.block_hashes,
            found.hit.dense_match // unit,
            (request.num_tokens - 1) // unit,
        )
        gain = num_shared * unit - found.num_tokens
        if chosen is None or gain < _least_gain(running[chosen], num_shared * unit, unit):
            self._requests.pop(request.request_id, None)
            return False
        if not self._may_wait(request, gain, now):
            return False
        self._ask_donor(running[chosen], num_shared * unit)
        return True

    def announce(self, request: Request) -> None:
        """Let running prefills leave checkpoints where a request parts from them that waits.

        For a step without room to ask whether it should wait: the place where they part may be in
        the chunk of this very step, and behind it when there is room again.
        """
        if request.skip_cache_insert:
            return
        unit = self._geometry.unit
        last = (request.num_tokens - 1) // unit
        for cache in self._requests.values():
            chunk = cache.pending
            if chunk is None or not cache.is_admitted or chunk.end - chunk.start < MIN_GAIN_TOKENS:
                continue
            shared = num_shared_units(request.block_hashes, cache.request.block_hashes)
            position = min(min(shared, last) * unit, cache.request.insert_end // unit * unit)
            if chunk.start < position <= chunk.end:
                self._ask_donor(cache, position)

    def _is_rebuilt(self, request: Request, boundary: int) -> bool:
        """Whether a running request computes the window rows of the same boundary again."""
        last = boundary // self._geometry.unit - 1
        return any(
            cache.exact_from == boundary
            and _publishes(cache)
            and cache.request.block_hashes[last] == request.block_hashes[last]
            for cache in self._requests.values()
        )

    def _may_wait(self, request: Request, gain: int, now: int) -> bool:
        """Let a request wait for a gain of so many tokens, unless it has waited long enough."""
        waiting = self._requests.setdefault(request.request_id, RequestCache(request))
        if waiting.wait_deadline is None:
            waiting.wait_deadline = now + max_wait_steps(gain)
        return now < waiting.wait_deadline

    def _ask_donor(self, donor: RequestCache, position: int) -> None:
        """Let a running prefill leave checkpoints where a waiting request parts from it."""
        if not self._geometry.windows:
            return
        asked = {p for p in (position, self._geometry.floor_lean(position)) if p > 0}
        new = asked - donor.published.wanted
        donor.published.wanted |= asked
        donor.published.junctions |= asked
        self._ask_for_all_layers(donor, position)
        pending = donor.pending
        if pending is None:
            return
        # The donor's chunk of this very schedule() is allocated already, but not computed.
        inside = {p for p in new if pending.start < p <= pending.end} - set(pending.boundaries)
        added = [p for p in sorted(inside) if self._try_add_boundary(donor, p)]
        if added:
            boundaries = tuple(sorted({*pending.boundaries, *added}))
            donor.pending = replace(pending, boundaries=boundaries)

    def _ask_for_all_layers(self, donor: RequestCache, position: int) -> None:
        """Let a donor compute the rows of all layers from an earlier boundary on, if it still can.

        Whoever waits may go on for less than a partial checkpoint needs.
        """
        first, pending = donor.full_from, donor.pending
        if position >= first or donor.rebuild is not None:
            return
        start = donor.request.num_computed_tokens if pending is None else pending.start
        if position - self._geometry.lazy_reach < start:
            return
        if pending is not None:
            lacking = [place for place in pending.boundaries if position <= place < first]
            if not all(self._try_add_boundary(donor, place) for place in lacking):
                return
            spares = [spare for spare in pending.spares if not position <= spare.position < first]
            donor.pending = replace(pending, spares=spares)
        donor.full_from = position

    def _try_add_boundary(self, cache: RequestCache, position: int) -> bool:
        """Take the blocks of one more checkpoint inside a chunk; False if there is no room."""
        missing = [w.find_missing(w.geometry.rows_below(position)) for w in cache.windows]
        count = sum(map(len, missing))
        if count > self._pool.get_num_free_blocks() - self._pool.num_kept:
            return False
        try:
            taken = iter(self._pool.get_new_blocks(count))
        except NoFreeBlocksError:
            return False
        for window, indices in zip(cache.windows, missing, strict=True):
            window.insert(indices, [next(taken) for _ in indices])
        self._changed[cache.request.request_id] = cache
        return True


def _least_gain(donor: RequestCache, position: int, unit: int) -> int:
    """Return the tokens that a wait for a donor's rows up to a position must save.

    Rows of the step that is being made are there in the next one: a request that enters then has
    computed fewer tokens, and is not later but for what a step costs beside its tokens.
    """
    is_next = donor.pending is not None and position <= donor.pending.end
    return unit if is_next else MIN_GAIN_TOKENS


def _publishes(cache: RequestCache) -> bool:
    """Whether others will ever see what a request computes."""
    request = cache.request
    return not request.skip_cache_insert and cache.exact_from <= request.insert_end
