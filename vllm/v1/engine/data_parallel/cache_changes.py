"""The core's side: what its cache gained and lost, as small as routing needs it."""

import secrets
from collections import Counter
from collections.abc import Iterable

from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    MEDIUM_STORAGE,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventPublisher,
    KVEventBatch,
)
from vllm.distributed.kv_transfer.kv_connector.v1.hooks import KeptPrefixes
from vllm.v1.core.block_pool import TieredPool
from vllm.v1.engine.data_parallel.short_hash import shorten
from vllm.v1.engine.wire import CoreStatus

_Key = tuple[int, int]
# Fits a signed 64-bit field.
_EPOCH_BITS = 62


class CacheChanges(EventPublisher):
    """Listens to the KV events of a core on their way to their publisher, and sums them up.

    Blocks that hold one prefix are counted: a change is the first that comes and the last that
    goes. Groups that tell where prompts resume count as one. Tokens stay here. For the thread of
    the step loop.

    Owns: the counts of every prefix in the cache, who hangs on whom, and what was touched since the
    last changes.

    Args:
        publisher: Where events go on to.
        epoch: Tells this start of the core from others; None: drawn.
    """

    def __init__(self, publisher: EventPublisher, epoch: int | None = None) -> None:
        super().__init__()
        self._publisher = publisher
        self._epoch = secrets.randbits(_EPOCH_BITS) if epoch is None else epoch
        self._number = 0
        self._counts: Counter[_Key] = Counter()
        # Of dense prefixes: the one before it, and how many are here that go on from it.
        self._parents: dict[_Key, _Key | None] = {}
        self._num_children: Counter[_Key] = Counter()
        # Gone ones that others here go on from.
        self._holes: set[_Key] = set()
        self._told_holes: frozenset[int] = frozenset()
        # Groups of checkpoints stand under the first of them.
        self._stands_for: dict[int, int] = {}
        # Whether each was there when the last changes left.
        self._touched: dict[_Key, bool] = {}
        # Prefixes in tiers behind the pool, by kind; what came and went.
        self._kept: set[_Key] = set()
        self._kept_touched: dict[_Key, bool] = {}
        self._kept_step = 0
        self._is_cleared = False
        self._tells_all = False
        self._told: tuple[int, int, int] | None = None

    def publish(self, batch: KVEventBatch) -> None:
        """Note what a step did to the cache, and pass it on."""
        for event in batch.events:
            if getattr(event, "medium", None) in (MEDIUM_CPU, MEDIUM_STORAGE):
                continue  # tiers behind the pool name whole objects
            if isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                group = event.group_idx or 0
                group = self._stands_for.get(group, group)
                for block_hash in event.block_hashes:
                    self._remove((group, shorten(block_hash)))
            elif isinstance(event, AllBlocksCleared):
                self._clear()
        self._publisher.publish(batch)

    def note_kept(self, updates: KeptPrefixes) -> None:
        """Note what tiers behind the pool gained and lost."""
        self._kept_step = updates.group_tokens
        for shorts_by_kind, is_there in ((updates.stored, True), (updates.removed, False)):
            for kind, shorts in shorts_by_kind.items():
                for short in shorts:
                    key = (kind, short)
                    self._kept_touched.setdefault(key, key in self._kept)
                    (self._kept.add if is_there else self._kept.discard)(key)

    def shutdown(self) -> None:
        """Release the publisher."""
        self._publisher.shutdown()

    def _clear(self) -> None:
        for known in (self._counts, self._touched, self._parents, self._num_children, self._holes):
            known.clear()
        self._is_cleared = True

    def _store(self, event: BlockStored) -> None:
        group = event.group_idx or 0
        if not event.block_size:
            group = self._stands_for.setdefault(group, min(self._stands_for, default=group))
        before = event.parent_block_hash
        parent = None if before is None else (group, shorten(before))
        for block_hash in event.block_hashes:
            key = (group, shorten(block_hash))
            number = self._counts[key]
            self._touched.setdefault(key, number > 0)
            self._counts[key] = number + 1
            if event.block_size:
                if not number:
                    self._hang(key, parent)
                parent = key

    def _hang(self, key: _Key, parent: _Key | None) -> None:
        self._parents[key] = parent
        self._holes.discard(key)
        if parent is not None:
            self._num_children[parent] += 1
            if parent not in self._counts:
                self._holes.add(parent)

    def _remove(self, key: _Key) -> None:
        number = self._counts[key]
        self._touched.setdefault(key, number > 0)
        if number > 1:
            self._counts[key] = number - 1
            return
        del self._counts[key]
        parent = self._parents.pop(key, None)
        if parent is not None:
            self._num_children[parent] -= 1
            if not self._num_children[parent]:
                del self._num_children[parent]
                self._holes.discard(parent)
        if key in self._num_children:
            self._holes.add(key)

    @property
    def has_moved(self) -> bool:
        """Whether prefixes came or went since the last changes."""
        return bool(self._touched or self._is_cleared)

    def tell_all(self) -> None:
        """Let the next changes be all there is: somebody missed some."""
        self._tells_all = True

    def take(self, num_running: int, num_waiting: int, num_unused_blocks: int) -> CoreStatus | None:
        """Return what is new since the last call; None: nothing."""
        now = (num_running, num_waiting, num_unused_blocks)
        is_whole = self._is_cleared or self._tells_all
        is_same = not self._touched and not self._kept_touched and now == self._told
        if is_same and not is_whole:
            return None
        stored: dict[int, list[int]] = {}
        removed: dict[int, list[int]] = {}
        if self._tells_all:
            for group, short in self._counts:
                stored.setdefault(group, []).append(short)
        else:
            for key, was_there in self._touched.items():
                is_there = key in self._counts
                if is_there != was_there:
                    (stored if is_there else removed).setdefault(key[0], []).append(key[1])
        if is_whole:
            kept, unkept = _by_group(self._kept), {}
        else:
            moved = [key for key, was in self._kept_touched.items() if (key in self._kept) != was]
            kept = _by_group(key for key in moved if key in self._kept)
            unkept = _by_group(key for key in moved if key not in self._kept)
        holes = frozenset(short for _, short in self._holes)
        changes = CoreStatus(
            *now,
            is_cleared=is_whole,
            stored=stored,
            removed=removed,
            holes=None if holes == self._told_holes and not is_whole else sorted(holes),
            epoch=self._epoch,
            number=self._number,
            kept=kept,
            unkept=unkept,
            kept_step=self._kept_step,
        )
        self._number += 1
        self._touched.clear()
        self._kept_touched.clear()
        self._is_cleared, self._tells_all, self._told = False, False, now
        self._told_holes = holes
        return changes


def _by_group(keys: Iterable[_Key]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for group, short in keys:
        found.setdefault(group, []).append(short)
    return found


def count_unused_blocks(pool: TieredPool) -> int:
    """Return about how many blocks hold nothing that anybody asked to keep."""
    return pool.num_scratch_blocks + pool.num_spare_blocks
