"""Where requests stand, and how they move."""

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
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.requests import Holdings, Requests
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.messages import EngineCoreEventType, FinishReason
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus


def names(requests: object) -> list[str]:
    return [request.request_id for request in requests]  # type: ignore[attr-defined]


def filled(count: int = 3, **kwargs: object) -> tuple[Requests, list[Request]]:
    """Requests with some waiting, named 0, 1, ..."""
    requests = Requests(**kwargs)  # type: ignore[arg-type]
    items = [make_request(f"{i}", 10, arrival_time=float(i)) for i in range(count)]
    for request in items:
        requests.add(request)
    return requests, items


def admit(requests: Requests, request: Request) -> None:
    requests.leave_queues([request])
    requests.admit(request, 0, 1.0)


def test_what_waits_for_something_else_stands_apart_and_comes_first() -> None:
    requests, items = filled(2)
    grammar = {"structured_outputs": StructuredOutputsParams(regex="a*")}
    blocked = make_request("g", 10, params=grammar)
    requests.add(blocked)
    assert names(requests.waiting) == ["0", "1"]
    assert names(requests.skipped_waiting) == ["g"]
    assert requests.num_waiting == 3
    assert requests.next_queue() is requests.skipped_waiting
    requests.leave_queues([blocked])
    assert requests.next_queue() is requests.waiting
    requests.leave_queues(items)
    assert requests.next_queue() is None


def test_by_priority_the_more_important_head_is_next() -> None:
    requests = Requests(SchedulingPolicy.PRIORITY)
    grammar = {"structured_outputs": StructuredOutputsParams(regex="a*")}
    requests.add(make_request("g", 10, params=grammar, priority=1))
    requests.add(make_request("low", 10, priority=2))
    assert requests.next_queue() is requests.skipped_waiting
    requests.add(make_request("high", 10, priority=0))
    assert requests.next_queue() is requests.waiting


@pytest.mark.parametrize("notes_events", [False, True])
def test_a_life(notes_events: bool) -> None:
    requests, (first, *_) = filled(1, notes_events=notes_events, tells_clients=True)
    assert requests.waiting.pop_request() is first
    requests.admit(first, 4, 1.0)
    assert (first.status, first.num_computed_tokens) == (RequestStatus.RUNNING, 4)
    assert requests.prefilling == {first}
    requests.end_prefill(first)
    assert requests.prefilling == set()
    requests.running.remove(first)
    requests.preempt(first, 2.0)
    assert names(requests.waiting) == ["0"]
    requests.remove([first])
    first.finish(RequestStatus.FINISHED_ABORTED)
    requests.note_end(first)
    assert requests.has_changes()
    assert requests.take_finished_ids() == {"0"}
    assert requests.take_finished_by_client() == {0: {"0"}}
    assert requests.take_finished_by_client() == {}
    assert not requests.has_changes()
    requests.forget(first)
    assert requests.by_id == {}
    kinds = EngineCoreEventType
    expected = [kinds.QUEUED, kinds.SCHEDULED, kinds.PREEMPTED] if notes_events else []
    assert [event.type for event in first.take_events() or ()] == expected


def test_drained_sets_are_new_ones() -> None:
    requests, (first, *_) = filled(1)
    first.finish(RequestStatus.FINISHED_ABORTED)
    requests.note_end(first)
    told = requests.take_finished_ids()
    assert requests.take_finished_ids() == set()
    assert told == {"0"}
    assert requests.take_finished_by_client() == {}


def test_remove_finds_requests_wherever_they_stand() -> None:
    requests, (first, second, third) = filled()
    admit(requests, first)
    requests.remove([first, third])
    assert requests.running == []
    assert names(requests.waiting) == ["1"]
    requests.remove([])
    assert requests.num_waiting == 1
    assert second.status is RequestStatus.WAITING


def test_find_alive() -> None:
    requests, (first, *_) = filled(3)
    first.finish(RequestStatus.FINISHED_ABORTED)
    assert names(requests.find_alive(None)) == ["1", "2"]
    assert names(requests.find_alive("1")) == ["1"]
    assert names(requests.find_alive(["2", "0", "2", "x"])) == ["2"]


def test_loads() -> None:
    requests, (first, second, _) = filled(3)
    for request in (first, second):
        requests.leave_queues([request])
        requests.start_loading(request, 8)
        requests.skipped_waiting.add_request(request)
    assert requests.find_loading() == [first, second]
    assert requests.prefilling == {first, second}
    requests.loaded_ids.add("0")
    assert not requests.is_loading(first)
    assert requests.is_loading(second)
    requests.failed_load_ids.add("0")
    assert requests.take_loaded(first)
    assert not requests.take_loaded(first)
    assert not requests.loaded_ids
    requests.loaded_ids.add("1")
    requests.failed_load_ids.add("1")
    second.finish(RequestStatus.FINISHED_ABORTED)
    requests.note_end(second)
    assert not requests.loaded_ids
    assert not requests.failed_load_ids
    assert requests.prefilling == {first}


def test_victims() -> None:
    requests, items = filled(3)
    for request in items:
        admit(requests, request)
    assert requests.choose_victim() is items[2]
    requests = Requests(SchedulingPolicy.PRIORITY)
    for name, priority, arrival in (("a", 1, 0.0), ("b", 2, 1.0), ("c", 2, 2.0), ("d", 0, 3.0)):
        request = make_request(name, 4, priority=priority, arrival_time=arrival)
        requests.add(request)
        admit(requests, request)
    assert requests.choose_victim().request_id == "c"


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


def test_who_is_preempted_prefills_no_more() -> None:
    requests, (first, second, _) = filled()
    for request in (first, second):
        admit(requests, request)
    assert requests.prefilling == {first, second}
    requests.leave_running({second})
    requests.preempt(second, 2.0)
    assert requests.prefilling == {first}, "no blocks are reserved for it"
    assert second.status is RequestStatus.PREEMPTED
    assert names(requests.waiting) == ["1", "2"]
    assert requests.preempted_ids == {"1"}
