"""What the KV connectors of several workers report, as one report.

    step       1          2          3            4
    rank 0     a came                b came
    rank 1                a came                  b failed
    together              a came                  b failed

A worker writes its own part of a request's rows. The scheduler may read or free a request's blocks
only when no worker writes them any more, and resume it only when every part came.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.v1.outputs import KVConnectorOutput


@dataclass(slots=True)
class _Tally:
    """How many workers ended a transfer, and whether one of them failed."""

    num_ended: int = 0
    has_failed: bool = False


class TransferReports:
    """Joins the workers' reports, step by step.

    Owns: the transfers that some workers have ended and others not.

    Args:
        num_workers: How many must end a transfer, unless their connector says another number.
    """

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._loads: dict[str, _Tally] = {}
        self._sends: dict[str, _Tally] = {}

    def join(self, reports: Sequence[KVConnectorOutput | None]) -> KVConnectorOutput | None:
        """Return what the scheduler must hear of a step, from all workers' reports in rank order.

        What they say of the same thing (statistics, events) is taken from the first.
        """
        told = [report for report in reports if report is not None]
        if not told:
            return None
        needed = told[0].expected_finished_count or self._num_workers
        for report in told:
            for request_id in report.finished_recving or ():
                _note(self._loads, request_id, has_failed=False)
            for request_id in report.failed_recving:
                _note(self._loads, request_id, has_failed=True)
            for request_id in report.finished_sending or ():
                _note(self._sends, request_id, has_failed=False)
        received, failed = _take_ended(self._loads, needed)
        return KVConnectorOutput(
            finished_sending=_take_ended(self._sends, needed)[0],
            finished_recving=received,
            kv_connector_stats=told[0].kv_connector_stats,
            kv_cache_events=told[0].kv_cache_events,
            kv_connector_worker_meta=_merge_metadata(told),
            invalid_block_ids=set().union(*(report.invalid_block_ids for report in told)),
            failed_recving=failed,
        )


def _note(tallies: dict[str, _Tally], request_id: str, *, has_failed: bool) -> None:
    tally = tallies.setdefault(request_id, _Tally())
    tally.num_ended += 1
    tally.has_failed |= has_failed


def _take_ended(tallies: dict[str, _Tally], needed: int) -> tuple[set[str], set[str]]:
    """Drain the transfers that enough workers ended; those that came whole, and the others."""
    ended = {name: tally for name, tally in tallies.items() if tally.num_ended >= needed}
    for name in ended:
        del tallies[name]
    failed = {name for name, tally in ended.items() if tally.has_failed}
    return set(ended) - failed, failed


def _merge_metadata(reports: Sequence[KVConnectorOutput]) -> KVConnectorWorkerMetadata | None:
    messages: list[KVConnectorWorkerMetadata] = [
        report.kv_connector_worker_meta
        for report in reports
        if report.kv_connector_worker_meta is not None
    ]
    return reduce(lambda left, right: left.aggregate(right), messages) if messages else None
