"""The queues of requests that wait: first come first served, or by priority."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator
from enum import Enum

from typing_extensions import override

from vllm.v1.request import Request


class SchedulingPolicy(Enum):
    """In which order waiting requests are admitted, and which running one is preempted."""

    FCFS = "fcfs"
    PRIORITY = "priority"


class RequestQueue(ABC):
    """What the scheduler asks of a queue."""

    @abstractmethod
    def add_request(self, request: Request) -> None:
        """Add a request at its place: the end, or by priority."""

    @abstractmethod
    def pop_request(self) -> Request:
        """Take the next request; IndexError if there is none."""

    @abstractmethod
    def peek_request(self) -> Request:
        """Return the next request; IndexError if there is none."""

    @abstractmethod
    def prepend_request(self, request: Request) -> None:
        """Put a request in front (by priority: at its place)."""

    @abstractmethod
    def prepend_requests(self, requests: RequestQueue) -> None:
        """Put all requests of another queue in front (by priority: at their places)."""

    @abstractmethod
    def remove_request(self, request: Request) -> None:
        """Take a request out; ValueError if it is not queued."""

    @abstractmethod
    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Take several requests out; those not queued are passed over."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __bool__(self) -> bool: ...

    @abstractmethod
    def __iter__(self) -> Iterator[Request]: ...


class FCFSRequestQueue(deque[Request], RequestQueue):
    """First come, first served."""

    def add_request(self, request: Request) -> None:
        """Add a request at the end."""
        self.append(request)

    @override
    def pop_request(self) -> Request:
        return self.popleft()

    @override
    def peek_request(self) -> Request:
        if not self:
            raise IndexError("peek from an empty queue")
        return self[0]

    def prepend_request(self, request: Request) -> None:
        """Put a request in front."""
        self.appendleft(request)

    def prepend_requests(self, requests: RequestQueue) -> None:
        """Put all requests of another queue in front, in reverse.

        That queue collects requests by ``prepend_request``, so the reversal restores the order
        in which they stood.
        """
        self.extendleft(requests)

    @override
    def remove_request(self, request: Request) -> None:
        self.remove(request)

    @override
    def remove_requests(self, requests: Iterable[Request]) -> None:
        gone = set(requests)
        kept = [request for request in self if request not in gone]
        # In place: others hold this queue.
        self.clear()
        self.extend(kept)

    def __bool__(self) -> bool:
        return len(self) > 0


class PriorityRequestQueue(RequestQueue):
    """Lowest priority value first, then earliest arrival."""

    def __init__(self) -> None:
        self._heap: list[Request] = []

    def add_request(self, request: Request) -> None:
        """Add a request at its place."""
        heapq.heappush(self._heap, request)

    @override
    def pop_request(self) -> Request:
        if not self._heap:
            raise IndexError("pop from an empty queue")
        return heapq.heappop(self._heap)

    @override
    def peek_request(self) -> Request:
        if not self._heap:
            raise IndexError("peek from an empty queue")
        return self._heap[0]

    def prepend_request(self, request: Request) -> None:
        """Add a request at its place: priority decides, not who comes last."""
        self.add_request(request)

    def prepend_requests(self, requests: RequestQueue) -> None:
        """Add all requests of another queue at their places."""
        for request in requests:
            self.add_request(request)

    @override
    def remove_request(self, request: Request) -> None:
        self._heap.remove(request)
        heapq.heapify(self._heap)

    @override
    def remove_requests(self, requests: Iterable[Request]) -> None:
        gone = set(requests)
        self._heap = [request for request in self._heap if request not in gone]
        heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._heap)

    def __bool__(self) -> bool:
        return bool(self._heap)

    def __iter__(self) -> Iterator[Request]:
        return iter(sorted(self._heap))


def create_request_queue(policy: SchedulingPolicy) -> RequestQueue:
    """Return an empty queue of a policy."""
    return _QUEUES[policy]()


_QUEUES: dict[SchedulingPolicy, type[RequestQueue]] = {
    SchedulingPolicy.FCFS: FCFSRequestQueue,
    SchedulingPolicy.PRIORITY: PriorityRequestQueue,
}
