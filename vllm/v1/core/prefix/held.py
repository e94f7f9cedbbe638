"""Prefixes that somebody asked to keep: dense rows and a checkpoint, under one pin, for a time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from vllm.utils.hashing import BlockHash
from vllm.v1.core.geometry import CacheGeometry
from vllm.v1.core.prefix.prefix_cache import PrefixCache
from vllm.v1.core.prefix.request_cache import RequestCache
from vllm.v1.core.values.free_block_queue import KVCacheBlock
from vllm.v1.core.values.hit import Checkpoint
from vllm.v1.messages import HeldPrefix

# Prefixes listed at once; beyond that the oldest is let go.
MAX_HELD = 1024


@dataclass(slots=True, eq=False)
class _Hold:
    """One prefix.

    Attributes:
        name: The request that asked for it.
        record: Its checkpoint.
        deadline: Monotonic seconds until which it stays; infinity: until it is let go.
        blocks: What its pin covers.
    """

    name: str
    record: Checkpoint
    deadline: float
    blocks: tuple[KVCacheBlock, ...] = ()


def hold_boundaries(geometry: CacheGeometry, ttls: dict[int, float]) -> set[int]:
    """Return the boundaries at which a request shall leave checkpoints to be held.

    Args:
        geometry: The model's groups.
        ttls: Offsets in the prompt and for how many seconds to hold what lies below each.
    """
    return {place for offset in ttls if (place := geometry.floor_lean(offset)) > 0}


class HeldPrefixes:
    """Holds prefixes beyond the end of the requests that computed them.

    A held prefix is pinned as a whole: its dense rows and its checkpoint are reused after all else.
    It counts as free, so it never keeps a request from running; pins are capped, and the oldest
    gives way to the cap. What lies below one place is held once, for the longer of two times.

    Owns: the list of held prefixes.

    Attributes:
        next_deadline: When the first of them has been held long enough; infinity: never.

    Args:
        prefixes: What is cached.
        clock: Monotonic seconds.
    """

    def __init__(self, prefixes: PrefixCache, clock: Callable[[], float] = time.monotonic) -> None:
        self._prefixes = prefixes
        self._clock = clock
        self._holds: dict[BlockHash, _Hold] = {}
        self.next_deadline = math.inf

    def use_clock(self, clock: Callable[[], float]) -> None:
        """Go by another clock from now on; nothing may be held yet.

        A record's replay must see the times that life saw.
        """
        assert not self._holds, "times of two clocks do not compare"
        self._clock = clock

    def note_end(self, cache: RequestCache) -> None:
        """Hold what a request asked for that leaves now, as far as it was computed."""
        request, geometry = cache.request, self._prefixes.geometry
        for offset, seconds in request.cache_ttls.items():
            if offset <= cache.num_accepted:
                record = self._find_record(request.block_hashes, offset // geometry.unit)
                if record is not None:
                    self._hold(cache, record, seconds)

    def _find_record(self, block_hashes: list[BlockHash], num_units: int) -> Checkpoint | None:
        """Return the deepest checkpoint within so many units."""
        for index in range(num_units - 1, -1, -1):
            record = self._prefixes.store.get(block_hashes[index])
            if record is not None:
                return record
        return None

    def _hold(self, cache: RequestCache, record: Checkpoint, seconds: float) -> None:
        deadline = self._clock() + seconds
        old = self._holds.get(record.prefix_hash)
        if old is not None:
            if old.record is record and old.deadline >= deadline:
                old.name = cache.request.request_id
                return
            self._let_go(record.prefix_hash)
        hold = _Hold(cache.request.request_id, record, deadline)
        if seconds > 0:
            self._prefixes.store.keep(record)
            blocks = [
                block
                for table in cache.dense
                for block in table.blocks[: table.geometry.num_dense_blocks(record.position)]
            ]
            hold.blocks = (*blocks, *record.all_blocks())
            self._prefixes.require_pins().pin({hold: hold.blocks})
            self.next_deadline = min(self.next_deadline, deadline)
        self._holds[record.prefix_hash] = hold
        if len(self._holds) > MAX_HELD:
            self._let_go(next(iter(self._holds)))

    def expire(self) -> None:
        """Let go of what has been held long enough."""
        if self.next_deadline == math.inf or self._clock() < self.next_deadline:
            return
        self._drop_if(lambda hold: bool(hold.blocks) and self._clock() >= hold.deadline)

    def _drop_if(self, is_over: Callable[[_Hold], bool]) -> None:
        for prefix_hash, hold in tuple(self._holds.items()):
            if is_over(hold):
                self._let_go(prefix_hash)
        deadlines = [hold.deadline for hold in self._holds.values() if hold.blocks]
        self.next_deadline = min(deadlines, default=math.inf)

    def _let_go(self, prefix_hash: BlockHash) -> None:
        hold = self._holds.pop(prefix_hash)
        if hold.blocks:
            self._prefixes.require_pins().unpin(hold)

    def forget(self, name: str) -> bool:
        """Let go of a prefix and give its checkpoint up; returns whether there is such a one."""
        for prefix_hash, hold in tuple(self._holds.items()):
            if hold.name == name:
                self._let_go(prefix_hash)
                self._prefixes.store.dissolve(hold.record)
                return True
        return False

    def release(self, records: Iterable[Checkpoint]) -> None:
        """Let go of what is held at some checkpoints."""
        for record in records:
            hold = self._holds.get(record.prefix_hash)
            if hold is not None and hold.record is record:
                self._let_go(record.prefix_hash)

    def clear(self) -> None:
        """Forget all: the cache was emptied."""
        self._holds.clear()

    def places(self) -> Mapping[BlockHash, str]:
        """Return the names of pinned prefixes by their ends; lets go of none."""
        pins = self._prefixes.pool.pins
        if pins is None:
            return {}
        return {place: hold.name for place, hold in self._holds.items() if hold in pins}

    def describe(self) -> Iterator[HeldPrefix]:
        """Iterate over what is held, the oldest first."""
        self.expire()
        self._drop_if(lambda hold: not self._prefixes.index.holds_checkpoint(hold.record))
        pins, now = self._prefixes.pool.pins, self._clock()
        for hold in self._holds.values():
            is_pinned = pins is not None and hold in pins
            expires_in = hold.deadline - now
            yield HeldPrefix(
                id=hold.name,
                num_tokens=hold.record.position,
                num_blocks=len(hold.blocks),
                is_pinned=is_pinned,
                expires_in=None if not is_pinned or expires_in == math.inf else expires_in,
                num_hits=hold.record.num_hits,
            )
