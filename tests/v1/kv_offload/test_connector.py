"""vllm/v1/kv_offload/connector.py: what it makes of workers' reports."""

from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from vllm.v1.kv_offload.connector import OffloadingConnector
from vllm.v1.kv_offload.orders import OffloadReport
from vllm.v1.outputs import KVConnectorOutput


@pytest.fixture
def connector() -> OffloadingConnector:
    """The scheduler's side over a tier to which the loads called "own" belong."""
    made = object.__new__(OffloadingConnector)
    tier = Mock(settle=Mock(side_effect=lambda name, has_failed: name.startswith("own")))
    made._tier = cast("Any", tier)
    made._wake = Mock()
    return made


def test_loads_of_no_request_are_nobody_elses_business(connector: OffloadingConnector) -> None:
    output = KVConnectorOutput(finished_recving={"own", "0"}, failed_recving={"1", "own too"})
    connector.update_connector_output(output)
    assert (output.finished_recving, output.failed_recving) == ({"0"}, {"1"})
    settled = {
        call.args[0]: call.kwargs for call in cast("Mock", connector._tier).settle.mock_calls
    }
    failed = {"0": False, "own": False, "1": True, "own too": True}
    assert settled == {name: {"has_failed": has_failed} for name, has_failed in failed.items()}


@pytest.mark.parametrize(
    ("output", "wakes"),
    [
        ({}, False),
        ({"kv_connector_worker_meta": OffloadReport()}, False),
        ({"kv_connector_worker_meta": OffloadReport(written={1: 1})}, True),
        ({"kv_connector_worker_meta": OffloadReport(unwritten={1: 1})}, True),
        ({"finished_recving": {"0"}}, True),
        ({"failed_recving": {"0"}}, True),
    ],
)
def test_news_rouse_the_engine(
    connector: OffloadingConnector, output: dict[str, Any], wakes: bool
) -> None:
    connector.update_connector_output(KVConnectorOutput(**output))
    assert cast("Mock", connector._wake).called is wakes
    is_report = "kv_connector_worker_meta" in output
    assert cast("Mock", connector._tier).take_report.called is is_report


def test_nothing_keeps_the_blocks_of_a_request_that_ended(connector: OffloadingConnector) -> None:
    request: Any = SimpleNamespace(request_id="0")
    assert connector.request_finished_all_groups(request, ([1], [2])) == (False, None)
    cast("Mock", connector._tier).end.assert_called_once_with(request)
