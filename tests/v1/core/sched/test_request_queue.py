"""Queues: order, prepending, removal."""

import random

import pytest

from tests.v1.core.sched.builders import make_request
from vllm.v1.core.sched.request_queue import (
    FCFSRequestQueue,
    PriorityRequestQueue,
    RequestQueue,
    SchedulingPolicy,
    create_request_queue,
)
from vllm.v1.request import Request


def requests(count: int) -> list[Request]:
    return [make_request(f"{i}", 1, arrival_time=float(i)) for i in range(count)]


def names(queue: RequestQueue) -> list[str]:
    return [request.request_id for request in queue]


def test_create_by_policy() -> None:
    assert isinstance(create_request_queue(SchedulingPolicy.FCFS), FCFSRequestQueue)
    assert isinstance(create_request_queue(SchedulingPolicy("priority")), PriorityRequestQueue)


def test_fcfs_order_and_index() -> None:
    queue = FCFSRequestQueue()
    a, b, c = requests(3)
    queue.add_request(a)
    queue.add_request(b)
    queue.prepend_request(c)
    assert names(queue) == ["2", "0", "1"]
    assert queue[0] is c
    assert queue.peek_request() is c
    assert queue.pop_request() is c
    assert len(queue) == 2
    assert queue


def test_fcfs_prepended_requests_get_their_order_back() -> None:
    queue, skipped = FCFSRequestQueue(), FCFSRequestQueue()
    a, b, c = requests(3)
    queue.add_request(c)
    skipped.prepend_request(a)
    skipped.prepend_request(b)
    queue.prepend_requests(skipped)
    assert names(queue) == ["0", "1", "2"]


@pytest.mark.parametrize("policy", SchedulingPolicy)
def test_removal(policy: SchedulingPolicy) -> None:
    queue = create_request_queue(policy)
    a, b, c, d = requests(4)
    for request in (a, b, c):
        queue.add_request(request)
    queue.remove_request(b)
    assert names(queue) == ["0", "2"]
    with pytest.raises(ValueError, match="not in"):
        queue.remove_request(d)
    queue.remove_requests([a, d])
    assert names(queue) == ["2"]


@pytest.mark.parametrize("policy", SchedulingPolicy)
def test_empty(policy: SchedulingPolicy) -> None:
    queue = create_request_queue(policy)
    assert not queue
    assert len(queue) == 0
    with pytest.raises(IndexError):
        queue.peek_request()
    with pytest.raises(IndexError):
        queue.pop_request()


def test_priority_order_whatever_the_way_in() -> None:
    rng = random.Random(0)
    queue, other = PriorityRequestQueue(), PriorityRequestQueue()
    everyone = [
        make_request(f"{i}", 1, priority=rng.randrange(3), arrival_time=float(rng.randrange(4)))
        for i in range(30)
    ]
    for i, request in enumerate(everyone):
        (queue.add_request, queue.prepend_request, other.add_request)[i % 3](request)
    queue.prepend_requests(other)
    expected = sorted(everyone, key=lambda r: (r.priority, r.arrival_time, r.request_id))
    assert list(queue) == expected
    assert [queue.pop_request() for _ in everyone] == expected
