"""The scheduler's side of the tiers behind the pool: what is kept, and what is brought back."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, AnyKVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import AdmissionNote, KeptPrefixes
from vllm.distributed.kv_transfer.offloading.keeper import Keeper
from vllm.distributed.kv_transfer.offloading.latched import LatchedKeeper
from vllm.distributed.kv_transfer.offloading.layout import ObjectLayout
from vllm.distributed.kv_transfer.offloading.orders import (
    ObjectOrder,
    OffloadOrders,
    OffloadReport,
    RestoreOrder,
    WriteOrder,
)
from vllm.distributed.kv_transfer.offloading.passing import note_passage
from vllm.distributed.kv_transfer.offloading.pending_writes import PendingWrite, PendingWrites
from vllm.distributed.kv_transfer.offloading.reporting import TierCounts, TierEvents, TierNews
from vllm.distributed.kv_transfer.offloading.restoring import (
    Restorable,
    Tiers,
    choose_way,
    find_given_up,
    find_ways,
)
from vllm.distributed.kv_transfer.offloading.row_loads import RowLoads
from vllm.distributed.kv_transfer.offloading.settings import OffloadSettings
from vllm.distributed.kv_transfer.offloading.step_times import StepTimes
from vllm.distributed.kv_transfer.offloading.tracking import NOT_WORTH, Candidate, Tracker
from vllm.distributed.kv_transfer.offloading.viewing import find_disk_state, view_tier
from vllm.distributed.kv_transfer.offloading.warming import WARM_FILE, Warming
from vllm.distributed.kv_transfer.offloading.write_gate import WriteGate
from vllm.logger import init_logger
from vllm.v1.kv_offload.cells import ObjectKind
from vllm.v1.kv_offload.rates import Rates
from vllm.v1.kv_offload.records import Extent, ObjectSpec, Reservation
from vllm.v1.kv_offload.store import IndexUnreadError, ObjectStore
from vllm.v1.kv_offload.tier_view import TiersView, WarmStart
from vllm.v1.kv_offload.write_budget import WriteBudget
from vllm.v1.messages import CORRUPT, EVICTED_FROM_DISK, RESTORE_DECLINED

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.coordinator_interface import Coordinator
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.prefix.exports import PrefixBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.metrics.stats import OffloadStats
    from vllm.v1.request import Request

logger = init_logger(__name__)

# Copied out of the pool and not on the disk yet.
_MAX_QUEUED_BYTES = 64 << 20
# With less of the pool unused, what is written late is written now.
_SHORT_SHARE = 0.125
_MAX_RESTORES = 4
# A restore may take so many times what it should.
_PATIENCE = 4.0
_GRACE_S = 1.0
# Prompts that the tiers failed so often are computed.
_MAX_TRIES = 2
# A request waits no longer for the folder to be opened, or for a part of its index.
_PATIENT_S = 30.0
_FAILURES_TO_STOP = 8
_FAILURE_WINDOW_S = 60.0
# Steps that an object waits at the head of the queue for room.
_MAX_REFUSALS = 200
RATES_FILE = "rates"
BUDGET_FILE = "budget"


class Tier:
    """Host memory and a disk behind the pool, or one of them.

    Owns: the host tier, what waits to be written, what is on its way, the requests that restore.

    Args:
        config: All configuration.
        settings: The connector's.
        manager: The pool's.
        layout: What objects are made of.
        host: The index of the host tier; None: there is none.
        keeper: The disk's thread; None: there is no disk.
    """

    def __init__(
        self,
        config: VllmConfig,
        settings: OffloadSettings,
        manager: KVCacheManager,
        layout: ObjectLayout,
        host: ObjectStore | None,
        keeper: Keeper | None,
    ) -> None:
        self.host = host
        self.keeper = keeper
        self._settings = settings
        self._manager = manager
        self._coordinator: Coordinator = manager.coordinator
        self._layout = layout
        self._num_workers = config.parallel_config.tensor_parallel_size
        drafts = config.speculative_config is not None and config.speculative_config.use_eagle()
        self.tracker = Tracker(self._coordinator, layout, needs_next_token=drafts)
        self.rates: Rates | None = None
        self.counts = TierCounts()
        events = config.kv_events_config
        self._events = TierEvents(is_on=events is not None and events.enable_kv_cache_events)
        self._news = TierNews(layout, is_on=config.parallel_config.data_parallel_size > 1)
        # What was computed by tokens nobody knows would be told with wrong ones.
        publishes = events is not None and events.publisher not in (None, "null")
        self.warming = Warming(manager, layout, 0 if publishes or keeper is None else settings.warm)
        self._row_loads = RowLoads(manager, layout.unit)
        self._writes = PendingWrites(self._num_workers)
        # What the host tier has taken note of, on its way to the disk.
        self._for_disk: deque[Candidate] = deque()
        self._gate = WriteGate(
            settings.write_policy,
            WriteBudget(settings.write_budget_per_day),
            self._is_pool_short,
            lambda candidate: self._count_bytes(candidate) * self._num_workers,
        )
        self._found: dict[str, Restorable] = {}
        self._notes: dict[str, AdmissionNote] = {}
        self._loading: dict[str, Restorable] = {}
        # Copies in host memory of what is being restored from the disk.
        self._keeping: dict[str, list[Reservation]] = {}
        self._tries: dict[str, int] = {}
        # Until when a request waits to hear what is on the disk.
        self._deadlines: dict[str, float] = {}
        self._orders = OffloadOrders()
        self._read_failures: list[float] = []
        self._num_refused = 0
        self._step_times = StepTimes()
        # Whether what the folder remembers was taken over.
        self._is_open = False
        self._is_ending = False
        self._knows_size = False
        self._clock: Callable[[], float] = time.monotonic

    def use_clock(self, clock: Callable[[], float], unix_clock: Callable[[], float]) -> None:
        """Measure, and let time pass, by clocks of the caller's, in seconds."""
        self._clock = clock
        self.warming.use_clock(clock, unix_clock)
        self._gate.budget.use_clock(clock, unix_clock)

    def latch_keeper(self) -> LatchedKeeper | None:
        """Let the disk change only when somebody looks; returns who shows it, if there is one."""
        if self.keeper is None:
            return None
        self.keeper = latched = LatchedKeeper(self.keeper)
        return latched

    @property
    def store(self) -> ObjectStore | None:
        """The disk's store; None while it opens, and if it cannot be."""
        return None if self.keeper is None else self.keeper.store

    @property
    def _tiers(self) -> Tiers:
        return Tiers(self.host, self.store)

    def is_own(self, request_id: str) -> bool:
        """Whether a load is of no request's: its end is nobody else's business."""
        return self.warming.is_loading(request_id) or self._row_loads.is_loading(request_id)

    @property
    def _is_opening(self) -> bool:
        return self.keeper is not None and self.keeper.is_opening

    def _get_rates(self) -> Rates:
        """Return what was measured, by an earlier run too once the folder is open."""
        if self.rates is None:
            if self._is_opening:
                return Rates()
            text = None if self.keeper is None else self.keeper.recall(RATES_FILE)
            self.rates = Rates() if text is None else Rates.from_json(text.decode(errors="replace"))
        return self.rates

    def has_pending_work(self) -> bool:
        """Whether a step has something to do, or to hear, although no request runs."""
        if self._loading or self._orders.cancelled:
            return True
        if self.warming.is_busy and not self._is_ending:
            return True
        store = self.store
        if self._is_opening and self._is_ending:
            return self._has_computed
        if self._is_opening and self._settings.warm:
            assert self.keeper is not None
            return not self.keeper.is_digesting
        if store is not None and not self._is_open:
            return True
        if self.keeper is not None and self.keeper.has_committed:
            # Routers and listeners hear of it by a step, of an idle engine too.
            return True
        writes = store is not None and store.is_writable
        if not writes and self.host is None:
            return False
        if self.tracker.has_ended or self.tracker.waiting:
            return True
        if not writes:
            return False
        assert self.keeper is not None
        waits = self._for_disk or self._gate.has_work
        return bool(len(self._writes) or waits or self.keeper.num_uncommitted)

    @property
    def _has_computed(self) -> bool:
        """Whether something waits for the folder to be opened."""
        return bool(self.tracker.has_ended or self.tracker.waiting or self._for_disk)

    def begin_drain(self) -> None:
        """Write what was held back, and nothing else: the engine stops."""
        self._is_ending = True
        self._gate.end()

    def _is_pool_short(self) -> bool:
        pool = self._manager.block_pool
        return pool.num_scratch_blocks < pool.num_gpu_blocks * _SHORT_SHARE

    def note_step_end(self) -> None:
        """Take note that the results of the first step that had none are here."""
        step = self._step_times.end(self._clock())
        if step is not None:
            self._get_rates().note_step(*step)

    # ---- restoring ---------------------------------------------------------------------------

    def find_tokens(self, request: Request, num_local: int) -> int | None:
        """Return the tokens beyond the local hit to restore; None: ask again."""
        request_id = request.request_id
        self._found.pop(request_id, None)
        self._notes.pop(request_id, None)
        if request.skip_reading_prefix_cache:
            return 0
        if self.store is None and self._is_opening:
            assert self.keeper is not None
            # In a moment it will be known what is there; not so while all weights are read, when
            # most likely nothing is.
            if not self.keeper.is_digesting:
                return self._wait(request_id)
        if self._row_loads.is_waited_for(request_id):
            return None
        if self._tries.get(request_id, 0) >= _MAX_TRIES:
            return 0
        tiers = Tiers(self.host, None if self._is_unreadable() else self.store)
        hashes, most = request.block_hashes, request.num_tokens - 1
        rebuild_tokens = self._coordinator.rebuild_tokens
        try:
            ways = find_ways(tiers, self._layout, hashes, num_local, most, rebuild_tokens)
            deepest = max((way.found.position for way in ways), default=num_local)
            until = self._find_given_up(request, deepest)
        except IndexUnreadError:
            # In a moment it will be: the disk's thread reads that part next.
            return self._wait(request_id)
        if not ways:
            self._note_given_up(request, until)
            return 0
        if any(way.found.objects[-1] in o.objects for way in ways for o in self._loading.values()):
            # It will be in the pool in a moment.
            return None
        queued = sum(other.num_bytes(is_host=False) for other in self._loading.values())
        way = choose_way(
            ways,
            self._get_rates(),
            num_local,
            request.num_tokens,
            queued,
            always=self._settings.always_restore,
        )
        if way is None:
            self._notes[request_id] = AdmissionNote({}, RESTORE_DECLINED, deepest)
            return 0
        if len(self._loading) >= _MAX_RESTORES:
            return None
        if way.is_rows_alone:
            self._tries[request_id] = self._tries.get(request_id, 0) + 1
            has_begun = self._row_loads.begin(request, way.found, self._order_restore)
            return None if has_begun else 0
        self._found[request_id] = way.found
        self._note_given_up(request, until, way.found.count_sources(num_local))
        return way.found.position - num_local

    def _wait(self, request_id: str) -> int | None:
        """Have a request ask again, but not for ever: a disk may hang."""
        deadline = self._deadlines.setdefault(request_id, time.monotonic() + _PATIENT_S)
        return None if time.monotonic() < deadline else 0

    def _find_given_up(self, request: Request, start: int) -> int:
        """Return how far a request would get if the tiers had kept all they ever had."""
        return find_given_up(
            self._tiers, self._layout, request.block_hashes, start, request.num_tokens - 1
        )

    def _note_given_up(
        self, request: Request, until: int, sources: dict[str, int] | None = None
    ) -> None:
        """Remember what to say of a request, should it be admitted in this step."""
        if until or sources:
            reason = EVICTED_FROM_DISK if until else None
            self._notes[request.request_id] = AdmissionNote(sources or {}, reason, until)

    def begin_own_loads(self) -> None:
        """Bring back what the last life used most, once it is known what is there."""
        if not self._is_open and self.store is not None and not self._is_opening:
            assert self.keeper is not None
            self._is_open = True
            self.warming.open(self.keeper.recall(WARM_FILE))
            if (known := self.keeper.recall(BUDGET_FILE)) is not None:
                self._gate.budget.resume(known.decode(errors="replace"))
        if self._is_ending:
            return
        if self.warming.is_busy and len(self._loading) < _MAX_RESTORES:
            self.warming.begin(self._tiers, self._order_restore)

    def explain(self, request: Request) -> AdmissionNote | None:
        """Return what is known of a request that was admitted in this step."""
        note = self._notes.pop(request.request_id, None)
        if note is not None and note.miss_reason == RESTORE_DECLINED:
            self.counts.restores[RESTORE_DECLINED.removeprefix("restore_")] += 1
        return note

    def begin(self, request: Request, num_external: int) -> None:
        """Order the restore of a request whose blocks are allocated."""
        request_id = request.request_id
        found = self._found.pop(request_id)
        blocks = self._manager.find_import(request, found.position, num_external, found.next_token)
        self._tries[request_id] = self._tries.get(request_id, 0) + 1
        self._order_restore(request_id, found, blocks)

    def _order_restore(self, request_id: str, found: Restorable, blocks: PrefixBlocks) -> None:
        self.counts.note_lookup(found)
        if not self._tiers.pin(found.objects):
            # Its worker ends it at once, as a failure.
            found = Restorable(found.position, (), (), None)
        rates = self._get_rates()
        timeout_s = _GRACE_S + _PATIENCE * rates.restore_s(
            found.num_bytes(is_host=False), 0, found.num_bytes(is_host=True)
        )
        self._loading[request_id] = found
        kept = self._keep_copies(request_id, found)
        objects = tuple(
            ObjectOrder(located.found.extent, first, end, located.is_host, keep)
            for located, (first, end), keep in zip(found.objects, found.spans, kept, strict=True)
        )
        self._orders.restores.append(RestoreOrder(request_id, objects, blocks, timeout_s))

    def _keep_copies(self, request_id: str, found: Restorable) -> list[Extent | None]:
        """Reserve room in host memory for what comes from the disk."""
        if self.host is None:
            return [None] * len(found.objects)
        kept: list[Extent | None] = []
        reserved: list[Reservation] = []
        for located in found.objects:
            entry = located.found
            reservation = None
            if not located.is_host:
                spec = ObjectSpec(
                    entry.extent.key,
                    entry.position,
                    entry.extent.num_bytes,
                    entry.next_token,
                    entry.is_shared,
                )
                reservation = self._reserve_host(spec)
            kept.append(None if reservation is None else reservation.extent)
            reserved += [] if reservation is None else [reservation]
        if reserved:
            self._keeping[request_id] = reserved
        return kept

    def settle(self, request_id: str, *, has_failed: bool) -> None:
        """Take note that no worker writes a request's rows any more."""
        found = self._loading.pop(request_id, None)
        if found is None:
            return
        self._tiers.unpin(found.objects)
        kept = self._keeping.pop(request_id, [])
        if kept:
            assert self.host is not None
            if has_failed:
                self.host.abandon(kept)
            else:
                self._commit_host(kept)
        self.warming.settle(request_id, has_failed=has_failed)
        self._row_loads.settle(request_id, has_failed=has_failed)
        if not has_failed:
            self.counts.restores["restored"] += 1
            self._tries.pop(request_id, None)

    def end(self, request: Request) -> None:
        """Take note of a request's end, perhaps before its restore's."""
        self.tracker.end(request)
        self._deadlines.pop(request.request_id, None)
        self.warming.note_end(request)
        self._tries.pop(request.request_id, None)
        if request.request_id in self._loading:
            self._orders.cancelled.append(request.request_id)

    def _is_unreadable(self) -> bool:
        """Whether the disk failed too often of late."""
        horizon = self._clock() - _FAILURE_WINDOW_S
        self._read_failures = [at for at in self._read_failures if at > horizon]
        return len(self._read_failures) >= _FAILURES_TO_STOP

    # ---- writing -----------------------------------------------------------------------------

    def make_orders(self, output: SchedulerOutput) -> OffloadOrders:
        """Return a step's orders: restores that began, and what it leaves to be written."""
        self._found.clear()
        self._notes.clear()
        self._step_times.begin(output, self._clock())
        begun = {data.req_id: data.num_computed_tokens for data in output.scheduled_new_reqs}
        self.tracker.look(list(output.num_scheduled_tokens), begun)
        store = self.store
        for passage in self.tracker.take_passages():
            for tier in (self.host, store):
                if tier is not None:
                    note_passage(tier, self._layout, passage)
        orders, self._orders = self._orders, OffloadOrders()
        if self.host is not None:
            shape = self.host.shape
            orders.host_bytes = shape.max_slots * shape.slot_bytes
            self._fill_host(self.host, orders)
        if store is not None:
            assert self.keeper is not None
            assert self.keeper.path is not None
            orders.folder, orders.slot_bytes = str(self.keeper.path), store.shape.slot_bytes
            self._fill_disk(store, orders)
            if (news := self.warming.take_news()) is not None:
                self.keeper.remember(WARM_FILE, news)
                self._remember_budget()
        elif not self._is_opening:
            # It will never be open.
            self._for_disk.clear()
            self._gate.clear()
            if self.host is None:
                self.tracker.waiting.clear()
        return orders

    def _remember_budget(self) -> None:
        if self.keeper is not None and self._settings.write_budget_per_day is not None:
            self.keeper.remember(BUDGET_FILE, self._gate.budget.to_json().encode())

    def _fill_host(self, host: ObjectStore, orders: OffloadOrders) -> None:
        """Order what waits to be copied to host memory; the disk reads it there."""
        waiting = self.tracker.waiting
        while waiting:
            candidate = waiting.popleft()
            if not host.contains([candidate.key])[0]:
                spec, blocks = self._locate(candidate)
                if spec is None or blocks is None:
                    self.counts.stores["dropped"] += 1
                    continue
                reservation = self._reserve_host(spec)
                if reservation is not None:
                    span = candidate.first, candidate.end
                    orders.writes.append(WriteOrder(*span, blocks, reservation.extent, None))
                    # Found by later steps only, whose orders workers take after this one's.
                    self._events.note(reservation.spec.key, candidate.block_hashes, self._layout)
                    self._commit_host([reservation])
            if self.keeper is not None:
                self._for_disk.append(candidate)

    def _reserve_host(self, spec: ObjectSpec) -> Reservation | None:
        """Take room in host memory, where giving up takes no time."""
        assert self.host is not None
        (reservation,) = self.host.reserve([spec])
        if reservation is None and not self.host.contains([spec.key])[0]:
            self.host.make_room()
            (reservation,) = self.host.reserve([spec])
        return reservation

    def _commit_host(self, reservations: Sequence[Reservation]) -> None:
        assert self.host is not None
        done = self.host.commit(reservations)
        keys = [reservation.spec.key for reservation in done]
        self._events.stored(keys, MEDIUM_CPU)
        self._news.stored(keys, MEDIUM_CPU)

    def _fill_disk(self, store: ObjectStore, orders: OffloadOrders) -> None:
        computed = self.tracker.waiting if self.host is None else self._for_disk
        if not store.is_writable:
            computed.clear()
            self._gate.clear()
            return
        self._gate.take(computed)
        if not store.is_ready:
            # All that waits for is the rest of the index.
            return
        if not self._knows_size:
            self._knows_size = True
            assert self.keeper is not None
            self._gate.begin(self.keeper.max_bytes, store.opened_bytes * self._num_workers)
        if self._gate.num_unproven:
            self.counts.stores["unproven"] += self._gate.num_unproven
            self._gate.num_unproven = 0
        self.counts.num_backpressure += self._gate.num_dropped
        self._gate.num_dropped = 0
        waiting = self._gate.ready
        while waiting and self._writes.num_bytes < _MAX_QUEUED_BYTES:
            if not self._order_write(store, waiting[0], orders):
                break
            waiting.popleft()

    def _order_write(self, store: ObjectStore, candidate: Candidate, orders: OffloadOrders) -> bool:
        """Order an object to be written to the disk; False: there is no room for it yet."""
        if store.contains([candidate.key])[0]:
            return True
        if self._is_superseded(candidate):
            self.counts.stores["superseded"] += 1
            return True
        near = None if self.host is None else self.host.find([candidate.key])[0]
        blocks: PrefixBlocks | None = None
        if near is not None:
            extent = near.extent
            size, token, is_shared = extent.num_bytes, near.next_token, candidate.is_shared
            spec = ObjectSpec(extent.key, near.position, size, token, is_shared)
        else:
            found, blocks = self._locate(candidate)
            if found is None:
                self.counts.stores["dropped"] += 1
                return True
            spec = found
        if not self._gate.budget.allows(spec.num_bytes * self._num_workers):
            self.counts.stores["over_budget"] += 1
            return True
        reservation = store.reserve([spec])[0]
        if reservation is None:
            assert self.keeper is not None
            store.want_room(sum(self._count_bytes(other) for other in self._gate.ready))
            self.keeper.make_room()
            self._num_refused += 1
            if self._num_refused < _MAX_REFUSALS:
                return False
            # It is larger than the store takes, or the disk is full of what cannot be given up.
            self.counts.stores["no_room"] += 1
            self._num_refused = 0
            return True
        self._num_refused = 0
        self._gate.budget.spend(spec.num_bytes * self._num_workers)
        self._gate.turnover.spend(spec.num_bytes * self._num_workers)
        is_pinned = near is not None and self.host is not None and self.host.pin([near])
        self._writes.add(reservation, near if is_pinned else None)
        self._events.note(candidate.key, candidate.block_hashes, self._layout)
        orders.writes.append(
            WriteOrder(
                candidate.first,
                candidate.end,
                blocks,
                None if near is None else near.extent,
                reservation.extent,
            )
        )
        return True

    def _locate(self, candidate: Candidate) -> tuple[ObjectSpec | None, PrefixBlocks | None]:
        """Return what an object is and where its rows lie; None: the pool gave them up."""
        hashes, first, end = candidate.block_hashes, candidate.first, candidate.end
        if candidate.key.kind is ObjectKind.ROWS:
            blocks = self._coordinator.locate_rows(hashes, first, end)
        else:
            blocks = self._coordinator.locate_checkpoint(hashes, end, first)
        if blocks is None:
            return None, None
        num_bytes = self._count_bytes(candidate)
        token, is_shared = blocks.next_token, candidate.is_shared
        return ObjectSpec(candidate.key, end, num_bytes, token, is_shared), blocks

    def _count_bytes(self, candidate: Candidate) -> int:
        kind, first, end = candidate.key.kind, candidate.first, candidate.end
        return self._layout.object_bytes(kind, first, end)

    def _is_superseded(self, candidate: Candidate) -> bool:
        """Whether a conversation has left a checkpoint behind since it was queued."""
        if candidate.key.kind is ObjectKind.ROWS:
            return False
        standing = self._coordinator.find_standing(candidate.block_hashes, candidate.end)
        return standing in NOT_WORTH

    def take_report(self, report: OffloadReport) -> None:
        """Take what the workers did."""
        self._settle_writes(self._writes.take_ended(report))
        for name, moved in report.read.items():
            self._get_rates().note_restore(moved.num_bytes, moved.seconds, is_host=name == "host")
            if name == "disk":
                self._gate.turnover.note_read(moved.num_bytes)
        self.counts.note_moves(report)
        self._read_failures += [self._clock()] * report.num_failed_reads
        for is_host, sequence in report.corrupt:
            self._forget_corrupt(is_host, sequence)
        for reason in report.failures.values():
            self.counts.restores["corrupt" if reason == CORRUPT else "failed"] += 1

    def _settle_writes(self, ended: Sequence[PendingWrite]) -> None:
        if not ended:
            return
        if self.host is not None:
            self.host.unpin([write.source for write in ended if write.source is not None])
        written = [write.reservation for write in ended if not write.has_failed]
        if written and self.keeper is not None:
            self.keeper.commit(written)
        if self.store is None:
            return
        for is_unsynced in (False, True):
            lost = [w.reservation for w in ended if w.has_failed and w.is_unsynced is is_unsynced]
            if lost:
                self.store.abandon(lost, retire=is_unsynced)

    def _forget_corrupt(self, is_host: bool, sequence: int) -> None:
        self.counts.num_corrupt += 1
        store = self.host if is_host else self.store
        assert store is not None
        for found in self._loading.values():
            for located in found.objects:
                if (located.is_host, located.found.extent.sequence) == (is_host, sequence):
                    store.report_corrupt(located.found)
        if is_host:
            store.make_room()
        elif self.keeper is not None:
            self.keeper.make_room()

    def reset(self) -> bool:
        """Forget everything in the tiers, and what waits to get there."""
        self.tracker.waiting.clear()
        self._for_disk.clear()
        self._gate.clear()
        self.warming.forget()
        if self.host is not None:
            self.host.clear()
        return self.store is None or self.keeper is None or self.keeper.clear()

    def close(self) -> None:
        """Write down what was measured, and let go of the folder."""
        if self.keeper is not None:
            if self._is_opening and self._has_computed:
                logger.warning(
                    "The engine stopped before the prefix cache on disk was open: what was "
                    "computed is not kept. The digest of the weights goes on at the next start, "
                    "behind the files that were read."
                )
            if (news := self.warming.take_news(is_last=True)) is not None:
                self.keeper.remember(WARM_FILE, news)
            self._remember_budget()
            if self.rates is not None:
                self.keeper.remember(RATES_FILE, self.rates.to_json().encode())
            self.keeper.close()

    # ---- what others see ---------------------------------------------------------------------

    def take_events(self) -> list[AnyKVCacheEvent]:
        """Drain the KV events of both tiers."""
        for store, medium in ((self.host, MEDIUM_CPU), (self.store, MEDIUM_STORAGE)):
            if store is not None and store.has_removed:
                removed = store.take_removed()
                self._events.removed(removed, medium)
                self._news.removed(removed, medium)
        if self.keeper is not None and self.keeper.has_committed:
            stored = self.keeper.take_committed()
            self._events.stored(stored, MEDIUM_STORAGE)
            self._news.stored(stored, MEDIUM_STORAGE)
        return self._events.take()

    def take_kept(self) -> KeptPrefixes | None:
        """Drain what a router must know."""
        return self._news.take()

    def take_stats(self) -> OffloadStats | None:
        """Return what happened since the last call, and what the tiers hold; None: nothing."""
        return self.counts.take({"host": self.host, "disk": self.store})

    def view(self) -> TiersView:
        """Return what the tiers hold and did since the start; memory only."""
        totals = self.counts.look({"host": self.host, "disk": self.store})
        tiers, size = {}, self._num_workers
        if self.host is not None:
            limit = self._settings.host_bytes
            tiers["host"] = view_tier("host", "ready", limit, self.host, size, totals)
        if (keeper := self.keeper) is not None:
            state = find_disk_state(
                keeper, is_unreadable=self._is_unreadable(), read_only=self._settings.read_only
            )
            tiers["disk"] = view_tier("disk", state, keeper.max_bytes, self.store, size, totals)
        warm_start = self.warming.view()
        if warm_start.state != "off" and not self._is_open:
            can_open = self._is_opening or self.store is not None
            warm_start = WarmStart("waiting" if can_open else "off")
        return TiersView(
            tiers,
            dict(totals.stores),
            dict(totals.restores),
            totals.num_corrupt,
            len(self._loading),
            self._writes.num_bytes * size,
            self._count_unwritten(),
            warm_start,
        )

    def _count_unwritten(self) -> int:
        """Return what is on its way to the last tier, a request that has ended for one object."""
        count = len(self.tracker.waiting) + self.tracker.has_ended
        if self.keeper is not None:
            count += len(self._for_disk) + self._gate.num_waiting
            count += len(self._writes) + self.keeper.num_uncommitted
        return count
