"""What the connector's two sides tell each other, step by step. Plain values: they are pickled."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.v1.core.pool.exports import PrefixBlocks
from vllm.v1.kv_offload.store.records import Extent


@dataclass(frozen=True, slots=True)
class ObjectOrder:
    """One object to read.

    Attributes:
        extent: Where it is.
        first: The first token whose dense rows are in it.
        end: The boundary at which it stands.
        is_host: Whether ``extent`` is in host memory; else it is on the disk.
        keep: Where in host memory a copy stays of what comes from the disk; None: nowhere.
    """

    extent: Extent
    first: int
    end: int
    is_host: bool = False
    keep: Extent | None = None


@dataclass(frozen=True, slots=True)
class WriteOrder:
    """An object to write, to host memory, to the disk, or from the one to the other.

    Attributes:
        first: The first token whose dense rows are in it.
        end: The boundary at which it stands.
        blocks: Where its rows lie in the pool when the step has run; None: it is in host memory.
        host: Where in host memory it goes, or is; None: not there.
        disk: Where on the disk it goes; None: not there.
    """

    first: int
    end: int
    blocks: PrefixBlocks | None
    host: Extent | None
    disk: Extent | None


@dataclass(frozen=True, slots=True)
class RestoreOrder:
    """A prefix to bring back.

    Attributes:
        request_id: The request that waits for it.
        objects: What it is made of.
        blocks: Where its rows go.
        timeout_s: The longest that it may take.
    """

    request_id: str
    objects: tuple[ObjectOrder, ...]
    blocks: PrefixBlocks
    timeout_s: float


@dataclass
class OffloadOrders(KVConnectorMetadata):
    """One step's orders to a worker.

    Attributes:
        folder: Where the rows files are; None: there is none yet.
        slot_bytes: Bytes of a slot in them.
        host_bytes: Bytes of host memory for objects at a worker.
        writes: Objects to write when the step has run.
        restores: Prefixes to bring back, beside steps.
        cancelled: Requests whose prefix is wanted no more.
    """

    folder: str | None = None
    slot_bytes: int = 0
    host_bytes: int = 0
    writes: list[WriteOrder] = field(default_factory=list)
    restores: list[RestoreOrder] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)


@dataclass
class Moved:
    """What went one way between the pool and one tier.

    Attributes:
        num_bytes: Bytes.
        seconds: Of reads, from the order on; of writes, of a processor.
    """

    num_bytes: int = 0
    seconds: float = 0.0

    def add(self, num_bytes: int, seconds: float) -> None:
        """Count one more move."""
        self.num_bytes += num_bytes
        self.seconds += seconds


@dataclass
class OffloadReport(KVConnectorWorkerMetadata):
    """What a worker tells after a step.

    Attributes:
        written: By sequence, how many workers have synced the object.
        unwritten: By sequence, how many could not.
        unsynced: Of those, objects after whose failed sync nobody knows what the disk holds.
        corrupt: (Whether in host memory, sequence) of objects whose bytes are not those that were
            written.
        failures: By request, why its prefix did not come.
        num_failed_reads: Restores that the disk refused, or did not answer in time.
        read: Whole restores, by tier.
        wrote: Writes, by tier.
    """

    written: dict[int, int] = field(default_factory=dict)
    unwritten: dict[int, int] = field(default_factory=dict)
    unsynced: frozenset[int] = frozenset()
    corrupt: frozenset[tuple[bool, int]] = frozenset()
    failures: dict[str, str] = field(default_factory=dict)
    num_failed_reads: int = 0
    read: dict[str, Moved] = field(default_factory=dict)
    wrote: dict[str, Moved] = field(default_factory=dict)

    @property
    def has_writes(self) -> bool:
        """Whether writes to the disk have ended, well or not."""
        return bool(self.written or self.unwritten)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> OffloadReport:
        """Merge the reports of two workers."""
        assert isinstance(other, OffloadReport)
        return OffloadReport(
            _add(self.written, other.written),
            _add(self.unwritten, other.unwritten),
            self.unsynced | other.unsynced,
            self.corrupt | other.corrupt,
            {**other.failures, **self.failures},
            self.num_failed_reads + other.num_failed_reads,
            _add_moves(self.read, other.read),
            _add_moves(self.wrote, other.wrote),
        )


def _add(left: dict[int, int], right: dict[int, int]) -> dict[int, int]:
    return {key: left.get(key, 0) + right.get(key, 0) for key in {*left, *right}}


def _add_moves(left: dict[str, Moved], right: dict[str, Moved]) -> dict[str, Moved]:
    total = {name: Moved(move.num_bytes, move.seconds) for name, move in left.items()}
    for name, move in right.items():
        total.setdefault(name, Moved()).add(move.num_bytes, move.seconds)
    return total
