"""The core's side: what its cache gained and lost, as small as routing needs it."""

from collections import Counter
from collections.abc import Iterable

from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventPublisher,
    KVEventBatch,
)
from vllm.v1.core.tiered_pool import TieredPool
from vllm.v1.engine.data_parallel.short_hash import shorten
from vllm.v1.engine.wire import CoreStatus

_Key = tuple[int, int]


class CacheChanges(EventPublisher):
    """Listens to the KV events of a core on their way to their publisher, and sums them up.

    Blocks that hold one prefix are counted: a change is the first that comes and the last that
    goes. Tokens stay here. For the thread of the step loop.

    Owns: the counts of every prefix in the cache, and what was touched since the last changes.

    Args:
        publisher: Where events go on to.
    """

    def __init__(self, publisher: EventPublisher) -> None:
        super().__init__()
        self._publisher = publisher
        self._counts: Counter[_Key] = Counter()
        # Whether each was there when the last changes left.
        self._touched: dict[_Key, bool] = {}
        self._is_cleared = False
        self._told: tuple[int, int, int] | None = None

    def publish(self, batch: KVEventBatch) -> None:
        """Note what a step did to the cache, and pass it on."""
        for event in batch.events:
            if isinstance(event, BlockStored):
                self._count(event.group_idx or 0, event.block_hashes, 1)
            elif isinstance(event, BlockRemoved):
                self._count(event.group_idx or 0, event.block_hashes, -1)
            elif isinstance(event, AllBlocksCleared):
                self._counts.clear()
                self._touched.clear()
                self._is_cleared = True
        self._publisher.publish(batch)

    def shutdown(self) -> None:
        """Release the publisher."""
        self._publisher.shutdown()

    def _count(self, group: int, hashes: Iterable[bytes | int], change: int) -> None:
        for block_hash in hashes:
            key = (group, shorten(block_hash))
            number = self._counts[key]
            self._touched.setdefault(key, number > 0)
            if number + change > 0:
                self._counts[key] = number + change
            else:
                del self._counts[key]

    def take(self, num_running: int, num_waiting: int, num_unused_blocks: int) -> CoreStatus | None:
        """Return what is new since the last call; None: nothing."""
        now = (num_running, num_waiting, num_unused_blocks)
        if not self._touched and not self._is_cleared and now == self._told:
            return None
        stored: dict[int, list[int]] = {}
        removed: dict[int, list[int]] = {}
        for key, was_there in self._touched.items():
            is_there = key in self._counts
            if is_there != was_there:
                (stored if is_there else removed).setdefault(key[0], []).append(key[1])
        changes = CoreStatus(*now, is_cleared=self._is_cleared, stored=stored, removed=removed)
        self._touched.clear()
        self._is_cleared, self._told = False, now
        return changes


def count_unused_blocks(pool: TieredPool) -> int:
    """Return about how many blocks hold nothing that anybody asked to keep."""
    return pool.num_scratch_blocks + pool.num_spare_blocks
