"""The stores of the tiers behind the pool: which of them answer, and how fast."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm.v1.kv_offload.lookups.rates import Rates
from vllm.v1.kv_offload.lookups.ways import Tiers
from vllm.v1.kv_offload.store.latched_disk import LatchedDisk

if TYPE_CHECKING:
    from vllm.v1.kv_offload.layout import ObjectLayout
    from vllm.v1.kv_offload.orders import OffloadReport
    from vllm.v1.kv_offload.store.keeper import Disk, Keeper
    from vllm.v1.kv_offload.store.object_store import ObjectStore

_FAILURES_TO_STOP = 8
_FAILURE_WINDOW_S = 60.0
RATES_FILE = "rates"


class TierStores:
    """Host memory and a disk behind the pool, or one of them.

    Owns: what was measured of them, and which reads failed of late.

    Args:
        layout: What objects are made of.
        num_workers: Workers, each with a part of every object.
        host: The index of the host tier; None: there is none.
        keeper: The disk's thread; None: there is no disk.
    """

    def __init__(
        self,
        layout: ObjectLayout,
        num_workers: int,
        host: ObjectStore | None,
        keeper: Keeper | None,
    ) -> None:
        self.layout = layout
        self.num_workers = num_workers
        self.host = host
        self.keeper = keeper
        # What is seen of the disk: in recorded runs, not all that its thread does at once.
        self.seen: Disk | None = keeper
        self._rates: Rates | None = None
        self._read_failures: list[float] = []
        self._clock: Callable[[], float] = time.monotonic

    def use_clock(self, clock: Callable[[], float]) -> None:
        """Let time pass by a clock of the caller's, in seconds."""
        self._clock = clock

    def latch(self) -> LatchedDisk | None:
        """Let the disk change only when somebody looks; returns who shows it, if there is one."""
        if self.keeper is None:
            return None
        self.seen = latched = LatchedDisk(self.keeper)
        return latched

    @property
    def disk(self) -> ObjectStore | None:
        """The disk's store; None while it opens, and if it cannot be."""
        return None if self.seen is None else self.seen.store

    @property
    def is_opening(self) -> bool:
        """Whether the disk may be open in a moment."""
        return self.seen is not None and self.seen.is_opening

    @property
    def is_digesting(self) -> bool:
        """Whether that takes long: all weights are being read."""
        return self.seen is not None and self.seen.is_digesting

    @property
    def tiers(self) -> Tiers:
        """All that are open."""
        return Tiers(self.host, self.disk)

    @property
    def readable_tiers(self) -> Tiers:
        """Those to restore from."""
        return Tiers(self.host, None if self.is_unreadable else self.disk)

    @property
    def is_unreadable(self) -> bool:
        """Whether the disk failed too often of late."""
        horizon = self._clock() - _FAILURE_WINDOW_S
        self._read_failures = [at for at in self._read_failures if at > horizon]
        return len(self._read_failures) >= _FAILURES_TO_STOP

    @property
    def rates(self) -> Rates:
        """What was measured, by an earlier run too once the folder is open."""
        if self._rates is None:
            if self.is_opening:
                return Rates()
            text = None if self.keeper is None else self.keeper.recall(RATES_FILE)
            known = None if text is None else Rates.from_json(text.decode(errors="replace"))
            self._rates = known or Rates()
        return self._rates

    def remember_rates(self) -> None:
        """Write down what was measured."""
        if self.keeper is not None and self._rates is not None:
            self.keeper.remember(RATES_FILE, self._rates.to_json().encode())

    def note_reads(self, report: OffloadReport) -> None:
        """Take what the workers read, or could not."""
        for name, moved in report.read.items():
            self.rates.note_restore(moved.num_bytes, moved.seconds, is_host=name == "host")
        self._read_failures += [self._clock()] * report.num_failed_reads
