"""What goes from the pool to host memory, and from there or from the pool to the disk."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from vllm.distributed.kv_events import MEDIUM_CPU
from vllm.v1.kv_offload.lookups.tier_stores import TierStores
from vllm.v1.kv_offload.orders import (
    OffloadOrders,
    OffloadReport,
    WriteOrder,
)
from vllm.v1.kv_offload.reports import TierReports
from vllm.v1.kv_offload.settings import OffloadSettings
from vllm.v1.kv_offload.store.cells import ObjectKind
from vllm.v1.kv_offload.store.object_store import ObjectStore
from vllm.v1.kv_offload.store.records import ObjectSpec, Reservation, StoredObject
from vllm.v1.kv_offload.writes.pending_writes import PendingWrite, PendingWrites
from vllm.v1.kv_offload.writes.tracking import NOT_WORTH, Candidate, Tracker
from vllm.v1.kv_offload.writes.write_budget import WriteBudget
from vllm.v1.kv_offload.writes.write_gate import WriteGate

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.pool.exports import PrefixBlocks

# Copied out of the pool and not on the disk yet.
_MAX_QUEUED_BYTES = 64 << 20
# With less of the pool unused, what is written late is written now.
_SHORT_SHARE = 0.125
# Steps that an object waits at the head of the queue for room.
_MAX_REFUSALS = 200
BUDGET_FILE = "budget"


class TierWrites:
    """Objects on their way to the tiers behind the pool.

    Owns: what waits for the disk, how much of it may be written, the writes under way.

    Args:
        stores: Where objects go.
        settings: The connector's.
        manager: The pool's.
        tracker: Tells what was computed.
        reports: Of what became of objects.
    """

    def __init__(
        self,
        stores: TierStores,
        settings: OffloadSettings,
        manager: KVCacheManager,
        tracker: Tracker,
        reports: TierReports,
    ) -> None:
        self._stores = stores
        self._settings = settings
        self._manager = manager
        self._tracker = tracker
        self._reports = reports
        self._writes = PendingWrites(stores.num_workers)
        # What the host tier has taken note of, on its way to the disk.
        self._for_disk: deque[Candidate] = deque()
        self.gate = WriteGate(
            settings.write_policy,
            WriteBudget(settings.write_budget_per_day),
            self._is_pool_short,
            lambda candidate: self._count_bytes(candidate) * stores.num_workers,
        )
        self._num_refused = 0
        self._knows_size = False

    def use_clock(self, clock: Callable[[], float], unix_clock: Callable[[], float]) -> None:
        """Let time pass by clocks of the caller's, in seconds."""
        self.gate.budget.use_clock(clock, unix_clock)

    @property
    def num_bytes(self) -> int:
        """Bytes under way to the disk, of one worker."""
        return self._writes.num_bytes

    @property
    def has_computed(self) -> bool:
        """Whether something waits for the folder to be opened."""
        return bool(self._tracker.has_ended or self._tracker.waiting or self._for_disk)

    @property
    def has_work(self) -> bool:
        """Whether a step has something to order, or to hear."""
        stores = self._stores
        writes = stores.disk is not None and stores.disk.state.is_writable
        if not writes and stores.host is None:
            return False
        if self._tracker.has_ended or self._tracker.waiting:
            return True
        if not writes:
            return False
        assert stores.keeper is not None
        waits = self._for_disk or self.gate.has_work
        return bool(len(self._writes) or waits or stores.keeper.num_uncommitted)

    def count_unwritten(self) -> int:
        """Return what is on its way to the last tier, a request that has ended for one object."""
        count = len(self._tracker.waiting) + self._tracker.has_ended
        if self._stores.keeper is not None:
            count += len(self._for_disk) + self.gate.num_waiting
            count += len(self._writes) + self._stores.keeper.num_uncommitted
        return count

    def _is_pool_short(self) -> bool:
        pool = self._manager.block_pool
        return pool.num_scratch_blocks < pool.num_gpu_blocks * _SHORT_SHARE

    # ---- the budget --------------------------------------------------------------------------

    def resume_budget(self) -> None:
        """Go on with what an earlier run wrote down."""
        keeper = self._stores.keeper
        if keeper is not None and (known := keeper.recall(BUDGET_FILE)) is not None:
            self.gate.budget.resume(known.decode(errors="replace"))

    def remember_budget(self) -> None:
        """Write down what was spent of it."""
        if self._stores.keeper is not None and self._settings.write_budget_per_day is not None:
            self._stores.keeper.remember(BUDGET_FILE, self.gate.budget.to_json().encode())

    # ---- ordering ----------------------------------------------------------------------------

    def fill(self, orders: OffloadOrders) -> None:
        """Add what a step leaves to be written. Mutates: ``orders``."""
        stores = self._stores
        if stores.host is not None:
            shape = stores.host.shape
            orders.host_bytes = shape.max_slots * shape.slot_bytes
            self._fill_host(stores.host, orders)
        if stores.disk is not None:
            assert stores.keeper is not None
            assert stores.keeper.path is not None
            orders.folder, orders.slot_bytes = str(stores.keeper.path), stores.disk.shape.slot_bytes
            self._fill_disk(stores.disk, orders)
        elif not stores.is_opening:
            # It will never be open.
            self._for_disk.clear()
            self.gate.clear()
            if stores.host is None:
                self._tracker.waiting.clear()

    def _fill_host(self, host: ObjectStore, orders: OffloadOrders) -> None:
        """Order what waits to be copied to host memory; the disk reads it there."""
        waiting = self._tracker.waiting
        while waiting:
            candidate = waiting.popleft()
            if not host.contains([candidate.key])[0]:
                spec, blocks = self._locate(candidate)
                if spec is None or blocks is None:
                    self._reports.counts.stores["dropped"] += 1
                    continue
                reservation = self.reserve_host(spec)
                if reservation is not None:
                    span = candidate.first, candidate.end
                    orders.writes.append(WriteOrder(*span, blocks, reservation.extent, None))
                    # Found by later steps only, whose orders workers take after this one's.
                    self._reports.name(candidate.key, candidate.block_hashes)
                    self.commit_host([reservation])
            if self._stores.keeper is not None and not candidate.stays_in_memory:
                self._for_disk.append(candidate)

    def _fill_disk(self, disk: ObjectStore, orders: OffloadOrders) -> None:
        computed = self._for_disk
        if self._stores.host is None:
            waiting = self._tracker.waiting
            computed.extend(one for one in waiting if not one.stays_in_memory)
            waiting.clear()
        if not disk.state.is_writable:
            computed.clear()
            self.gate.clear()
            return
        self.gate.take(computed)
        if not disk.state.is_ready:
            # All that waits for is the rest of the index.
            return
        if not self._knows_size:
            self._knows_size = True
            assert self._stores.keeper is not None
            used_bytes = disk.state.opened_bytes * self._stores.num_workers
            self.gate.begin(self._stores.keeper.max_bytes, used_bytes)
        counts = self._reports.counts
        if self.gate.num_unproven:
            counts.stores["unproven"] += self.gate.num_unproven
            self.gate.num_unproven = 0
        counts.num_backpressure += self.gate.num_dropped
        self.gate.num_dropped = 0
        waiting = self.gate.ready
        while waiting and self._writes.num_bytes < _MAX_QUEUED_BYTES:
            if not self._order(disk, waiting[0], orders):
                break
            waiting.popleft()

    def _order(self, disk: ObjectStore, candidate: Candidate, orders: OffloadOrders) -> bool:
        """Order an object to be written to the disk; False: there is no room for it yet."""
        if disk.contains([candidate.key])[0]:
            return True
        counts = self._reports.counts
        if self._is_superseded(candidate):
            counts.stores["superseded"] += 1
            return True
        host = self._stores.host
        near = None if host is None else host.find([candidate.key])[0]
        spec, blocks = self._locate(candidate) if near is None else (_copy(near, candidate), None)
        if spec is None:
            counts.stores["dropped"] += 1
            return True
        num_bytes = spec.num_bytes * self._stores.num_workers
        if not self.gate.budget.allows(num_bytes):
            counts.stores["over_budget"] += 1
            return True
        reservation = disk.reserve([spec])[0]
        if reservation is None:
            return self._note_refusal(disk)
        self._num_refused = 0
        self.gate.budget.spend(num_bytes)
        self.gate.turnover.spend(num_bytes)
        is_pinned = near is not None and host is not None and host.pin([near])
        self._writes.add(reservation, near if is_pinned else None)
        self._reports.name(candidate.key, candidate.block_hashes)
        source = None if near is None else near.extent
        span = candidate.first, candidate.end
        orders.writes.append(WriteOrder(*span, blocks, source, reservation.extent))
        return True

    def _note_refusal(self, disk: ObjectStore) -> bool:
        """Have room made for the object at the head of the queue; whether it waits no longer."""
        assert self._stores.keeper is not None
        disk.want_room(sum(self._count_bytes(other) for other in self.gate.ready))
        self._stores.keeper.make_room()
        self._num_refused += 1
        if self._num_refused < _MAX_REFUSALS:
            return False
        # It is larger than the store takes, or the disk is full of what cannot be given up.
        self._reports.counts.stores["no_room"] += 1
        self._num_refused = 0
        return True

    def _locate(self, candidate: Candidate) -> tuple[ObjectSpec | None, PrefixBlocks | None]:
        """Return what an object is and where its rows lie; None: the pool gave them up."""
        hashes, first, end = candidate.block_hashes, candidate.first, candidate.end
        coordinator = self._manager.coordinator
        if candidate.key.kind is ObjectKind.ROWS:
            blocks = coordinator.locate_rows(hashes, first, end)
        else:
            blocks = coordinator.locate_checkpoint(hashes, end, first)
        if blocks is None:
            return None, None
        num_bytes = self._count_bytes(candidate)
        token, is_shared = blocks.next_token, candidate.is_shared
        return ObjectSpec(candidate.key, end, num_bytes, token, is_shared), blocks

    def _count_bytes(self, candidate: Candidate) -> int:
        kind, first, end = candidate.key.kind, candidate.first, candidate.end
        return self._stores.layout.object_bytes(kind, first, end)

    def _is_superseded(self, candidate: Candidate) -> bool:
        """Whether a conversation has left a checkpoint behind since it was queued."""
        if candidate.key.kind is ObjectKind.ROWS:
            return False
        coordinator = self._manager.coordinator
        return coordinator.find_standing(candidate.block_hashes, candidate.end) in NOT_WORTH

    # ---- host memory -------------------------------------------------------------------------

    def reserve_host(self, spec: ObjectSpec) -> Reservation | None:
        """Take room in host memory, where giving up takes no time."""
        host = self._stores.host
        assert host is not None
        (reservation,) = host.reserve([spec])
        if reservation is None and not host.contains([spec.key])[0]:
            host.writer.make_room()
            (reservation,) = host.reserve([spec])
        return reservation

    def commit_host(self, reservations: Sequence[Reservation]) -> None:
        """Let objects in host memory be found."""
        assert self._stores.host is not None
        done = self._stores.host.writer.commit(reservations)
        self._reports.stored([reservation.spec.key for reservation in done], MEDIUM_CPU)

    # ---- ending ------------------------------------------------------------------------------

    def take_report(self, report: OffloadReport) -> None:
        """Take what the workers wrote, or could not; what was read pays for writes."""
        self._settle(self._writes.take_ended(report))
        if (read := report.read.get("disk")) is not None:
            self.gate.turnover.note_read(read.num_bytes)

    def _settle(self, ended: Sequence[PendingWrite]) -> None:
        if not ended:
            return
        stores = self._stores
        if stores.host is not None:
            stores.host.unpin([write.source for write in ended if write.source is not None])
        written = [write.reservation for write in ended if not write.has_failed]
        if written and stores.keeper is not None:
            stores.keeper.commit(written)
        if stores.disk is None:
            return
        for is_unsynced in (False, True):
            lost = [w.reservation for w in ended if w.has_failed and w.is_unsynced is is_unsynced]
            if lost:
                stores.disk.abandon(lost, retire=is_unsynced)

    def clear(self) -> None:
        """Forget what waits."""
        self._tracker.waiting.clear()
        self._for_disk.clear()
        self.gate.clear()


def _copy(near: StoredObject, candidate: Candidate) -> ObjectSpec:
    """Return what an object on the disk is that is read from host memory."""
    extent = near.extent
    return ObjectSpec(
        extent.key, near.position, extent.num_bytes, near.next_token, candidate.is_shared
    )
