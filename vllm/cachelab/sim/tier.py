"""The tiers behind the pool without a disk: their policy is real, their bytes are not.

    step scheduled -> orders -> SimDevice: when would each end? -> report of a step that is then due

Writes stand in one queue and reads in another, each served at a rate. The index, its order of
giving up and the room in its slots are the store's own, on files that only have sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from vllm.v1.kv_offload.connector import OffloadingConnector
from vllm.v1.kv_offload.orders import Moved, OffloadOrders, OffloadReport
from vllm.v1.kv_offload.store.file_calls import Buffer
from vllm.v1.kv_offload.store.folder import Identity, choose_slot_bytes, shape_store
from vllm.v1.kv_offload.store.object_store import ObjectStore
from vllm.v1.kv_offload.store.records import ObjectKey, ObjectSpec, Reservation
from vllm.v1.messages import RESTORE_FAILED
from vllm.v1.outputs import KVConnectorOutput

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.kv_offload.layout import ObjectLayout
    from vllm.v1.kv_offload.store.keeper import Keeper
    from vllm.v1.kv_offload.tier import Tier

_INDEX, _ROWS = 0, 1
_DEFAULT_BYTES = 16 << 30


@dataclass(frozen=True, slots=True)
class DiskRates:
    """What a disk and host memory do.

    Attributes:
        read_bytes_per_s: Verified reads from the disk into the pool.
        write_bytes_per_s: Synced writes.
        host_bytes_per_s: Reads from host memory.
        delay_s: Of any restore.
        sync_s: Of any batch of writes.
    """

    read_bytes_per_s: float = 1.1e9
    write_bytes_per_s: float = 0.8e9
    host_bytes_per_s: float = 4e9
    delay_s: float = 0.003
    sync_s: float = 0.004


class SimFiles:
    """File calls on files that have sizes and no bytes.

    Owns: the sizes.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}

    def open(self, path: Path, *, writable: bool = True) -> int:
        """Refuse: there are no paths."""
        raise OSError(f"{path} is no simulated file")

    def close(self, handle: int) -> None:
        """Nothing to close."""

    def size(self, handle: int) -> int:
        """Return a file's size."""
        return self._sizes.get(handle, 0)

    def allocate(self, handle: int, end: int) -> None:
        """Make a file longer."""
        self._sizes[handle] = end

    def truncate(self, handle: int, end: int) -> None:
        """Make a file shorter."""
        self._sizes[handle] = end

    def read(self, handle: int, buffer: memoryview, offset: int) -> int:
        """Read nothing."""
        return 0

    def write(self, handle: int, parts: Sequence[Buffer], offset: int) -> None:
        """Write nothing."""

    def sync(self, handle: int) -> None:
        """Nothing to sync."""

    def sync_folder(self, path: Path) -> None:
        """Nothing to sync."""

    def replace(self, path: Path, data: bytes) -> None:
        """Forget a small file."""


class SimKeeper:
    """A folder that is open from the start, whose thread takes no time.

    Owns: the store.

    Args:
        object_bytes: Sizes of usual objects.
        max_bytes: What all files may take.
        clock: Seconds.
    """

    is_opening = False
    is_digesting = False
    num_uncommitted = 0

    def __init__(
        self,
        object_bytes: Sequence[int],
        max_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        self.path: Path | None = Path("-")
        self.max_bytes = max_bytes
        slot_bytes = choose_slot_bytes(object_bytes)
        shape = shape_store(Identity({}, 1, object_bytes), max_bytes, slot_bytes)
        self.store: ObjectStore | None = ObjectStore(
            SimFiles(), _INDEX, (_ROWS,), shape, lambda wanted: wanted, clock
        )
        self.store.opening.load()
        self.make_room()

    def bind_wake(self, wake: Callable[[], None]) -> None:
        """Nobody sleeps."""

    def commit(self, reservations: Sequence[Reservation]) -> None:
        """Acknowledge objects."""
        assert self.store is not None
        self.store.writer.commit(reservations)
        self.store.writer.make_room()

    def make_room(self) -> None:
        """Free slots."""
        assert self.store is not None
        self.store.writer.make_room()

    def recall(self, name: str) -> bytes | None:
        """Return nothing: this is the folder's first life."""

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
        """Forget everything."""
        assert self.store is not None
        return self.store.writer.clear()

    def close(self) -> None:
        """Nothing to close."""


@dataclass(slots=True)
class _Restore:
    request_id: str
    due_s: float
    bytes_of: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0


class SimDevice:
    """When orders would end.

    Owns: what is on its way.

    Args:
        rates: Of the device.

    Attributes:
        written_bytes: So far.
        read_bytes: From the disk, so far.
        restore_s: Of each request whose prefix came, how long that took.
    """

    def __init__(self, rates: DiskRates) -> None:
        self._rates = rates
        self._reads_until = self._writes_until = 0.0
        self._writes: list[tuple[float, int]] = []
        self._restores: list[_Restore] = []
        self._cancelled: list[str] = []
        self.written_bytes = 0
        self.read_bytes = 0
        self.restore_s: dict[str, float] = {}

    def take(self, orders: OffloadOrders, now: float) -> None:
        """Begin what a step orders."""
        rates = self._rates
        written = [write.disk for write in orders.writes if write.disk is not None]
        if written:
            # One batch: nothing of it is acknowledged before all of it is synced.
            size = sum(extent.num_bytes for extent in written)
            self._writes_until = max(now, self._writes_until) + size / rates.write_bytes_per_s
            due = self._writes_until + rates.sync_s
            self._writes += [(due, extent.sequence) for extent in written]
            self.written_bytes += size
        for order in orders.restores:
            sizes = {"disk": 0, "host": 0}
            for target in order.objects:
                sizes["host" if target.is_host else "disk"] += target.extent.num_bytes
            begin = max(now, self._reads_until) if sizes["disk"] else now
            end = begin + sizes["disk"] / rates.read_bytes_per_s
            if sizes["disk"]:
                self._reads_until = end
            due = end + rates.delay_s + sizes["host"] / rates.host_bytes_per_s
            self._restores.append(_Restore(order.request_id, due, sizes, due - now))
        ids = {restore.request_id for restore in self._restores}
        self._cancelled += [name for name in orders.cancelled if name in ids]
        self._restores = [r for r in self._restores if r.request_id not in self._cancelled]

    def next_s(self) -> float | None:
        """Return when something ends next that a request waits for, else any; None: nothing is."""
        if self._restores:
            return min(restore.due_s for restore in self._restores)
        return min((due for due, _ in self._writes), default=None)

    def report(self, now: float) -> KVConnectorOutput:
        """Drain what has ended."""
        report = OffloadReport()
        report.written = {sequence: 1 for due, sequence in self._writes if due <= now}
        self._writes = [write for write in self._writes if write[0] > now]
        received: set[str] = set()
        for restore in self._restores:
            if restore.due_s > now:
                continue
            received.add(restore.request_id)
            tier = "disk" if restore.bytes_of["disk"] else "host"
            report.read.setdefault(tier, Moved()).add(restore.bytes_of[tier], restore.seconds)
            self.read_bytes += restore.bytes_of["disk"]
            self.restore_s[restore.request_id] = restore.seconds
        self._restores = [restore for restore in self._restores if restore.due_s > now]
        cancelled, self._cancelled = set(self._cancelled), []
        report.failures = dict.fromkeys(cancelled, RESTORE_FAILED)
        return KVConnectorOutput(
            finished_recving=received,
            failed_recving=cancelled,
            kv_connector_worker_meta=report,
        )


class SimTier(OffloadingConnector):
    """The connector over a simulated folder and device.

    Owns: the device, and its clock.
    """

    def bind_kv_cache_manager(self, manager: KVCacheManager) -> None:
        """Take the manager, and make the tiers."""
        self._clock: Callable[[], float] = lambda: 0.0
        self.device = SimDevice(DiskRates())
        super().bind_kv_cache_manager(manager)

    def use_clock(self, clock: Callable[[], float]) -> None:
        """Let time pass by a clock of the caller's, in seconds."""
        self._keeps.use_clock(clock, clock)
        self._clock = clock

    def use_rates(self, rates: DiskRates) -> None:
        """Let another device take the orders."""
        self.device = SimDevice(rates)

    def preload(self, specs: Sequence[ObjectSpec]) -> None:
        """Begin with a folder that holds objects, the oldest first."""
        keeper = self._keeps.stores.keeper
        for spec in specs if keeper is not None else ():
            assert keeper is not None
            assert keeper.store is not None
            (reservation,) = keeper.store.reserve([spec])
            if reservation is None:
                keeper.make_room()
                (reservation,) = keeper.store.reserve([spec])
            if reservation is not None:
                keeper.commit([reservation])
        if keeper is not None and keeper.store is not None:
            keeper.store.state.begin_serving(keeper.store.content.live_bytes)

    def take_orders(self, orders: OffloadOrders) -> None:
        """Begin what a step orders."""
        self.device.take(orders, self._clock())

    def report(self) -> KVConnectorOutput:
        """Drain what has ended."""
        return self.device.report(self._clock())

    @property
    def tier(self) -> Tier:
        """The policy."""
        return self._keeps

    def _make_keeper(self, config: KVCacheConfig, layout: ObjectLayout) -> Keeper:
        size = self._settings.max_bytes or _DEFAULT_BYTES
        return SimKeeper(layout.usual_bytes(), size, lambda: self._clock())
