"""How long blocks live and how often they are reused, on a sample of them."""

from __future__ import annotations

import random
import time
from collections import deque
from itertools import pairwise
from typing import Protocol

from vllm.v1.metrics.stats import KVCacheEvictionEvent

_ACCESSES_KEPT = 4
_NS_PER_S = 1e9


def _seconds(nanoseconds: int) -> float:
    return nanoseconds / _NS_PER_S


class NumberedBlock(Protocol):
    """All that is asked of a block."""

    block_id: int


class BlockMetricsState:
    """Times of one sampled block, on the monotonic clock in nanoseconds.

    Attributes:
        birth_time_ns: When it was allocated.
        last_access_ns: When it was last used.
        access_history: Its last few accesses after allocation.
    """

    __slots__ = ("access_history", "birth_time_ns", "last_access_ns")

    def __init__(self) -> None:
        now = time.monotonic_ns()
        self.birth_time_ns = now
        self.last_access_ns = now
        self.access_history: deque[int] = deque(maxlen=_ACCESSES_KEPT)

    def record_access(self) -> None:
        """Note a use, now."""
        now = time.monotonic_ns()
        self.last_access_ns = now
        self.access_history.append(now)

    def get_lifetime_seconds(self) -> float:
        """Return the time since allocation."""
        return _seconds(time.monotonic_ns() - self.birth_time_ns)

    def get_idle_time_seconds(self) -> float:
        """Return the time since the last use."""
        return _seconds(time.monotonic_ns() - self.last_access_ns)

    def get_reuse_gaps_seconds(self) -> list[float]:
        """Return the times between the kept accesses, oldest first."""
        return [_seconds(later - earlier) for earlier, later in pairwise(self.access_history)]


class KVCacheMetricsCollector:
    """Follows a share of the blocks from allocation to eviction.

    Owns: the states of the sampled blocks and the events not drained yet.

    Args:
        sample_rate: Share of blocks to follow, above 0 and at most 1.
    """

    def __init__(self, sample_rate: float = 0.01) -> None:
        assert 0 < sample_rate <= 1.0, (
            f"sample_rate must be above 0 and at most 1, got {sample_rate}."
        )
        self.sample_rate = sample_rate
        self.block_metrics: dict[int, BlockMetricsState] = {}
        self._eviction_events: list[KVCacheEvictionEvent] = []

    def should_sample_block(self) -> bool:
        """Draw whether the next block is followed."""
        return random.random() < self.sample_rate

    def on_block_allocated(self, block: NumberedBlock) -> None:
        """Start to follow a block, if drawn."""
        if self.should_sample_block():
            self.block_metrics[block.block_id] = BlockMetricsState()

    def on_block_accessed(self, block: NumberedBlock) -> None:
        """Note a hit on a block."""
        state = self.block_metrics.get(block.block_id)
        if state is not None:
            state.record_access()

    def on_block_evicted(self, block: NumberedBlock) -> None:
        """End following a block and make its event."""
        state = self.block_metrics.pop(block.block_id, None)
        if state is None:
            return
        self._eviction_events.append(
            KVCacheEvictionEvent(
                lifetime_seconds=state.get_lifetime_seconds(),
                idle_seconds=state.get_idle_time_seconds(),
                reuse_gaps_seconds=tuple(state.get_reuse_gaps_seconds()),
            )
        )

    def reset(self) -> None:
        """Drop all states and events."""
        self.block_metrics.clear()
        self._eviction_events = []

    def drain_events(self) -> list[KVCacheEvictionEvent]:
        """Return the events since the last call."""
        events, self._eviction_events = self._eviction_events, []
        return events
