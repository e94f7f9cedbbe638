"""What is brought back from the tiers behind the pool: asked for, ordered, and ended."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.hooks import AdmissionNote
from vllm.distributed.kv_transfer.own_loads import OwnLoads
from vllm.sampling_params import SamplingParams
from vllm.v1.kv_offload.lookups.tier_stores import TierStores
from vllm.v1.kv_offload.lookups.ways import (
    Restorable,
    Way,
    choose_way,
    find_given_up,
    find_ways,
)
from vllm.v1.kv_offload.orders import (
    ObjectOrder,
    OffloadOrders,
    OffloadReport,
    RestoreOrder,
)
from vllm.v1.kv_offload.reports import TierCounts
from vllm.v1.kv_offload.settings import OffloadSettings
from vllm.v1.kv_offload.store.opening import IndexUnreadError
from vllm.v1.kv_offload.store.records import Extent, ObjectSpec, Reservation
from vllm.v1.kv_offload.writes.tier_writes import TierWrites
from vllm.v1.messages import CORRUPT, EVICTED_FROM_DISK, RESTORE_DECLINED
from vllm.v1.request import Request

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.pool.exports import PrefixBlocks

_MAX_RESTORES = 4
# A restore may take so many times what it should.
_PATIENCE = 4.0
_GRACE_S = 1.0
# Prompts that the tiers failed so often are computed.
_MAX_TRIES = 2
# Names the load of a request's rows.
_ROWS_OF = "rows of "
# A request waits no longer for the folder to be opened, or for a part of its index.
_PATIENT_S = 30.0


class TierRestores:
    """Prefixes on their way back into the pool.

    Owns: what was found for requests in this step, the restores under way and the copies in host
    memory of what they read, how often requests tried and until when they wait.

    Args:
        stores: Where prefixes are.
        settings: The connector's.
        manager: The pool's.
        writes: Keeps copies in host memory of what comes from the disk.
        counts: Of what became of prefixes.
        own_loads: Rows alone come by one of these.
    """

    def __init__(
        self,
        stores: TierStores,
        settings: OffloadSettings,
        manager: KVCacheManager,
        writes: TierWrites,
        counts: TierCounts,
        own_loads: OwnLoads,
    ) -> None:
        self._stores = stores
        self._settings = settings
        self._manager = manager
        self._writes = writes
        self._counts = counts
        self._own_loads = own_loads
        self._found: dict[str, Restorable] = {}
        self._notes: dict[str, AdmissionNote] = {}
        self._loading: dict[str, Restorable] = {}
        # Copies in host memory of what is being restored from the disk.
        self._keeping: dict[str, list[Reservation]] = {}
        self._tries: dict[str, int] = {}
        # Until when a request waits to hear what is on the disk.
        self._deadlines: dict[str, float] = {}
        self._orders = OffloadOrders()

    @property
    def num_loading(self) -> int:
        """Restores under way."""
        return len(self._loading)

    @property
    def has_room(self) -> bool:
        """Whether one more may begin."""
        return len(self._loading) < _MAX_RESTORES

    @property
    def has_work(self) -> bool:
        """Whether a step has something to order, or to hear."""
        return bool(self._loading or self._orders.cancelled)

    # ---- asking ------------------------------------------------------------------------------

    def find_tokens(self, request: Request, num_local: int) -> int | None:
        """Return the tokens beyond the local hit to restore; None: ask again."""
        request_id = request.request_id
        self._found.pop(request_id, None)
        self._notes.pop(request_id, None)
        if request.skip_reading_prefix_cache:
            return 0
        stores = self._stores
        if stores.disk is None and stores.is_opening and not stores.is_digesting:
            # In a moment it will be known what is there; not so while all weights are read, when
            # most likely nothing is.
            return self._wait(request_id)
        if self._own_loads.is_loading(_ROWS_OF + request_id):
            return None
        if self._tries.get(request_id, 0) >= _MAX_TRIES:
            return 0
        try:
            ways = self._find_ways(request, num_local)
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
        way = self._choose_way(ways, request, num_local)
        if way is None:
            self._notes[request_id] = AdmissionNote({}, RESTORE_DECLINED, deepest)
            return 0
        if not self.has_room:
            return None
        if way.is_rows_alone:
            self._count_try(request_id)
            return None if self._begin_rows(request, way.found) else 0
        self._found[request_id] = way.found
        self._note_given_up(request, until, way.found.count_sources(num_local))
        return way.found.position - num_local

    def _wait(self, request_id: str) -> int | None:
        """Have a request ask again, but not for ever: a disk may hang."""
        deadline = self._deadlines.setdefault(request_id, time.monotonic() + _PATIENT_S)
        return None if time.monotonic() < deadline else 0

    def _find_ways(self, request: Request, num_local: int) -> Sequence[Way]:
        return find_ways(
            self._stores.readable_tiers,
            self._stores.layout,
            request.block_hashes,
            num_local,
            request.num_tokens - 1,
            self._manager.coordinator.rebuild_tokens,
        )

    def _choose_way(self, ways: Sequence[Way], request: Request, num_local: int) -> Way | None:
        queued = sum(other.num_bytes(is_host=False) for other in self._loading.values())
        return choose_way(
            ways,
            self._stores.rates,
            num_local,
            request.num_tokens,
            queued,
            always=self._settings.always_restore,
        )

    def _find_given_up(self, request: Request, start: int) -> int:
        """Return how far a request would get if the tiers had kept all they ever had."""
        stores, most = self._stores, request.num_tokens - 1
        return find_given_up(stores.tiers, stores.layout, request.block_hashes, start, most)

    def _note_given_up(
        self, request: Request, until: int, sources: dict[str, int] | None = None
    ) -> None:
        """Remember what to say of a request, should it be admitted in this step."""
        if until or sources:
            reason = EVICTED_FROM_DISK if until else None
            self._notes[request.request_id] = AdmissionNote(sources or {}, reason, until)

    def _count_try(self, request_id: str) -> None:
        self._tries[request_id] = self._tries.get(request_id, 0) + 1

    def explain(self, request: Request) -> AdmissionNote | None:
        """Return what is known of a request that was admitted in this step."""
        note = self._notes.pop(request.request_id, None)
        if note is not None and note.miss_reason == RESTORE_DECLINED:
            self._counts.restores[RESTORE_DECLINED.removeprefix("restore_")] += 1
        return note

    # ---- ordering ----------------------------------------------------------------------------

    def begin(self, request: Request, num_external: int) -> None:
        """Order the restore of a request whose blocks are allocated."""
        request_id = request.request_id
        found = self._found.pop(request_id)
        blocks = self._manager.coordinator.find_import(
            request, found.position, num_external, found.next_token
        )
        self._count_try(request_id)
        self.order(request_id, found, blocks)

    def _begin_rows(self, request: Request, found: Restorable) -> bool:
        """Begin to load rows without a state; False: the pool has no room for them.

            tokens    0 ........ G ........ 2G ........ 3G ...... n
            tiers     |  rows    |   rows    |   rows    |             no state up here
            loaded    |  rows    |   rows    |   rows    |             published like computed rows
            computed                    |<-- windows --->|<------>|    as wherever a lookup finds
                                                                       rows and no checkpoint

        The load is nobody's: the request waits, and looks the pool up again when it ended.
        """
        position = found.position
        copy = Request(
            _ROWS_OF + request.request_id,
            list(request.all_token_ids[: position + 1]),
            SamplingParams(max_tokens=1),
            # Events tell of pictures what they tell of the request's own rows.
            mm_features=[f for f in request.mm_features if f.mm_position.offset < position],
            lora_request=request.lora_request,
            cache_salt=request.cache_salt,
            block_hashes=request.block_hashes[: position // self._stores.layout.unit],
            tenant=request.tenant,
        )
        local = self._manager.look_up(copy)
        blocks = self._own_loads.begin(copy, local, position, is_rows_alone=True)
        if blocks is None:
            return False
        self.order(copy.request_id, found, blocks)
        return True

    def order(self, name: str, found: Restorable, blocks: PrefixBlocks) -> None:
        """Order a restore, a request's or one of no request, into blocks that are allocated."""
        self._counts.note_lookup(found)
        if not self._stores.tiers.pin(found.objects):
            # Its worker ends it at once, as a failure.
            found = Restorable(found.position, (), (), None)
        timeout_s = _GRACE_S + _PATIENCE * self._stores.rates.restore_s(
            found.num_bytes(is_host=False), 0, found.num_bytes(is_host=True)
        )
        self._loading[name] = found
        kept = self._keep_copies(name, found)
        objects = tuple(
            ObjectOrder(located.found.extent, first, end, located.is_host, keep)
            for located, (first, end), keep in zip(found.objects, found.spans, kept, strict=True)
        )
        self._orders.restores.append(RestoreOrder(name, objects, blocks, timeout_s))

    def _keep_copies(self, name: str, found: Restorable) -> list[Extent | None]:
        """Reserve room in host memory for what comes from the disk."""
        if self._stores.host is None:
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
                reservation = self._writes.reserve_host(spec)
            kept.append(None if reservation is None else reservation.extent)
            reserved += [] if reservation is None else [reservation]
        if reserved:
            self._keeping[name] = reserved
        return kept

    def take_orders(self) -> OffloadOrders:
        """Drain a step's orders. What was found for requests that did not begin is forgotten."""
        self._found.clear()
        self._notes.clear()
        orders, self._orders = self._orders, OffloadOrders()
        return orders

    # ---- ending ------------------------------------------------------------------------------

    def settle(self, name: str, *, has_failed: bool) -> bool:
        """Take note that no worker writes a restore's rows any more; False: it is none of ours."""
        found = self._loading.pop(name, None)
        if found is None:
            return False
        self._stores.tiers.unpin(found.objects)
        kept = self._keeping.pop(name, [])
        if kept and has_failed:
            assert self._stores.host is not None
            self._stores.host.abandon(kept)
        elif kept:
            self._writes.commit_host(kept)
        if not has_failed:
            self._counts.restores["restored"] += 1
            self._tries.pop(name, None)
        return True

    def end(self, request: Request) -> None:
        """Take note of a request's end, perhaps before its restore's."""
        self._deadlines.pop(request.request_id, None)
        self._tries.pop(request.request_id, None)
        if request.request_id in self._loading:
            self._orders.cancelled.append(request.request_id)

    def take_report(self, report: OffloadReport) -> None:
        """Take what became of restores at the workers."""
        for is_host, sequence in report.corrupt:
            self._forget_corrupt(is_host, sequence)
        for reason in report.failures.values():
            self._counts.restores["corrupt" if reason == CORRUPT else "failed"] += 1

    def _forget_corrupt(self, is_host: bool, sequence: int) -> None:
        self._counts.num_corrupt += 1
        store = self._stores.host if is_host else self._stores.disk
        assert store is not None
        for found in self._loading.values():
            for located in found.objects:
                if (located.is_host, located.found.extent.sequence) == (is_host, sequence):
                    store.report_corrupt(located.found)
        if is_host:
            store.writer.make_room()
        elif self._stores.keeper is not None:
            self._stores.keeper.make_room()
