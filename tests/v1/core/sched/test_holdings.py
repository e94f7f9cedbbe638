"""How requests let go of what they hold."""

from typing import Any
from unittest.mock import Mock

import pytest

from tests.v1.core.sched.builders import (
    all_blocks_free,
    make_request,
    make_scheduler,
    outputs_by_request,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import SupportsHMA
from vllm.v1.core.sched.holdings import Holdings
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.messages import FinishReason
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus


def running(connector: Any = None) -> tuple[Scheduler, Holdings, Request]:
    """A request that has left the running list, with its blocks."""
    scheduler = make_scheduler()
    scheduler.add_request(make_request("0", 40))
    scheduler.schedule()
    scheduler.connector = connector
    return scheduler, scheduler._get_holdings(), scheduler.running.pop()


def test_a_preempted_request_holds_nothing_and_comes_first() -> None:
    scheduler, held, request = running()
    held.encoder.cache = Mock()
    scheduler.add_request(make_request("1", 10))
    held.preempt(request, 0.0)
    assert all_blocks_free(scheduler)
    held.encoder.cache.free.assert_called_once_with(request)
    assert scheduler.waiting.peek_request() is request
    assert request.status is RequestStatus.PREEMPTED


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("delays", [False, True])
def test_blocks_stay_while_somebody_reads_or_writes_them(keeps: bool, delays: bool) -> None:
    connector = Mock(request_finished=Mock(return_value=(keeps, {"a": 1})))
    scheduler, held, request = running(connector)
    request.finish(RequestStatus.FINISHED_STOPPED)
    assert held.end(request, delay_free_blocks=delays) == {"a": 1}
    assert scheduler.finished_req_ids == {"0"}
    is_free = not keeps and not delays
    assert all_blocks_free(scheduler) is is_free
    assert ("0" in scheduler.requests) is not is_free
    if not is_free:
        held.free_blocks(request)
    assert all_blocks_free(scheduler)
    assert not scheduler.requests


def test_connectors_that_know_groups_get_all_of_them() -> None:
    class GroupConnector(SupportsHMA):
        def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
            self.block_ids = block_ids
            return False, None

    connector = GroupConnector()
    _, held, request = running(connector)
    request.finish(RequestStatus.FINISHED_STOPPED)
    held.end(request)
    assert [len(ids) for ids in connector.block_ids] == [3]


def test_a_refused_request_tells_its_client_once() -> None:
    scheduler, held, request = running()
    request.resumable = True
    held.refuse(request, "no room")
    assert all_blocks_free(scheduler)
    assert not request.resumable
    assert scheduler.has_requests()
    output = scheduler.schedule()
    items = outputs_by_request(scheduler.update_from_output(output, ModelRunnerOutput([], {})))
    assert items["0"].finish_reason is FinishReason.ERROR
    assert items["0"].stop_reason == "no room"
    assert not scheduler.has_requests()
