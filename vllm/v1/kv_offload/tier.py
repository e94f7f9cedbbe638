"""The scheduler's side of the tiers behind the pool: what is kept, and what is brought back."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, AnyKVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.hooks import (
    AdmissionNote,
    ConnectorHooks,
    KeptPrefixes,
)
from vllm.distributed.kv_transfer.own_loads import OwnLoads
from vllm.logger import init_logger
from vllm.v1.kv_offload.layout import ObjectLayout
from vllm.v1.kv_offload.lookups.step_times import StepTimes
from vllm.v1.kv_offload.lookups.tier_stores import TierStores
from vllm.v1.kv_offload.orders import OffloadOrders, OffloadReport
from vllm.v1.kv_offload.reports import (
    TierCounts,
    TierEvents,
    TierReports,
    TierUpdates,
)
from vllm.v1.kv_offload.restores.tier_restores import TierRestores
from vllm.v1.kv_offload.restores.warm_file import WARM_FILE
from vllm.v1.kv_offload.restores.warm_start import Warming
from vllm.v1.kv_offload.settings import OffloadSettings
from vllm.v1.kv_offload.store.keeper import Keeper
from vllm.v1.kv_offload.store.object_store import ObjectStore
from vllm.v1.kv_offload.tier_view import TiersView, WarmStart, find_disk_state, view_tier
from vllm.v1.kv_offload.writes.passing import note_passage
from vllm.v1.kv_offload.writes.tier_writes import TierWrites
from vllm.v1.kv_offload.writes.tracking import Tracker
from vllm.v1.messages import RESTORE_FAILED

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.metrics.stats import OffloadStats
    from vllm.v1.request import Request

logger = init_logger(__name__)

# For what waits to be written, the opening of the folder included: a script may end before its
# weights were digested. A front end gives its engine core 5 s to end.
_DRAIN_S = 4.0


class Tier(ConnectorHooks):
    """Host memory and a disk behind the pool, or one of them: what the connector talks to.

    ``TierStores`` has both, ``TierWrites`` fills them, ``TierRestores`` brings prefixes back for
    requests and ``Warming`` for none.

    Owns: these, and whether what the folder remembers was taken over.

    Args:
        config: All configuration.
        settings: The connector's.
        manager: The pool's.
        layout: What objects are made of.
        host: The index of the host tier; None: there is none.
        keeper: The disk's thread; None: there is no disk.
    """

    drain_timeout_s = _DRAIN_S

    def __init__(
        self,
        config: VllmConfig,
        settings: OffloadSettings,
        manager: KVCacheManager,
        layout: ObjectLayout,
        host: ObjectStore | None,
        keeper: Keeper | None,
    ) -> None:
        parallel, events = config.parallel_config, config.kv_events_config
        self._settings = settings
        self.stores = TierStores(layout, parallel.tensor_parallel_size, host, keeper)
        self.reports = TierReports(
            layout,
            TierCounts(),
            TierEvents(is_on=events is not None and events.enable_kv_cache_events),
            TierUpdates(layout, is_on=parallel.data_parallel_size > 1),
        )
        drafts = config.speculative_config is not None and config.speculative_config.use_eagle()
        self.tracker = Tracker(manager.coordinator, layout, needs_next_token=drafts)
        # What was computed by tokens nobody knows would be told with wrong ones.
        publishes = events is not None and events.publisher not in (None, "null")
        self.own_loads = OwnLoads(manager)
        most = 0 if publishes or keeper is None else settings.warm
        self.warming = Warming(manager, layout, self.own_loads, most)
        self.writes = TierWrites(self.stores, settings, manager, self.tracker, self.reports)
        self.restores = TierRestores(
            self.stores, settings, manager, self.writes, self.reports.counts, self.own_loads
        )
        self._step_times = StepTimes()
        # Whether what the folder remembers was taken over.
        self._is_open = False
        self._is_ending = False
        self._clock: Callable[[], float] = time.monotonic

    def use_clock(self, clock: Callable[[], float], unix_clock: Callable[[], float]) -> None:
        """Measure, and let time pass, by clocks of the caller's, in seconds."""
        self._clock = clock
        self.stores.use_clock(clock)
        self.warming.use_clock(clock, unix_clock)
        self.writes.use_clock(clock, unix_clock)

    def has_pending_work(self) -> bool:
        """Whether a step has something to do, or to hear, although no request runs."""
        stores = self.stores
        if self.restores.has_work:
            return True
        if self.warming.is_busy and not self._is_ending:
            return True
        if stores.is_opening and self._is_ending:
            return self.writes.has_computed
        if stores.is_opening and self._settings.warm:
            return not stores.is_digesting
        if stores.disk is not None and not self._is_open:
            return True
        if stores.keeper is not None and stores.keeper.has_committed:
            # Routers and listeners hear of it by a step, of an idle engine too.
            return True
        return self.writes.has_work

    def begin_drain(self) -> None:
        """Write what was held back, and nothing else: the engine stops."""
        self._is_ending = True
        self.writes.gate.end()

    def note_step_end(self) -> None:
        """Take note that the results of the first step that had none are here."""
        step = self._step_times.end(self._clock())
        if step is not None:
            self.stores.rates.note_step(*step)

    # ---- restoring ---------------------------------------------------------------------------

    def begin_own_loads(self) -> None:
        """Bring back what the last life used most, once it is known what is there."""
        keeper = self.stores.keeper
        is_there = self.stores.disk is not None and not self.stores.is_opening
        if keeper is not None and is_there and not self._is_open:
            self._is_open = True
            self.warming.open(keeper.recall(WARM_FILE))
            self.writes.resume_budget()
        if self._is_ending:
            return
        if self.warming.is_busy and self.restores.has_room:
            self.warming.begin(self.stores.tiers, self.restores.order)

    def explain_admission(self, request: Request) -> AdmissionNote | None:
        """Return what is known of a request that was admitted in this step."""
        return self.restores.explain(request)

    def why_failed(self, request_id: str, worker_meta: Any) -> str:
        """Return why a prefix did not come."""
        assert isinstance(worker_meta, OffloadReport)
        return worker_meta.failures.get(request_id, RESTORE_FAILED)

    def settle(self, request_id: str, *, has_failed: bool) -> bool:
        """Take note that no worker writes a load's rows any more; whether it was no request's."""
        self.restores.settle(request_id, has_failed=has_failed)
        num_tokens = self.own_loads.settle(request_id, has_failed=has_failed)
        if num_tokens is None:
            return False
        self.warming.note_loaded(request_id, num_tokens)
        return True

    def end(self, request: Request) -> None:
        """Take note of a request's end, perhaps before its restore's."""
        self.tracker.end(request)
        self.warming.note_end(request)
        self.restores.end(request)

    # ---- steps -------------------------------------------------------------------------------

    def make_orders(self, output: SchedulerOutput) -> OffloadOrders:
        """Return a step's orders: restores that began, and what it leaves to be written."""
        self._step_times.begin(output, self._clock())
        begun = {data.req_id: data.num_computed_tokens for data in output.scheduled_new_reqs}
        self.tracker.look(list(output.num_scheduled_tokens), begun)
        for passage in self.tracker.take_passages():
            for store in (self.stores.host, self.stores.disk):
                if store is not None:
                    note_passage(store, self.stores.layout, passage)
        orders = self.restores.take_orders()
        self.writes.fill(orders)
        keeper = None if self.stores.disk is None else self.stores.keeper
        if keeper is not None and (news := self.warming.take_news()) is not None:
            keeper.remember(WARM_FILE, news)
            self.writes.remember_budget()
        return orders

    def take_report(self, report: OffloadReport) -> None:
        """Take what the workers did."""
        self.writes.take_report(report)
        self.stores.note_reads(report)
        self.reports.counts.note_moves(report)
        self.restores.take_report(report)

    def reset(self) -> bool:
        """Forget everything in the tiers, and what waits to get there; False: not the disk's."""
        self.writes.clear()
        self.warming.forget()
        if self.stores.host is not None:
            self.stores.host.writer.clear()
        if self.stores.keeper is None:
            return True
        if self.stores.disk is None:
            # What the folder keeps will be found as soon as it is open.
            return not self.stores.is_opening
        return self.stores.keeper.clear()

    def close(self) -> None:
        """Write down what was measured, and let go of the folder."""
        if self.stores.keeper is None:
            return
        if self.stores.is_opening and self.writes.has_computed:
            logger.warning(
                "The engine stopped before the prefix cache on disk was open: what was "
                "computed is not kept. The digest of the weights goes on at the next start, "
                "behind the files that were read."
            )
        if (news := self.warming.take_news(is_last=True)) is not None:
            self.stores.keeper.remember(WARM_FILE, news)
        self.writes.remember_budget()
        self.stores.remember_rates()
        self.stores.keeper.close()

    # ---- what others see ---------------------------------------------------------------------

    def take_events(self) -> list[AnyKVCacheEvent]:
        """Drain the KV events of both tiers."""
        for store, medium in ((self.stores.host, MEDIUM_CPU), (self.stores.disk, MEDIUM_STORAGE)):
            if store is not None and (removed := store.take_removed()):
                self.reports.removed(removed, medium)
        if self.stores.keeper is not None and self.stores.keeper.has_committed:
            self.reports.stored(self.stores.keeper.take_committed(), MEDIUM_STORAGE)
        return self.reports.events.take()

    def take_kept(self) -> KeptPrefixes | None:
        """Drain what a router must know."""
        return self.reports.updates.take()

    def take_stats(self) -> OffloadStats | None:
        """Return what happened since the last call, and what the tiers hold; None: nothing."""
        return self.reports.counts.take({"host": self.stores.host, "disk": self.stores.disk})

    def view_tiers(self) -> TiersView:
        """Return what the tiers hold and did since the start; memory only."""
        totals = self.reports.counts.look({"host": self.stores.host, "disk": self.stores.disk})
        tiers, size = {}, self.stores.num_workers
        if self.stores.host is not None:
            limit = self._settings.host_bytes
            tiers["host"] = view_tier("host", "ready", limit, self.stores.host, size, totals)
        if (keeper := self.stores.keeper) is not None:
            assert self.stores.seen is not None
            state = find_disk_state(
                self.stores.seen,
                is_unreadable=self.stores.is_unreadable,
                read_only=self._settings.read_only,
            )
            tiers["disk"] = view_tier(
                "disk", state, keeper.max_bytes, self.stores.disk, size, totals
            )
        warm_start = self.warming.view()
        if warm_start.state != "off" and not self._is_open:
            can_open = self.stores.is_opening or self.stores.disk is not None
            warm_start = WarmStart("waiting" if can_open else "off")
        return TiersView(
            tiers,
            dict(totals.stores),
            dict(totals.restores),
            totals.num_corrupt,
            self.restores.num_loading,
            self.writes.num_bytes * size,
            self.writes.count_unwritten(),
            warm_start,
        )
