"""Calls to the engine core whose answers come later, as messages."""

import asyncio

from vllm.exceptions import EngineDeadError
from vllm.v1.engine.wire import CallAnswer


class PendingCalls:
    """Calls that wait, by the id that their answer carries. For one event loop."""

    def __init__(self) -> None:
        self._waiting: dict[int, asyncio.Future[CallAnswer]] = {}

    def open(self, call_id: int) -> "asyncio.Future[CallAnswer]":
        """Return what a call just sent waits for.

        Answers are taken in by the same loop, so none comes before this returns.
        """
        call = self._waiting[call_id] = asyncio.get_running_loop().create_future()
        return call

    def answer(self, message: CallAnswer) -> None:
        """Give an answer to who asked; one that nobody waits for is dropped."""
        call = self._waiting.pop(message.call_id, None)
        if call is not None and not call.done():
            call.set_result(message)

    def fail_all(self, error: EngineDeadError) -> None:
        """Tell all who wait that no answer will come."""
        for call in self._waiting.values():
            if not call.done():
                call.set_exception(error)
        self._waiting.clear()
