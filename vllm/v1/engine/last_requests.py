"""What is known of the last requests, by the id that a client knows."""

from collections import OrderedDict
from typing import Generic, TypeVar

from vllm.cachelab.trace.names import response_id

MAX_REQUESTS = 10_000
T = TypeVar("T")


class LastRequests(Generic[T]):
    """One value for each of the last requests; of several prompts in one the first.

    Owns: the values.

    Args:
        max_requests: How many are kept.
    """

    def __init__(self, max_requests: int = MAX_REQUESTS) -> None:
        self._max_requests = max_requests
        self._kept: OrderedDict[str, T] = OrderedDict()

    def keep(self, request_id: str, value: T) -> None:
        """Keep what is known of a request, by the engine's id."""
        self._kept.setdefault(response_id(request_id), value)
        if len(self._kept) > self._max_requests:
            self._kept.popitem(last=False)

    def find(self, name: str) -> T | None:
        """Return what is known of a request; None: nothing, or it is too long ago."""
        return self._kept.get(name)
