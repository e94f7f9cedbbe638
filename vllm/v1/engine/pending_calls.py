"""Questions to an engine core whose answers come later, as messages."""

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future

from vllm.exceptions import VllmError
from vllm.v1.engine.wire import Answer, Ask


class PendingCalls:
    """Questions that wait for their answers. Any thread may call.

    Owns: them, by the id that each answer carries.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ids = itertools.count()
        self._waiting: dict[int, Future[Answer]] = {}

    def open(self, make: Callable[[int], Ask], send: Callable[[Ask], None]) -> Future[Answer]:
        """Send a question, and return what its answer comes to.

        Args:
            make: Makes the message with an id.
            send: Sends it.
        """
        call: Future[Answer] = Future()
        with self._lock:
            call_id = next(self._ids)
            self._waiting[call_id] = call
        send(make(call_id))
        return call

    def settle(self, answer: Answer) -> None:
        """Give an answer to who asked; one that nobody waits for is dropped."""
        with self._lock:
            call = self._waiting.pop(answer.call_id, None)
        if call is not None and call.set_running_or_notify_cancel():
            call.set_result(answer)

    def fail_all(self, error: VllmError) -> None:
        """Tell all who wait that no answer will come."""
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        for call in waiting.values():
            if call.set_running_or_notify_cancel():
                call.set_exception(error)
