"""What the connector's two sides tell each other, step by step. Plain values: they are pickled."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.handover.params import RemotePrefix
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.v1.core.pool.exports import PrefixBlocks


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """A prefix to load.

    Attributes:
        request_id: The request that waits for it.
        remote: The prefix, and who holds it.
        blocks: Where its rows go.
    """

    request_id: str
    remote: RemotePrefix
    blocks: PrefixBlocks


@dataclass
class HandoverOrders(KVConnectorMetadata):
    """One step's orders to a worker.

    Attributes:
        offers: Prefixes that others may read from now on, by lease.
        withdrawn: Leases that end.
        loads: Prefixes to load.
        cancelled: Requests whose load is wanted no more.
        returned: Prefixes that other engines need not hold any longer.
    """

    offers: dict[str, PrefixBlocks] = field(default_factory=dict)
    withdrawn: list[str] = field(default_factory=list)
    loads: list[LoadOrder] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    returned: list[RemotePrefix] = field(default_factory=list)

    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.offers or self.withdrawn or self.loads or self.cancelled or self.returned)


@dataclass
class HandoverReport(KVConnectorWorkerMetadata):
    """What a worker tells after a step.

    Attributes:
        ended_leases: By lease, how many workers let go of it.
        num_returning: Prefixes that are being given back.
        failed: Requests whose load failed there: the other workers' is of no use either.
    """

    ended_leases: dict[str, int] = field(default_factory=dict)
    num_returning: int = 0
    failed: frozenset[str] = frozenset()

    def aggregate(self, other: KVConnectorWorkerMetadata) -> HandoverReport:
        """Merge the reports of two workers."""
        assert isinstance(other, HandoverReport)
        names = {*self.ended_leases, *other.ended_leases}
        counts = {n: self.ended_leases.get(n, 0) + other.ended_leases.get(n, 0) for n in names}
        num_returning = self.num_returning + other.num_returning
        return HandoverReport(counts, num_returning, self.failed | other.failed)
