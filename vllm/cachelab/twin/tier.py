"""The tiers of a recorded run: what decided is decided again, what the disk did is as recorded."""

from __future__ import annotations

from base64 import b64decode
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from vllm.cachelab.sim.tier import DiskRates, SimTier
from vllm.cachelab.trace.events import DiskChange, DiskObject, DiskSeen, TierReport
from vllm.v1.kv_offload.connector import OffloadingConnector
from vllm.v1.kv_offload.orders import Moved, OffloadReport
from vllm.v1.kv_offload.store.cells import ObjectKind
from vllm.v1.kv_offload.store.host_store import HostFile
from vllm.v1.kv_offload.store.object_store import ObjectStore
from vllm.v1.kv_offload.store.records import (
    Extent,
    ObjectKey,
    ObjectSpec,
    Reservation,
    StoredObject,
)
from vllm.v1.kv_offload.store.store_log import EVICTED, LOST, PUT, REFUSED
from vllm.v1.kv_offload.store.store_state import StoreShape
from vllm.v1.outputs import KVConnectorOutput

if TYPE_CHECKING:
    from vllm.cachelab.twin.trace_file import CacheTrace
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.kv_offload.layout import ObjectLayout
    from vllm.v1.kv_offload.store.keeper import Keeper

# As many as the store remembers.
_MAX_GHOSTS = 1 << 16
_NO_CLOCK = 0.0


def key_of(found: DiskObject) -> ObjectKey:
    """Return a recorded object's name."""
    return ObjectKey(ObjectKind(found.kind), b64decode(found.key))


def stored_of(found: DiskObject) -> StoredObject:
    """Return a recorded object, as a lookup would."""
    extent = Extent(key_of(found), found.sequence, found.num_bytes, ())
    token = None if found.next_token < 0 else found.next_token
    return StoredObject(0, extent, found.position, token)


def spec_of(found: DiskObject) -> ObjectSpec:
    """Return a recorded object, as it was written."""
    stored = stored_of(found)
    return ObjectSpec(
        stored.extent.key, stored.position, stored.extent.num_bytes, stored.next_token
    )


def measured_rates(trace: CacheTrace) -> DiskRates:
    """Return what the recorded device did, as far as it was asked for anything."""
    moved = {"disk": [0, 0.0], "host": [0, 0.0]}
    for step in trace.steps():
        for name, (num_bytes, seconds) in step.report.read.items() if step.report else ():
            moved[name][0] += num_bytes
            moved[name][1] += seconds
    rates = DiskRates(delay_s=0.0)
    rate = {name: size / seconds for name, (size, seconds) in moved.items() if seconds > 0 < size}
    return replace(
        rates,
        read_bytes_per_s=rate.get("disk", rates.read_bytes_per_s),
        host_bytes_per_s=rate.get("host", rates.host_bytes_per_s),
    )


def open_folder(trace: CacheTrace, tier: SimTier) -> None:
    """Let a simulated folder hold what the recorded one did when it was opened."""
    for event in trace.events:
        if isinstance(event, DiskSeen) and event.objects:
            by_age = sorted(event.objects, key=lambda found: found.sequence)
            tier.preload([spec_of(found) for found in by_age])
            return


class ReplayedStore(ObjectStore):
    """A store that changes between the same two questions as in life.

    Owns: what can be found, what is on its way, the changes to come.

    Args:
        changes: Of the whole record, in order.
    """

    def __init__(self, changes: Iterable[DiskChange]) -> None:
        shape = StoreShape(4096, 1, 0, 0)
        super().__init__(
            HostFile(None, 0), 0, (1,), shape, lambda wanted: wanted, lambda: _NO_CLOCK
        )
        self.opening.load()
        self._coming = deque(changes)
        self._found: dict[ObjectKey, StoredObject] = {}
        self._on_way: set[ObjectKey] = set()
        self._given_up: dict[ObjectKey, None] = {}
        self._refused: set[ObjectKey] = set()
        self._num_asked = 0
        self._sequence = 0

    def open(
        self, objects: Iterable[DiskObject], last_sequence: int, opened_bytes: int = 0
    ) -> None:
        """Begin with what the disk held."""
        self.state.begin_serving(opened_bytes)
        self._found = {key_of(found): stored_of(found) for found in objects}
        self._sequence = last_sequence

    def _ask(self) -> None:
        """Count a question; what was done before it is done now."""
        self._num_asked += 1
        self._refused.clear()
        coming = self._coming
        while coming and coming[0].after < self._num_asked:
            self._apply(coming.popleft())
        while coming and coming[0].after == self._num_asked and coming[0].kind == REFUSED:
            self._refused.add(key_of(coming.popleft().object))

    def _apply(self, change: DiskChange) -> None:
        key = key_of(change.object)
        if change.kind == PUT:
            self._found[key] = stored_of(change.object)
            self._given_up.pop(key, None)
            self._on_way.discard(key)
        elif change.kind == LOST:
            self._on_way.discard(key)
        elif change.kind != REFUSED:
            self._found.pop(key, None)
            if change.kind == EVICTED:
                self._given_up[key] = None
                if len(self._given_up) > _MAX_GHOSTS:
                    del self._given_up[next(iter(self._given_up))]

    def find(self, keys: Sequence[ObjectKey]) -> list[StoredObject | None]:
        """Return what could be found."""
        self._ask()
        return [self._found.get(key) for key in keys]

    def contains(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Say what could be found, or was on its way."""
        self._ask()
        return [key in self._found or key in self._on_way for key in keys]

    def was_given_up(self, key: ObjectKey) -> bool:
        """Whether an object had gone for want of room."""
        self._ask()
        return key in self._given_up

    def pin(self, objects: Sequence[StoredObject]) -> bool:
        """Whether objects were still there."""
        self._ask()
        for wanted in objects:
            found = self._found.get(wanted.extent.key)
            if found is None or found.extent.sequence != wanted.extent.sequence:
                return False
        self._sequence += 1
        return True

    def unpin(self, objects: Sequence[StoredObject]) -> None:
        """Nothing: what goes is recorded."""

    def use(self, keys: Sequence[ObjectKey], *, is_hit: bool) -> None:
        """Count it: what goes is recorded."""
        self._sequence += 1

    def pass_by(self, keys: Sequence[ObjectKey]) -> None:
        """Nothing: what goes is recorded."""

    def report_corrupt(self, found: StoredObject) -> None:
        """Nothing: what goes is recorded."""

    def reserve(self, specs: Sequence[ObjectSpec]) -> list[Reservation | None]:
        """Let objects be on their way for which there was room."""
        self._ask()
        if not self.state.is_writable:
            return [None] * len(specs)
        return [self._begin(spec) for spec in specs]

    def _begin(self, spec: ObjectSpec) -> Reservation | None:
        if spec.key in self._found or spec.key in self._on_way or spec.key in self._refused:
            return None
        self._sequence += 1
        self._on_way.add(spec.key)
        return Reservation(spec, Extent(spec.key, self._sequence, spec.num_bytes, ()))

    def abandon(self, reservations: Sequence[Reservation], *, retire: bool = False) -> None:
        """Let objects not be on their way any more."""
        self._on_way.difference_update(reservation.spec.key for reservation in reservations)


class ReplayedKeeper:
    """A folder that opens when it did.

    Owns: the store.
    """

    def __init__(self) -> None:
        self._store = ReplayedStore(())
        self._seen = DiskSeen(0, False, True, False, False)
        # Nothing, too, of a folder that could not be used.
        self._small: dict[str, bytes] = {}
        self.path: Path | None = Path("-")
        self.max_bytes = 0
        self.num_uncommitted = 0

    def expect(self, changes: Iterable[DiskChange]) -> None:
        """Take what the disk is going to do."""
        self._store = ReplayedStore(changes)

    def see(self, seen: DiskSeen) -> None:
        """Be as it was for the steps that follow."""
        if seen.is_open and not self._seen.is_open:
            self._store.open(seen.objects, seen.last_sequence, seen.opened_bytes)
            self.max_bytes = seen.max_bytes
            self._small = {name: text.encode() for name, text in seen.small.items()}
        self._seen = seen
        self._store.state.allow_writing(seen.is_writable)

    @property
    def store(self) -> ObjectStore | None:
        """What is on the disk."""
        return self._store if self._seen.is_open else None

    @property
    def is_opening(self) -> bool:
        """Whether it may be open in a moment."""
        return self._seen.is_opening

    @property
    def is_digesting(self) -> bool:
        """Whether that takes long."""
        return self._seen.is_digesting

    def bind_wake(self, wake: Callable[[], None]) -> None:
        """Nobody sleeps."""

    def commit(self, reservations: Sequence[Reservation]) -> None:
        """Nothing: what can be found is recorded."""

    def make_room(self) -> None:
        """Nothing: what goes is recorded."""

    def recall(self, name: str) -> bytes | None:
        """Return a small file."""
        return self._small.get(name) or None

    def remember(self, name: str, data: bytes) -> None:
        """Forget it: there is no next life."""

    @property
    def has_committed(self) -> bool:
        """Nothing: nobody listens."""
        return False

    def take_committed(self) -> list[ObjectKey]:
        """Return nothing: nobody listens."""
        return []

    def clear(self) -> bool:
        """Nothing: what goes is recorded."""
        return True

    def close(self) -> None:
        """Nothing to close."""


class ReplayedTier(OffloadingConnector):
    """The connector of a recorded run."""

    def begin(
        self, changes: Iterable[DiskChange], clock: Callable[[], float], unix_s: float
    ) -> None:
        """Take what the disk is going to do, and the record's clock."""
        tier = self._keeps
        tier.use_clock(clock, lambda: unix_s + clock())
        if isinstance(tier.stores.keeper, ReplayedKeeper):
            tier.stores.keeper.expect(changes)

    def see(self, seen: DiskSeen) -> None:
        """Let the disk be as it was for the steps that follow."""
        keeper = self._keeps.stores.keeper
        assert isinstance(keeper, ReplayedKeeper)
        keeper.see(seen)

    def _make_keeper(self, config: KVCacheConfig, layout: ObjectLayout) -> Keeper:
        return ReplayedKeeper()


def output_of(report: TierReport | None) -> KVConnectorOutput:
    """Return what a step heard of the tiers."""
    told = report or TierReport()
    return KVConnectorOutput(
        finished_recving=list(told.received),
        failed_recving=set(told.failed),
        kv_connector_worker_meta=OffloadReport(
            written=dict(told.written),
            unwritten=dict(told.unwritten),
            unsynced=frozenset(told.unsynced),
            corrupt=frozenset((is_host, sequence) for is_host, sequence in told.corrupt),
            failures=dict(told.failures),
            num_failed_reads=told.num_failed_reads,
            read={name: Moved(*moved) for name, moved in told.read.items()},
        ),
    )
