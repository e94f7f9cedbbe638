"""The worker's side: rows out of the pool when a step has run, and back into it beside steps.

Writing copies an object out of the pool before the next step may change it, so no block is held
for the disk. Restoring reads and verifies an object before one byte of it enters the pool.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.offloading.layout import ObjectLayout
from vllm.distributed.kv_transfer.offloading.orders import (
    ObjectOrder,
    OffloadOrders,
    OffloadReport,
    RestoreOrder,
    WriteOrder,
)
from vllm.distributed.kv_transfer.offloading.pool_rows import make_pool_rows
from vllm.logger import init_logger
from vllm.v1.kv_offload.file_calls import DiskFiles, FileCalls
from vllm.v1.kv_offload.folder import rows_path
from vllm.v1.kv_offload.records import Extent
from vllm.v1.kv_offload.rows_file import CorruptObjectError, RowsFile

if TYPE_CHECKING:
    import torch

    from vllm.v1.kv_cache_interface import KVCacheGroupSpec

logger = init_logger(__name__)

_NUM_READERS = 2
# One sync for so many bytes, or for what has come.
_BATCH_BYTES = 32 << 20
_NICE = 10
_STOP_S = 3.0


@dataclass(slots=True)
class _Restore:
    """A restore under way. Its lock orders the last write into the pool and its end."""

    order: RestoreOrder
    deadline: float
    started: float = field(default_factory=time.monotonic)
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_over: bool = False
    failure: str | None = None
    corrupt: int | None = None
    seconds: float = 0.0
    num_bytes: int = 0

    def end(self, failure: str | None = None) -> bool:
        """End it once; False: it had ended."""
        with self.lock:
            if self.is_over:
                return False
            self.is_over, self.failure = True, failure
            self.seconds = time.monotonic() - self.started
            return True


class OffloadWorker:
    """One worker's reads and writes.

    Owns: its rows file once the tier is open, its threads, what they have to report.

    Args:
        layout: What objects are made of.
        kv_caches: Every layer's view of the pool.
        groups: The KV cache groups with their layers.
        rank: The worker's index among those that share its model.
        files: File calls.
    """

    def __init__(
        self,
        layout: ObjectLayout,
        kv_caches: Mapping[str, torch.Tensor],
        groups: list[KVCacheGroupSpec],
        rank: int,
        files: FileCalls | None = None,
    ) -> None:
        self._layout = layout
        self._rank = rank
        self._files = files or DiskFiles()
        self._pool = make_pool_rows(layout, kv_caches, groups)
        self._rows: RowsFile | None = None
        self._has_complained = False
        self._handle: int | None = None
        self._restores: dict[str, _Restore] = {}
        self._failed: set[str] = set()
        self._reads: queue.SimpleQueue[_Restore | None] = queue.SimpleQueue()
        self._writes: queue.SimpleQueue[tuple[Extent, bytearray] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._report = OffloadReport()
        self._threads = [
            threading.Thread(target=self._write_all, name="prefix-cache-writer", daemon=True),
            *(
                threading.Thread(
                    target=self._read_all, name=f"prefix-cache-reader-{i}", daemon=True
                )
                for i in range(_NUM_READERS)
            ),
        ]
        for thread in self._threads:
            thread.start()

    # ---- called by the step's thread ---------------------------------------------------------

    def begin(self, orders: OffloadOrders) -> None:
        """Begin what a step orders to be read."""
        if orders.folder is not None and self._rows is None:
            self._open(rows_path(Path(orders.folder), self._rank), orders.slot_bytes)
        for order in orders.restores:
            restore = _Restore(order, time.monotonic() + order.timeout_s)
            self._restores[order.request_id] = restore
            if not order.objects:
                restore.end("its prefix was given up meanwhile")
            elif self._rows is None:
                restore.end("its prefix cannot be read from disk")
            self._reads.put(restore)
        for request_id in orders.cancelled:
            if request_id in self._restores:
                self._restores[request_id].end("the request ended")

    def _open(self, path: Path, slot_bytes: int) -> None:
        try:
            self._handle = self._files.open(path, writable=os.access(path, os.W_OK))
        except OSError as error:
            # Tried again at the next step: it may be a matter of too many open files.
            if not self._has_complained:
                logger.warning("The prefix cache on disk cannot be opened: %s.", error)
            self._has_complained = True
        else:
            self._rows = RowsFile(self._files, self._handle, slot_bytes)

    def take_rows(self, orders: OffloadOrders) -> None:
        """Copy what a step orders to be written, now that it has run."""
        if self._rows is None and orders.writes:
            refused = {order.target.extent.sequence: 1 for order in orders.writes}
            with self._lock:
                self._report = self._report.aggregate(OffloadReport(unwritten=refused))
            return
        for order in orders.writes:
            self._writes.put((order.target.extent, self._gather(order)))

    def _gather(self, order: WriteOrder) -> bytearray:
        target = order.target
        data = bytearray(target.extent.num_bytes)
        regions = self._layout.list_object(target.extent.key.kind, target.first, target.end)
        self._pool.gather(regions, order.blocks, memoryview(data))
        return data

    def collect(self) -> set[str]:
        """Return the requests whose prefixes came whole; the others are kept for a call."""
        now = time.monotonic()
        received: set[str] = set()
        for request_id, restore in list(self._restores.items()):
            if now >= restore.deadline:
                restore.end("the disk did not answer in time")
            if not restore.is_over:
                continue
            del self._restores[request_id]
            if restore.failure is None:
                received.add(request_id)
                self._report.restored_bytes += restore.num_bytes
                self._report.restore_s += restore.seconds
                continue
            logger.warning("Request %s is computed: %s.", request_id, restore.failure)
            self._failed.add(request_id)
            if restore.corrupt is not None:
                self._report.corrupt |= {restore.corrupt}
            else:
                self._report.num_failed_reads += 1
        return received

    def take_failed(self) -> set[str]:
        """Drain the requests whose prefixes did not come."""
        failed, self._failed = self._failed, set()
        return failed

    def take_report(self) -> OffloadReport:
        """Drain what the scheduler's side must know."""
        with self._lock:
            report, self._report = self._report, OffloadReport()
        return report

    def shutdown(self) -> None:
        """Stop all threads; what is not written is lost, not torn. Idempotent."""
        for restore in self._restores.values():
            restore.end("the engine stops")
        self._writes.put(None)
        for _ in range(_NUM_READERS):
            self._reads.put(None)
        for thread in self._threads:
            thread.join(_STOP_S)
        # A thread that hangs in a file call keeps the handle.
        if self._handle is not None and not any(thread.is_alive() for thread in self._threads):
            self._files.close(self._handle)
            self._handle = None

    # ---- the writer --------------------------------------------------------------------------

    def _write_all(self) -> None:
        _lower_priority()
        is_over = False
        while not is_over:
            batch: list[tuple[Extent, bytearray]] = []
            num_bytes = 0
            item = self._writes.get()
            while item is not None:
                batch.append(item)
                num_bytes += len(item[1])
                if num_bytes >= _BATCH_BYTES or self._writes.empty():
                    break
                item = self._writes.get()
            is_over = item is None
            if batch:
                self._write_batch(batch)

    def _write_batch(self, batch: list[tuple[Extent, bytearray]]) -> None:
        assert self._rows is not None
        before = time.thread_time()
        written: list[int] = []
        unwritten: list[int] = []
        for extent, data in batch:
            try:
                self._rows.write(extent, [data])
            except OSError as error:
                logger.warning("The prefix cache on disk cannot be written: %s.", error)
                unwritten.append(extent.sequence)
            else:
                written.append(extent.sequence)
        unsynced: frozenset[int] = frozenset()
        try:
            self._rows.sync()
        except OSError as error:
            logger.warning("The prefix cache on disk cannot be synced: %s.", error)
            unsynced = frozenset(written)
            unwritten, written = [*unwritten, *written], []
        with self._lock:
            self._report = self._report.aggregate(
                OffloadReport(
                    dict.fromkeys(written, 1),
                    dict.fromkeys(unwritten, 1),
                    unsynced,
                    write_s=time.thread_time() - before,
                )
            )

    # ---- the readers -------------------------------------------------------------------------

    def _read_all(self) -> None:
        while (restore := self._reads.get()) is not None:
            try:
                for target in restore.order.objects:
                    if restore.is_over:
                        break
                    self._bring_back(restore, target)
                restore.end()
            except CorruptObjectError as error:
                restore.corrupt = target.extent.sequence
                restore.end(str(error).removesuffix("."))
            except OSError as error:
                restore.end(f"its prefix cannot be read from disk ({error})")

    def _bring_back(self, restore: _Restore, target: ObjectOrder) -> None:
        assert self._rows is not None
        data = self._rows.read(target.extent)
        regions = self._layout.list_object(target.extent.key.kind, target.first, target.end)
        with restore.lock:
            # Never after its end: the blocks may be another request's by now.
            if not restore.is_over:
                self._pool.scatter(regions, restore.order.blocks, data)
                restore.num_bytes += len(data)


def _lower_priority() -> None:
    """Let steps go before this thread's work."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
    except (OSError, AttributeError):
        logger.debug("The writer's priority stays as it is.")
