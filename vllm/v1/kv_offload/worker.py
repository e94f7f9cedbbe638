"""The worker's side: rows out of the pool when a step has run, and back into it beside steps.

Writing copies an object out of the pool before the next step may change it, so no block is held
for the disk. Restoring reads and verifies an object before one byte of it enters the pool.
"""

from __future__ import annotations

import math
import mmap
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.utils.thread_priority import lower_priority
from vllm.v1.kv_offload.layout import ObjectLayout
from vllm.v1.kv_offload.orders import (
    Moved,
    ObjectOrder,
    OffloadOrders,
    OffloadReport,
    RestoreOrder,
    WriteOrder,
)
from vllm.v1.kv_offload.pool_rows import make_pool_rows
from vllm.v1.kv_offload.store.file_calls import DiskFiles, FileCalls
from vllm.v1.kv_offload.store.folder import rows_path
from vllm.v1.kv_offload.store.host_store import HostFile, host_slot_bytes
from vllm.v1.kv_offload.store.records import Extent
from vllm.v1.kv_offload.store.rows_file import Bounce, CorruptObjectError, RowsFile
from vllm.v1.messages import CORRUPT, RESTORE_FAILED

if TYPE_CHECKING:
    import torch

    from vllm.v1.kv_cache_interface import KVCacheGroupSpec

logger = init_logger(__name__)

_NUM_READERS = 2
# One sync for so many bytes, or for what comes in so many seconds: a sync costs the device and the
# processor as much as 100 KiB.
_BATCH_BYTES = 32 << 20
_BATCH_S = 0.1
_NICE = 10
_COMPLAIN_S = 60.0
_STOP_S = 3.0
HOST, DISK = "host", "disk"
_HOST_HANDLE = 1


@dataclass(slots=True)
class _Restore:
    """A restore under way, of which each reader takes one object after another.

    Its lock orders the last write into the pool and its end.
    """

    order: RestoreOrder
    deadline: float
    started: float = field(default_factory=time.monotonic)
    lock: threading.Condition = field(default_factory=threading.Condition)
    is_over: bool = False
    # Objects that a reader took, that are whole in the pool, and writes into it just now.
    num_taken: int = 0
    num_done: int = 0
    num_writing: int = 0
    failure: str | None = None
    corrupt: tuple[bool, int] | None = None
    seconds: float = 0.0
    # By tier.
    num_bytes: dict[str, int] = field(default_factory=dict)

    @property
    def is_of_disk(self) -> bool:
        """Whether some of it comes from the disk."""
        return not all(found.is_host for found in self.order.objects)

    def end(self, failure: str | None = None, corrupt: tuple[bool, int] | None = None) -> bool:
        """End it once; False: it had ended. Nothing is written into the pool after this."""
        with self.lock:
            if self.is_over:
                return False
            self.is_over, self.failure, self.corrupt = True, failure, corrupt
            self.seconds = time.monotonic() - self.started
            self.lock.wait_for(lambda: not self.num_writing)
            return True

    def take(self) -> ObjectOrder | None:
        """Take the next object to read; None: there is none, or it is over."""
        with self.lock:
            objects = self.order.objects
            if self.is_over or self.num_taken == len(objects):
                return None
            self.num_taken += 1
            return objects[self.num_taken - 1]

    def begin_write(self) -> bool:
        """Begin to write into the pool; False: never after its end, blocks may be another's."""
        with self.lock:
            self.num_writing += not self.is_over
            return not self.is_over

    def end_write(self) -> None:
        """Take note that a write into the pool is over."""
        with self.lock:
            self.num_writing -= 1
            self.lock.notify_all()

    def note_done(self, tier: str, num_bytes: int) -> None:
        """Take note that an object is in the pool; with the last one the restore ends."""
        with self.lock:
            self.num_done += 1
            self.num_bytes[tier] = self.num_bytes.get(tier, 0) + num_bytes
            is_last = self.num_done == len(self.order.objects)
        if is_last:
            self.end()


class OffloadWorker:
    """One worker's reads and writes.

    Owns: its rows file once the tier is open, its share of the host tier, its threads, what they
    have to report.

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
        self._is_on_device = any(view.device.type != "cpu" for view in kv_caches.values())
        self._rows: RowsFile | None = None
        self._host: RowsFile | None = None
        self._has_complained = False
        # Of the writer: when a failure is logged again.
        self._complains_at = -math.inf
        self._handle: int | None = None
        self._restores: dict[str, _Restore] = {}
        self._failed: set[str] = set()
        self._reads: queue.SimpleQueue[_Restore | None] = queue.SimpleQueue()
        self._writes: queue.SimpleQueue[tuple[Extent, bytearray | memoryview] | None] = (
            queue.SimpleQueue()
        )
        self._lock = threading.Lock()
        self._report: OffloadReport | None = None
        self._wake: Callable[[], None] = _let_sleep
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

    def bind_wake(self, wake: Callable[[], None]) -> None:
        """Have ``wake`` called whenever a thread has something to report."""
        self._wake = wake

    # ---- called by the step's thread ---------------------------------------------------------

    def begin(self, orders: OffloadOrders) -> None:
        """Begin what a step orders to be read."""
        if orders.folder is not None and self._rows is None:
            self._open(rows_path(Path(orders.folder), self._rank), orders.slot_bytes)
        if orders.host_bytes and self._host is None:
            self._host = self._make_host(orders.host_bytes)
        for order in orders.restores:
            restore = _Restore(order, time.monotonic() + order.timeout_s)
            self._restores[order.request_id] = restore
            if not order.objects:
                restore.end("its prefix was given up meanwhile")
            elif self._rows is None and not all(found.is_host for found in order.objects):
                restore.end("its prefix cannot be read from disk")
            for _ in range(_NUM_READERS if len(order.objects) > 1 else 1):
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

    def _make_host(self, num_bytes: int) -> RowsFile:
        """Take the memory of the host tier; pinned where a device copies to it."""
        slot_bytes = host_slot_bytes(self._layout.usual_bytes())
        if self._is_on_device:
            # Here, because it needs torch: a front end imports this package to check its settings.
            import torch  # noqa: PLC0415

            pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
            buffer = memoryview(pinned.numpy())  # type: ignore[arg-type]
        else:
            # Pages are taken as they are written.
            buffer = memoryview(mmap.mmap(-1, num_bytes))
        return RowsFile(HostFile(buffer, num_bytes), _HOST_HANDLE, slot_bytes)

    def take_rows(self, orders: OffloadOrders) -> None:
        """Copy what a step orders to be written, now that it has run."""
        refused: dict[int, int] = {}
        wrote = Moved()
        for order in orders.writes:
            before = time.thread_time()
            data = self._gather(order)
            if data is not None and order.host is not None and order.blocks is not None:
                assert self._host is not None
                self._host.write(order.host, [data])
                wrote.add(order.host.num_bytes, time.thread_time() - before)
            if order.disk is not None:
                if data is None or self._rows is None:
                    refused[order.disk.sequence] = 1
                else:
                    self._writes.put((order.disk, data))
        if refused or wrote.num_bytes:
            report = OffloadReport(unwritten=refused)
            if wrote.num_bytes:
                report.wrote[HOST] = wrote
            self._tell(report)

    def _tell(self, report: OffloadReport) -> None:
        """Keep what the scheduler's side must hear after a step."""
        with self._lock:
            self._report = report if self._report is None else self._report.aggregate(report)

    def _gather(self, order: WriteOrder) -> bytearray | memoryview | None:
        """Return an object's bytes; None: host memory does not hold what it should."""
        extent = order.host or order.disk
        assert extent is not None
        if order.blocks is None:
            assert self._host is not None
            assert order.host is not None
            try:
                return self._host.read(order.host)
            except CorruptObjectError:
                return None
        data = bytearray(extent.num_bytes)
        regions = self._layout.list_object(extent.key.kind, order.first, order.end)
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
            self._tell(_describe_end(request_id, restore))
            if restore.failure is None:
                received.add(request_id)
            else:
                logger.warning("Request %s is computed: %s.", request_id, restore.failure)
                self._failed.add(request_id)
        return received

    def take_failed(self) -> set[str]:
        """Drain the requests whose prefixes did not come."""
        failed, self._failed = self._failed, set()
        return failed

    def take_report(self) -> OffloadReport | None:
        """Drain what the scheduler's side must know; None: nothing."""
        if self._report is None:
            return None
        with self._lock:
            report, self._report = self._report, None
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
        # Steps go before this thread's work.
        lower_priority(_NICE)
        while (batch := self._next_batch()) is not None:
            self._write_batch(batch)
            self._wake()

    def _next_batch(self) -> list[tuple[Extent, bytearray | memoryview]] | None:
        """Return what comes within a moment of the first object; None: the end."""
        item = self._writes.get()
        batch: list[tuple[Extent, bytearray | memoryview]] = []
        num_bytes = 0
        deadline = time.monotonic() + _BATCH_S
        while item is not None:
            batch.append(item)
            num_bytes += len(item[1])
            left_s = deadline - time.monotonic()
            if num_bytes >= _BATCH_BYTES or left_s <= 0:
                return batch
            try:
                item = self._writes.get(timeout=left_s)
            except queue.Empty:
                return batch
        if batch:
            # The end is met again behind it.
            self._writes.put(None)
        return batch or None

    def _write_batch(self, batch: list[tuple[Extent, bytearray | memoryview]]) -> None:
        assert self._rows is not None
        before = time.thread_time()
        written: list[int] = []
        unwritten: list[int] = []
        num_bytes = sum(extent.num_bytes for extent, _ in batch)
        unsynced: frozenset[int] = frozenset()
        try:
            for extent, data in batch:
                try:
                    self._rows.write(extent, [data])
                except OSError as error:
                    self._complain("written", error)
                    unwritten.append(extent.sequence)
                else:
                    written.append(extent.sequence)
            self._rows.sync()
        except OSError as error:
            self._complain("synced", error)
            unsynced = frozenset(written)
            unwritten, written = [*unwritten, *written], []
        except Exception:  # a thread's edge: the batch would never be reported
            logger.exception("The writer of the prefix cache failed unexpectedly.")
            unsynced = frozenset(extent.sequence for extent, _ in batch)
            unwritten, written = list(unsynced), []
        self._tell(
            OffloadReport(
                dict.fromkeys(written, 1),
                dict.fromkeys(unwritten, 1),
                unsynced,
                wrote={DISK: Moved(num_bytes, time.thread_time() - before)},
            )
        )

    def _complain(self, what: str, error: OSError) -> None:
        """Log a failure, but not one for each object that a full disk refuses."""
        now = time.monotonic()
        if now >= self._complains_at:
            self._complains_at = now + _COMPLAIN_S
            logger.warning("The prefix cache on disk cannot be %s: %s.", what, error)

    # ---- the readers -------------------------------------------------------------------------

    def _read_all(self) -> None:
        bounce = Bounce()
        while (restore := self._reads.get()) is not None:
            while (target := restore.take()) is not None:
                try:
                    self._bring_back(restore, target, bounce)
                except CorruptObjectError as error:
                    corrupt = target.is_host, target.extent.sequence
                    restore.end(str(error).removesuffix("."), corrupt)
                except OSError as error:
                    restore.end(f"its prefix cannot be read from disk ({error})")
                except Exception as error:  # a thread's edge: its request would wait in vain
                    if restore.end(f"its prefix was not restored ({error!r})"):
                        logger.exception("A reader of the prefix cache failed unexpectedly.")
            if restore.is_over:
                self._wake()

    def _bring_back(self, restore: _Restore, target: ObjectOrder, bounce: Bounce) -> None:
        rows = self._host if target.is_host else self._rows
        assert rows is not None
        data = rows.read(target.extent, bounce)
        if target.keep is not None and self._host is not None:
            self._host.write(target.keep, [data])
        regions = self._layout.list_object(target.extent.key.kind, target.first, target.end)
        if not restore.begin_write():
            return
        try:
            self._pool.scatter(regions, restore.order.blocks, data)
        finally:
            restore.end_write()
        restore.note_done(HOST if target.is_host else DISK, len(data))


def _describe_end(request_id: str, restore: _Restore) -> OffloadReport:
    """Return what is told of a restore that is over."""
    if restore.failure is None:
        # What came from two tiers counts for the slower: the time is nearly all its own.
        tier = DISK if DISK in restore.num_bytes else HOST
        return OffloadReport(read={tier: Moved(restore.num_bytes.get(tier, 0), restore.seconds)})
    if restore.corrupt is not None:
        corrupt = frozenset((restore.corrupt,))
        return OffloadReport(corrupt=corrupt, failures={request_id: CORRUPT})
    failures = {request_id: RESTORE_FAILED}
    return OffloadReport(failures=failures, num_failed_reads=int(restore.is_of_disk))


def _let_sleep() -> None:
    """Nobody waits: whoever steps asks for reports."""
