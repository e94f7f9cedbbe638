"""The server's life: starting, ready, draining, dead; and the requests in flight."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Protocol

from vllm.exceptions import EngineDeadError, EngineError, ShuttingDownError


class Phase(Enum):
    """Where the server stands."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


class Failable(Protocol):
    """Something in flight that can be ended with an error."""

    def fail(self, error: Exception) -> None:
        """End it: whoever waits on it gets ``error``."""


class ServerState:
    """Phase of the server and what is in flight.

    Owns: the phase, the number of open requests and the set of running streams.
    """

    def __init__(self) -> None:
        self._phase = Phase.STARTING
        self._num_open = 0
        self._running: set[Failable] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._end_error: Exception | None = None

    @property
    def phase(self) -> Phase:
        """Where the server stands."""
        return self._phase

    @property
    def num_open_requests(self) -> int:
        """Requests to guarded routes that have not been answered in full."""
        return self._num_open

    def set_ready(self) -> None:
        """The engine serves; a drain that began meanwhile stays."""
        if self._phase is Phase.STARTING:
            self._phase = Phase.READY

    def start_drain(self) -> None:
        """Take no new requests."""
        if self._phase is not Phase.DEAD:
            self._phase = Phase.DRAINING

    def set_dead(self, reason: str) -> None:
        """The engine is gone: refuse everything and end what runs."""
        self._phase = Phase.DEAD
        self.end_all(EngineError(reason))

    def check_open(self) -> None:
        """Refuse a new request unless the server is ready.

        Raises:
            ShuttingDownError: It starts or drains.
            EngineDeadError: Its engine is dead.
        """
        if self._phase is Phase.STARTING:
            raise ShuttingDownError("The server is still starting: try again soon.")
        if self._phase is Phase.DRAINING:
            raise ShuttingDownError("The server is shutting down: send this to another one.")
        if self._phase is Phase.DEAD:
            raise EngineDeadError("The engine is dead and the server is about to exit.")

    @contextmanager
    def open_request(self) -> Iterator[None]:
        """Count a request as open while the block runs."""
        self._num_open += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_open -= 1
            if self._num_open == 0:
                self._idle.set()

    def add_running(self, stream: Failable) -> None:
        """Let ``end_all`` reach a stream until ``discard_running``.

        Raises:
            Exception: What ``end_all`` was given, if everything has been ended already.
        """
        if self._end_error is not None:
            raise self._end_error
        self._running.add(stream)

    def discard_running(self, stream: Failable) -> None:
        """Forget a stream that has ended."""
        self._running.discard(stream)

    def end_all(self, error: Exception) -> None:
        """End every running stream with ``error``, and those that would still start."""
        self._end_error = error
        for stream in tuple(self._running):
            stream.fail(error)

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no request is open; return whether that happened in time."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True
