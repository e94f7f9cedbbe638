"""Reports of several workers become one: a transfer ends when all have ended it."""

from vllm.distributed.kv_transfer.handover.orders import HandoverReport
from vllm.v1.executor.transfer_reports import TransferReports
from vllm.v1.outputs import KVConnectorOutput


def came(*request_ids: str) -> KVConnectorOutput:
    return KVConnectorOutput(finished_recving=set(request_ids))


def failed(*request_ids: str) -> KVConnectorOutput:
    return KVConnectorOutput(failed_recving=set(request_ids))


def ends(report: KVConnectorOutput | None) -> tuple[object, object]:
    assert report is not None
    return report.finished_recving, report.failed_recving


def test_workers_without_a_connector_report_nothing() -> None:
    assert TransferReports(2).join([None, None]) is None


def test_a_load_has_come_when_every_part_came() -> None:
    reports = TransferReports(3)
    assert ends(reports.join([came("a"), came(), came("b")])) == (set(), set())
    assert ends(reports.join([came("b"), came("a"), came()])) == (set(), set())
    assert ends(reports.join([came(), came(), came("a")])) == ({"a"}, set())
    assert ends(reports.join([came(), came("b"), came()])) == ({"b"}, set())
    # Nothing is remembered: the name may come again.
    assert ends(reports.join([came("a"), came(), came()])) == (set(), set())


def test_a_load_that_failed_anywhere_has_failed_once_nobody_writes() -> None:
    reports = TransferReports(2)
    assert ends(reports.join([failed("a"), came("b")])) == (set(), set())
    assert ends(reports.join([failed("b"), came()])) == (set(), {"b"})
    assert ends(reports.join([came(), came("a")])) == (set(), {"a"})
    assert ends(reports.join([failed("c"), failed("c")])) == (set(), {"c"})


def test_a_connector_may_say_how_many_report() -> None:
    reports = TransferReports(2)
    one = KVConnectorOutput(finished_recving={"a"}, expected_finished_count=1)
    assert ends(reports.join([one, came()])) == ({"a"}, set())


def test_the_rest_is_merged() -> None:
    first = KVConnectorOutput(
        finished_sending={"s"},
        kv_connector_stats="of the first",
        kv_connector_worker_meta=HandoverReport({"x": 1}, 2, frozenset({"f"})),
        invalid_block_ids={1, 2},
    )
    second = KVConnectorOutput(
        finished_sending=["s", "t"],
        kv_connector_stats="of the second",
        kv_connector_worker_meta=HandoverReport({"x": 1, "y": 1}, 1),
        invalid_block_ids={2, 3},
    )
    merged = TransferReports(2).join([first, second])
    assert merged is not None
    assert merged.finished_sending == {"s"}
    assert merged.kv_connector_stats == "of the first"
    assert merged.kv_connector_worker_meta == HandoverReport({"x": 2, "y": 1}, 3, frozenset({"f"}))
    assert merged.invalid_block_ids == {1, 2, 3}
