"""Writes to the disk that were ordered and have not ended at every worker."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.kv_offload.orders import OffloadReport
    from vllm.v1.kv_offload.store.records import Reservation, StoredObject


@dataclass(slots=True)
class PendingWrite:
    """One object on its way to the disk; each worker writes its part of it.

    Attributes:
        reservation: Its place on the disk.
        source: The object in host memory that is read, pinned until then; None: the pool's rows.
        num_ended: Workers whose part has ended, well or not.
        has_failed: Whether a part could not be written.
        is_unsynced: Whether a part was written and may not be on the disk.
    """

    reservation: Reservation
    source: StoredObject | None
    num_ended: int = 0
    has_failed: bool = False
    is_unsynced: bool = False


class PendingWrites:
    """The writes under way, by the sequence of their extents.

    Owns: what the workers have reported of each.

    Args:
        num_workers: Workers that write a part of each object.

    Attributes:
        num_bytes: Bytes of all, of one worker.
    """

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._writes: dict[int, PendingWrite] = {}
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._writes)

    def add(self, reservation: Reservation, source: StoredObject | None) -> None:
        """Take note of a write that is ordered."""
        self._writes[reservation.extent.sequence] = PendingWrite(reservation, source)
        self.num_bytes += reservation.spec.num_bytes

    def take_ended(self, report: OffloadReport) -> list[PendingWrite]:
        """Take what workers report, and drain the writes that have ended at all of them."""
        ended: list[PendingWrite] = []
        for sequence in report.unwritten:
            write = self._writes[sequence]
            write.has_failed = True
            write.is_unsynced = write.is_unsynced or sequence in report.unsynced
        for sequence, count in chain(report.written.items(), report.unwritten.items()):
            write = self._writes[sequence]
            write.num_ended += count
            if write.num_ended >= self._num_workers:
                del self._writes[sequence]
                self.num_bytes -= write.reservation.spec.num_bytes
                ended.append(write)
        return ended
