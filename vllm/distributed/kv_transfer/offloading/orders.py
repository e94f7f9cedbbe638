"""What the connector's two sides tell each other, step by step. Plain values: they are pickled."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.v1.core.prefix.exports import PrefixBlocks
from vllm.v1.kv_offload.records import Extent


@dataclass(frozen=True, slots=True)
class ObjectOrder:
    """One object to write or to read.

    Attributes:
        extent: Where it is on the disk.
        first: The first token whose dense rows are in it.
        end: The boundary at which it stands.
    """

    extent: Extent
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class WriteOrder:
    """An object to write; its rows are in the pool when the step has run.

    Attributes:
        target: The object.
        blocks: Where its rows lie.
    """

    target: ObjectOrder
    blocks: PrefixBlocks


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
        folder: Where the rows files are; None: there is no tier yet.
        slot_bytes: Bytes of a slot.
        writes: Objects to write when the step has run.
        restores: Prefixes to bring back, beside steps.
        cancelled: Requests whose prefix is wanted no more.
    """

    folder: str | None = None
    slot_bytes: int = 0
    writes: list[WriteOrder] = field(default_factory=list)
    restores: list[RestoreOrder] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)


@dataclass
class OffloadReport(KVConnectorWorkerMetadata):
    """What a worker tells after a step.

    Attributes:
        written: By sequence, how many workers have synced the object.
        unwritten: By sequence, how many could not.
        unsynced: Of those, objects after whose failed sync nobody knows what the disk holds.
        corrupt: Sequences of objects whose bytes are not those that were written.
        num_failed_reads: Restores that the disk refused, or did not answer in time.
        restored_bytes: Bytes of whole restores.
        restore_s: Seconds that these took.
        write_s: Processor seconds of writing.
    """

    written: dict[int, int] = field(default_factory=dict)
    unwritten: dict[int, int] = field(default_factory=dict)
    unsynced: frozenset[int] = frozenset()
    corrupt: frozenset[int] = frozenset()
    num_failed_reads: int = 0
    restored_bytes: int = 0
    restore_s: float = 0.0
    write_s: float = 0.0

    def aggregate(self, other: KVConnectorWorkerMetadata) -> OffloadReport:
        """Merge the reports of two workers."""
        assert isinstance(other, OffloadReport)
        return OffloadReport(
            _add(self.written, other.written),
            _add(self.unwritten, other.unwritten),
            self.unsynced | other.unsynced,
            self.corrupt | other.corrupt,
            self.num_failed_reads + other.num_failed_reads,
            self.restored_bytes + other.restored_bytes,
            max(self.restore_s, other.restore_s),
            self.write_s + other.write_s,
        )


def _add(left: dict[int, int], right: dict[int, int]) -> dict[int, int]:
    return {key: left.get(key, 0) + right.get(key, 0) for key in {*left, *right}}
