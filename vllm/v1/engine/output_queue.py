"""Outputs on their way to one caller."""

import asyncio
from typing import Protocol

from vllm.outputs import RequestOutput


class OutputSink(Protocol):
    """Takes the outputs of one request."""

    def put(self, output: RequestOutput) -> None:
        """Deliver an output."""

    def fail(self, error: Exception) -> None:
        """Deliver the changes that no output will follow."""


class OutputQueue:
    """Holds at most one output: what a slow reader did not fetch is merged.

    All calls in the event loop's thread.

    Args:
        deltas: Whether outputs hold only what is new.
    """

    def __init__(self, *, deltas: bool) -> None:
        self._deltas = deltas
        self._output: RequestOutput | None = None
        self._error: Exception | None = None
        self._ready = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        """Deliver an output."""
        if self._output is None:
            self._output = output
        else:
            self._output.merge(output, deltas=self._deltas)
        self._ready.set()

    def fail(self, error: Exception) -> None:
        """Deliver an error; what is queued is read before it."""
        self._error = error
        self._ready.set()

    async def get(self) -> RequestOutput:
        """Wait for what came since the last call.

        Raises:
            Exception: The one given to :meth:`fail`.
        """
        while self._output is None:
            if self._error is not None:
                raise self._error
            await self._ready.wait()
            self._ready.clear()
        output, self._output = self._output, None
        return output
