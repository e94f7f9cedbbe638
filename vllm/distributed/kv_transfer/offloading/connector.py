"""The connector that keeps prefixes on a disk: what the pool gives up, or a restart loses."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.distributed.kv_transfer.kv_connector.v1.beside_steps import BesideStepsConnector
from vllm.distributed.kv_transfer.offloading.identity import find_identity
from vllm.distributed.kv_transfer.offloading.keeper import StoreKeeper
from vllm.distributed.kv_transfer.offloading.layout import ObjectLayout, make_layout
from vllm.distributed.kv_transfer.offloading.orders import (
    ObjectOrder,
    OffloadOrders,
    OffloadReport,
    RestoreOrder,
    WriteOrder,
)
from vllm.distributed.kv_transfer.offloading.restoring import Restorable, find_restorable
from vllm.distributed.kv_transfer.offloading.settings import OffloadSettings, read_settings
from vllm.distributed.kv_transfer.offloading.tracking import Candidate, Tracker
from vllm.distributed.kv_transfer.offloading.worker import OffloadWorker
from vllm.exceptions import VllmError
from vllm.logger import init_logger
from vllm.v1.kv_offload.cells import ObjectKind
from vllm.v1.kv_offload.folder import CacheFolder, FolderBusyError, read_marker
from vllm.v1.kv_offload.rates import Rates
from vllm.v1.kv_offload.records import ObjectSpec, Reservation
from vllm.v1.kv_offload.store import ObjectStore

if TYPE_CHECKING:
    import torch

    from vllm.config import VllmConfig
    from vllm.v1.core.coordinator_interface import Coordinator
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.prefix.exports import PrefixBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger(__name__)

# Copied out of the pool and not on the disk yet.
_MAX_QUEUED_BYTES = 64 << 20
_MAX_RESTORES = 4
# A restore may take so many times what it should.
_PATIENCE = 4.0
_GRACE_S = 1.0
# Prompts that the disk failed so often are computed.
_MAX_TRIES = 2
_FAILURES_TO_STOP = 8
_FAILURE_WINDOW_S = 60.0
_DRAIN_S = 2.0
# Steps that an object waits at the head of the queue for room.
_MAX_REFUSALS = 200


class OffloadingConnector(BesideStepsConnector):
    """Keeps cached prefixes on a disk and brings them back.

    Owns: on the scheduler's side the tier; on the worker's its reads and writes.

    Raises:
        ConfigError: The settings are wrong.
    """

    drain_timeout_s = _DRAIN_S

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig | None = None,
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = read_settings(vllm_config)
        self._tier: _Tier | None = None
        self._worker: OffloadWorker | None = None

    @classmethod
    def check_before_load(cls, vllm_config: VllmConfig) -> None:
        """Check the settings, and chain prefix hashes to the folder's root.

        A root of its own would make each process name prefixes anew, and nothing would ever be
        found after a restart.

        Raises:
            ConfigError: A setting is wrong.
        """
        settings = read_settings(vllm_config)
        cache = vllm_config.cache_config
        if cache.prefix_hash_seed is None and "PYTHONHASHSEED" not in os.environ:
            cache.prefix_hash_seed = _find_hash_root(settings)

    # ---- the scheduler's side ----------------------------------------------------------------

    def bind_kv_cache_manager(self, manager: KVCacheManager) -> None:
        """Take the manager, and begin to open the folder."""
        config = manager.kv_cache_config
        layout = make_layout(config, self._unit_of(config))
        root = self._settings.root
        keeper = StoreKeeper(
            root,
            self._settings.find_max_bytes,
            self._settings.read_only,
            lambda note, stop: find_identity(self._vllm_config, config, layout, root, note, stop),
        )
        self._tier = _Tier(self._vllm_config, self._settings, manager, layout, keeper)

    @property
    def _keeps(self) -> _Tier:
        assert self._tier is not None, "the scheduler's side was not given the manager"
        return self._tier

    def has_pending_work(self) -> bool:
        """Whether something is on its way to the disk or back."""
        return self._keeps.has_pending_work()

    def on_new_request(self, request: Request) -> None:
        """Take note of a request."""
        self._keeps.tracker.add(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return the tokens to restore behind the local hit; that runs beside the steps."""
        num_tokens = self._keeps.find_tokens(request, num_computed_tokens)
        return num_tokens, bool(num_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Order the restore of an admitted request."""
        if num_external_tokens:
            self._keeps.begin(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Return the step's orders, and begin the next one's."""
        return self._keeps.make_orders(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take what the workers report."""
        tier = self._keeps
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, OffloadReport):
            tier.take_report(report)
        for request_id in (*(connector_output.finished_recving or ()),):
            tier.settle(request_id, has_failed=False)
        for request_id in connector_output.failed_recving:
            tier.settle(request_id, has_failed=True)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Take note of a request's end; nothing keeps its blocks."""
        self._keeps.end(request)
        return False, None

    def reset_cache(self) -> bool | None:
        """Forget what is on the disk."""
        return self._keeps.reset()

    # ---- the worker's side -------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the KV tensors."""
        config = self._kv_cache_config
        assert config is not None
        layout = make_layout(config, self._unit_of(config))
        self._worker = OffloadWorker(layout, kv_caches, config.kv_cache_groups, self._rank)

    @property
    def _loader(self) -> OffloadWorker:
        assert self._worker is not None, "the worker's side was not given the KV caches"
        return self._worker

    def _get_orders(self) -> OffloadOrders:
        orders = self._get_connector_metadata()
        assert isinstance(orders, OffloadOrders)
        return orders

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin the step's restores; no step reads rows that are on their way."""
        self._loader.begin(self._get_orders())

    def wait_for_save(self) -> None:
        """Copy what the step orders to be written: the next step may change it."""
        self._loader.take_rows(self._get_orders())

    def build_connector_worker_meta(self) -> OffloadReport:
        """Return what was written, and what was wrong."""
        return self._loader.take_report()

    def shutdown(self) -> None:
        """Stop all threads and let go of the folder."""
        if self._worker is not None:
            self._worker.shutdown()
        if self._tier is not None:
            self._tier.keeper.close()


def _find_hash_root(settings: OffloadSettings) -> bytes | None:
    """Return the folder's hash root, made if it is new; None if the folder is of no use."""
    try:
        known = read_marker(settings.root)
        if known is not None:
            return known
        folder = CacheFolder(settings.root, settings.find_max_bytes(), read_only=settings.read_only)
    except FolderBusyError:
        return read_marker(settings.root)
    except (VllmError, OSError):
        # The keeper tells it, once.
        return None
    folder.close()
    return folder.hash_root


class _Tier:
    """The scheduler's side of the tier.

    Owns: what waits to be written, what is on its way, the requests that restore.

    Args:
        config: All configuration.
        settings: The connector's.
        manager: The pool's.
        layout: What objects are made of.
        keeper: The store's thread.
    """

    def __init__(
        self,
        config: VllmConfig,
        settings: OffloadSettings,
        manager: KVCacheManager,
        layout: ObjectLayout,
        keeper: StoreKeeper,
    ) -> None:
        self.keeper = keeper
        self._settings = settings
        self._manager = manager
        self._coordinator: Coordinator = manager.coordinator
        self._layout = layout
        self._num_workers = config.parallel_config.tensor_parallel_size
        drafts = config.speculative_config is not None and config.speculative_config.use_eagle()
        self.tracker = Tracker(self._coordinator, layout, needs_next_token=drafts)
        self.rates = Rates()
        self._writing: dict[int, Reservation] = {}
        self._ended: dict[int, int] = {}
        self._broken: dict[int, bool] = {}
        self._queued_bytes = 0
        self._found: dict[str, Restorable] = {}
        self._loading: dict[str, Restorable] = {}
        self._tries: dict[str, int] = {}
        self._orders = OffloadOrders()
        self._read_failures: list[float] = []
        self._num_refused = 0
        self._step: tuple[float, int, int] | None = None

    @property
    def store(self) -> ObjectStore | None:
        """The store; None while it opens, and if it cannot be."""
        return self.keeper.store

    def has_pending_work(self) -> bool:
        """Whether a step has something to do, or to hear, although no request runs."""
        store = self.store
        if self._loading or self._orders.cancelled:
            return True
        if store is None or not store.is_writable:
            return False
        is_busy = self._writing or self.keeper.num_uncommitted
        return bool(is_busy or self.tracker.has_ended or self.tracker.waiting)

    # ---- restoring ---------------------------------------------------------------------------

    def find_tokens(self, request: Request, num_local: int) -> int | None:
        """Return the tokens beyond the local hit to restore; None: ask again."""
        self._found.pop(request.request_id, None)
        if request.skip_reading_prefix_cache or self._is_unreadable():
            return 0
        store = self.store
        if store is None:
            # In a moment it will be known what is there; not so while all weights are read, when
            # most likely nothing is.
            return None if self.keeper.is_opening and not self.keeper.is_digesting else 0
        if self._tries.get(request.request_id, 0) >= _MAX_TRIES:
            return 0
        found = find_restorable(
            store, self._layout, request.block_hashes, num_local, request.num_tokens - 1
        )
        if found is None:
            return 0
        if any(found.objects[-1] in other.objects for other in self._loading.values()):
            # It will be in the pool in a moment.
            return None
        queued = sum(other.num_bytes for other in self._loading.values())
        if not (
            self._settings.always_restore
            or self.rates.pays(found.num_bytes, num_local, found.position, queued)
        ):
            return 0
        if len(self._loading) >= _MAX_RESTORES:
            return None
        self._found[request.request_id] = found
        return found.position - num_local

    def begin(self, request: Request, num_external: int) -> None:
        """Order the restore of a request whose blocks are allocated."""
        found, store = self._found.pop(request.request_id), self.store
        assert store is not None
        blocks = self._manager.find_import(request, found.position, num_external, found.next_token)
        is_there = store.pin(found.objects)
        if not is_there:
            found = Restorable(found.position, (), (), 0, None)
        timeout_s = _PATIENCE * self.rates.restore_s(found.num_bytes) + _GRACE_S
        self._loading[request.request_id] = found
        self._tries[request.request_id] = self._tries.get(request.request_id, 0) + 1
        self._orders.restores.append(
            RestoreOrder(request.request_id, found.orders, blocks, timeout_s)
        )

    def settle(self, request_id: str, *, has_failed: bool) -> None:
        """Take note that no worker writes a request's rows any more."""
        found = self._loading.pop(request_id, None)
        if found is None:
            return
        assert self.store is not None
        self.store.unpin(found.objects)
        if not has_failed:
            self._tries.pop(request_id, None)

    def end(self, request: Request) -> None:
        """Take note of a request's end, perhaps before its restore's."""
        self.tracker.end(request)
        self._tries.pop(request.request_id, None)
        if request.request_id in self._loading:
            self._orders.cancelled.append(request.request_id)

    def _is_unreadable(self) -> bool:
        """Whether the disk failed too often of late."""
        horizon = time.monotonic() - _FAILURE_WINDOW_S
        self._read_failures = [at for at in self._read_failures if at > horizon]
        return len(self._read_failures) >= _FAILURES_TO_STOP

    # ---- writing -----------------------------------------------------------------------------

    def make_orders(self, output: SchedulerOutput) -> OffloadOrders:
        """Return a step's orders: restores that began, and what it leaves to be written."""
        self._found.clear()
        self._note_step(output)
        orders, self._orders = self._orders, OffloadOrders()
        self.tracker.look(list(output.num_scheduled_tokens))
        superseded, store = self.tracker.take_superseded(), self.store
        if store is None:
            return orders
        store.supersede(superseded)
        assert self.keeper.path is not None
        orders.folder, orders.slot_bytes = str(self.keeper.path), store.shape.slot_bytes
        if not store.is_writable:
            self.tracker.waiting.clear()
            return orders
        waiting = self.tracker.waiting
        while waiting and self._queued_bytes < _MAX_QUEUED_BYTES:
            if not self._order_write(store, waiting[0], orders):
                break
            waiting.popleft()
        return orders

    def _order_write(self, store: ObjectStore, candidate: Candidate, orders: OffloadOrders) -> bool:
        """Order an object to be written; False: there is no room for it yet."""
        if store.contains([candidate.key])[0]:
            return True
        blocks = self._locate(candidate)
        if blocks is None:
            self.tracker.num_dropped += 1
            return True
        kind = candidate.key.kind
        num_bytes = self._layout.object_bytes(kind, candidate.first, candidate.end)
        spec = ObjectSpec(candidate.key, candidate.end, num_bytes, blocks.next_token)
        reservation = store.reserve([spec])[0]
        if reservation is None:
            self.keeper.make_room()
            self._num_refused += 1
            if self._num_refused < _MAX_REFUSALS:
                return False
            # It is larger than the store takes, or the disk is full of what cannot be given up.
            self.tracker.num_dropped += 1
            self._num_refused = 0
            return True
        self._num_refused = 0
        self._writing[reservation.extent.sequence] = reservation
        self._queued_bytes += num_bytes
        target = ObjectOrder(reservation.extent, candidate.first, candidate.end)
        orders.writes.append(WriteOrder(target, blocks))
        return True

    def _locate(self, candidate: Candidate) -> PrefixBlocks | None:
        hashes, first, end = candidate.block_hashes, candidate.first, candidate.end
        if candidate.key.kind is ObjectKind.ROWS:
            return self._coordinator.locate_rows(hashes, first, end)
        return self._coordinator.locate_checkpoint(hashes, end, first)

    def take_report(self, report: OffloadReport) -> None:
        """Take what the workers did."""
        self._note_step_end()
        for counts in (report.written, report.unwritten):
            for sequence, count in counts.items():
                self._ended[sequence] = self._ended.get(sequence, 0) + count
        for sequence in report.unwritten:
            is_unsynced = sequence in report.unsynced
            self._broken[sequence] = self._broken.get(sequence, False) or is_unsynced
        done = [s for s, count in self._ended.items() if count >= self._num_workers]
        self._settle_writes(done)
        if report.restored_bytes:
            self.rates.note_restore(report.restored_bytes, report.restore_s)
        self._read_failures += [time.monotonic()] * report.num_failed_reads
        for sequence in report.corrupt:
            self._forget_corrupt(sequence)

    def _settle_writes(self, done: Sequence[int]) -> None:
        written: list[Reservation] = []
        lost: list[Reservation] = []
        unsynced: list[Reservation] = []
        for sequence in done:
            del self._ended[sequence]
            reservation = self._writing.pop(sequence)
            self._queued_bytes -= reservation.spec.num_bytes
            broken = self._broken.pop(sequence, None)
            (written if broken is None else unsynced if broken else lost).append(reservation)
        if written:
            self.keeper.commit(written)
        if self.store is not None:
            if lost:
                self.store.abandon(lost)
            if unsynced:
                self.store.abandon(unsynced, retire=True)

    def _forget_corrupt(self, sequence: int) -> None:
        assert self.store is not None
        for found in self._loading.values():
            for entry in found.objects:
                if entry.extent.sequence == sequence:
                    self.store.report_corrupt(entry)
        self.keeper.make_room()

    def reset(self) -> bool:
        """Forget everything on the disk, and what waits to get there."""
        self.tracker.waiting.clear()
        return self.store is None or self.keeper.clear()

    # ---- measuring prefill -------------------------------------------------------------------

    def _note_step(self, output: SchedulerOutput) -> None:
        """Remember when a step began that computes one prompt, and where."""
        self._step = None
        counts = output.num_scheduled_tokens
        if not counts:
            return
        longest = max(counts, key=lambda name: counts[name])
        known = {data.req_id: data.num_computed_tokens for data in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        known.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        self._step = (time.monotonic(), known.get(longest, 0), sum(counts.values()))

    def _note_step_end(self) -> None:
        if self._step is not None:
            started, context, num_tokens = self._step
            self.rates.note_prefill(context, num_tokens, time.monotonic() - started)
            self._step = None
