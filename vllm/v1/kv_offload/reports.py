"""What the tiers tell others: counts for metrics, and KV events with their medium."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.distributed.kv_events import AnyKVCacheEvent, BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.hooks import KeptPrefixes
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.kv_offload.lookups.ways import Restorable
from vllm.v1.kv_offload.orders import OffloadReport
from vllm.v1.kv_offload.store.cells import ObjectKind
from vllm.v1.kv_offload.store.object_store import ObjectStore
from vllm.v1.kv_offload.store.records import ObjectKey
from vllm.v1.kv_offload.store.store_state import StoreCounts
from vllm.v1.metrics.stats import OffloadStats

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import BlockHash
    from vllm.v1.kv_offload.layout import ObjectLayout

# Objects whose whole hashes are remembered for their events.
_MAX_NAMES = 1 << 20


@dataclass
class TierCounts:
    """Counts since the last look at them, and their sums.

    Attributes:
        totals: Since the start, up to the last look.
        stores: Objects by what became of them.
        restores: Prefixes by what became of them.
        hits: Objects found, by tier.
        queries: Objects asked for, by tier.
        num_corrupt: Objects whose bytes were not those that were written.
        num_backpressure: Objects dropped because too many waited for the disk.
    """

    stores: Counter[str] = field(default_factory=Counter)
    restores: Counter[str] = field(default_factory=Counter)
    hits: Counter[str] = field(default_factory=Counter)
    queries: Counter[str] = field(default_factory=Counter)
    num_corrupt: int = 0
    num_backpressure: int = 0
    totals: OffloadStats = field(default_factory=OffloadStats)
    # What a look found that no report has told yet.
    _untold: OffloadStats | None = None
    _moves: OffloadReport = field(default_factory=OffloadReport)
    _last: dict[str, StoreCounts] = field(default_factory=dict)
    # What the tiers did and held at the last look.
    _known: list[tuple[int, ...]] = field(default_factory=list)

    def note_lookup(self, found: Restorable) -> None:
        """Count the objects of a prefix that is brought back."""
        for located in found.objects:
            tier = "host" if located.is_host else "disk"
            self.hits[tier] += 1
            self.queries["host"] += 1
            self.queries["disk"] += not located.is_host

    def note_moves(self, report: OffloadReport) -> None:
        """Count bytes and times."""
        if not (report.read or report.wrote):
            return
        self._moves = self._moves.aggregate(OffloadReport(read=report.read, wrote=report.wrote))

    def take(self, stores: Mapping[str, ObjectStore | None]) -> OffloadStats | None:
        """Drain the counts for a report, and add what the tiers hold; None: nothing happened."""
        if self._untold is None and not self._has_news(stores):
            return None
        stats, untold = self._collect(stores), self._untold
        if untold is None:
            return stats
        self._untold = None
        untold.add(stats)
        return untold

    def _has_news(self, stores: Mapping[str, ObjectStore | None]) -> bool:
        """Whether something was counted, or the tiers hold something else: asked every step."""
        if self.stores or self.restores or self.hits or self.queries:
            return True
        if self.num_corrupt or self.num_backpressure or self._moves.read or self._moves.wrote:
            return True
        return self._known != _describe(stores)

    def look(self, stores: Mapping[str, ObjectStore | None]) -> OffloadStats:
        """Return the sums since the start; the next report tells the same as without this."""
        stats = self._collect(stores)
        if self._untold is None:
            self._untold = OffloadStats()
        self._untold.add(stats)
        return self.totals

    def _collect(self, stores: Mapping[str, ObjectStore | None]) -> OffloadStats:
        """Drain the counts into the sums; returns what they were."""
        self.stores["dropped"] += self.num_backpressure
        stats = OffloadStats(num_corrupt=self.num_corrupt)
        self._known = _describe(stores)
        for name, store in stores.items():
            if store is None:
                continue
            counts, last = store.counts, self._last.get(name, StoreCounts())
            if name == "disk" or len([s for s in stores.values() if s is not None]) == 1:
                self.stores["stored"] += counts.committed - last.committed
                self.stores["failed"] += counts.failed - last.failed
            self.stores["evicted"] += counts.evicted - last.evicted
            self._last[name] = StoreCounts(
                committed=counts.committed, failed=counts.failed, evicted=counts.evicted
            )
            stats.capacity_bytes[name] = store.content.capacity_bytes
            stats.used_bytes[name] = store.content.used_bytes
            stats.live_bytes[name] = store.content.live_bytes
        stats.stores = {name: count for name, count in self.stores.items() if count}
        stats.restores = dict(self.restores)
        stats.hits, stats.queries = dict(self.hits), dict(self.queries)
        for name, moved in self._moves.read.items():
            stats.read_bytes[name], stats.read_seconds[name] = moved.num_bytes, moved.seconds
        for name, moved in self._moves.wrote.items():
            stats.write_bytes[name], stats.write_seconds[name] = moved.num_bytes, moved.seconds
        self.stores.clear()
        self.restores.clear()
        self.hits.clear()
        self.queries.clear()
        self.num_corrupt = self.num_backpressure = 0
        self._moves = OffloadReport()
        self.totals.add(stats)
        return stats


def _describe(stores: Mapping[str, ObjectStore | None]) -> list[tuple[int, ...]]:
    """Return numbers that change with whatever a report tells of the tiers themselves."""
    return [
        (
            store.counts.committed,
            store.counts.failed,
            store.counts.evicted,
            store.content.capacity_bytes,
            store.content.used_bytes,
            store.content.live_bytes,
        )
        for store in stores.values()
        if store is not None
    ]


class TierEvents:
    """KV events of what lies behind the pool; nothing while it is off.

    An object's event carries the hash of the prefix at whose end it stands. Only what this process
    announced is said to be gone: an index keeps no whole hashes.

    Owns: the events, and the whole hashes of what was announced.

    Args:
        is_on: Whether events are published.
    """

    def __init__(self, *, is_on: bool) -> None:
        self._is_on = is_on
        self._names: dict[ObjectKey, tuple[BlockHash, int]] = {}
        self._announced: set[tuple[ObjectKey, str]] = set()
        self._queue: list[AnyKVCacheEvent] = []

    def note(self, key: ObjectKey, block_hashes: Sequence[BlockHash], layout: ObjectLayout) -> None:
        """Remember an object's whole hash, before it is stored."""
        if not self._is_on or key in self._names:
            return
        for block_hash in reversed(block_hashes):
            if bytes(block_hash[: len(key.digest)]) == key.digest:
                size = layout.group_tokens if key.kind is ObjectKind.ROWS else 0
                self._names[key] = (block_hash, size)
                break
        if len(self._names) > _MAX_NAMES:
            del self._names[next(iter(self._names))]

    def stored(self, keys: Iterable[ObjectKey], medium: str) -> None:
        """Announce objects that can be found from now on."""
        for key in keys:
            known = self._names.get(key)
            if known is None:
                continue
            self._announced.add((key, medium))
            self._queue.append(
                BlockStored(
                    block_hashes=[maybe_convert_block_hash(known[0])],
                    parent_block_hash=None,
                    token_ids=[],
                    block_size=known[1],
                    lora_id=None,
                    medium=medium,
                    lora_name=None,
                )
            )

    def removed(self, keys: Iterable[ObjectKey], medium: str) -> None:
        """Announce objects that can be found no more."""
        for key in keys:
            known = self._names.get(key)
            if known is not None and (key, medium) in self._announced:
                self._announced.remove((key, medium))
                converted = maybe_convert_block_hash(known[0])
                self._queue.append(BlockRemoved([converted], medium=medium))

    def take(self) -> list[AnyKVCacheEvent]:
        """Drain the events."""
        events, self._queue = self._queue, []
        return events


class TierUpdates:
    """What lies behind the pool, for a router; nothing while there is none.

    Owns: which tiers have which object, and what changed since the last update.

    Args:
        layout: What objects are made of.
        is_on: Whether somebody listens.
    """

    def __init__(self, layout: ObjectLayout, *, is_on: bool) -> None:
        self._layout = layout
        self._is_on = is_on
        self._media: dict[ObjectKey, set[str]] = {}
        # Whether each was there when the last update left.
        self._touched: dict[ObjectKey, bool] = {}

    def stored(self, keys: Iterable[ObjectKey], medium: str) -> None:
        """Note objects that can be found from now on."""
        for key in keys if self._is_on else ():
            media = self._media.setdefault(key, set())
            self._touched.setdefault(key, bool(media))
            media.add(medium)

    def removed(self, keys: Iterable[ObjectKey], medium: str) -> None:
        """Note objects that can be found no more."""
        for key in keys if self._is_on else ():
            media = self._media.get(key)
            if media is None:
                continue
            self._touched.setdefault(key, True)
            media.discard(medium)
            if not media:
                del self._media[key]

    def take(self) -> KeptPrefixes | None:
        """Drain what changed."""
        if not self._touched:
            return None
        stored: dict[int, list[int]] = {0: [], 1: []}
        removed: dict[int, list[int]] = {0: [], 1: []}
        for key, was_there in self._touched.items():
            is_there = key in self._media
            if is_there != was_there:
                short = int.from_bytes(key.digest[8:], "little")
                for kind in self._kinds(key):
                    (stored if is_there else removed)[kind].append(short)
        self._touched.clear()
        return KeptPrefixes(self._layout.group_tokens, stored, removed)

    def _kinds(self, key: ObjectKey) -> tuple[int, ...]:
        if key.kind is ObjectKind.STATE:
            return (1,)
        # Where nothing but rows is needed, a request can resume behind any group of them.
        return (0,) if self._layout.has_windows else (0, 1)


@dataclass(frozen=True, slots=True)
class TierReports:
    """What the tiers tell whom.

    Attributes:
        layout: What objects are made of.
        counts: For metrics.
        events: For those who listen to KV events.
        updates: For a router.
    """

    layout: ObjectLayout
    counts: TierCounts
    events: TierEvents
    updates: TierUpdates

    def name(self, key: ObjectKey, block_hashes: Sequence[BlockHash]) -> None:
        """Remember an object's whole hash, before it is stored."""
        self.events.note(key, block_hashes, self.layout)

    def stored(self, keys: Sequence[ObjectKey], medium: str) -> None:
        """Tell of objects that can be found from now on."""
        self.events.stored(keys, medium)
        self.updates.stored(keys, medium)

    def removed(self, keys: Sequence[ObjectKey], medium: str) -> None:
        """Tell of objects that can be found no more."""
        self.events.removed(keys, medium)
        self.updates.removed(keys, medium)
