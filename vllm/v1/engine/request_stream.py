"""What a caller of the asynchronous engine holds of its request."""

from collections.abc import Callable

from vllm.outputs import RequestOutput
from vllm.v1.engine.output_queue import OutputQueue


class RequestStream:
    """The outputs of one submitted request, as an async iterator.

    Closing it, cancelling a wait in it or dropping it aborts the request unless it has finished.
    """

    def __init__(self, request_id: str, queue: OutputQueue, on_leave: Callable[[], None]) -> None:
        self.request_id = request_id
        self._queue = queue
        # Aborts what is left; called at most once.
        self._on_leave: Callable[[], None] | None = on_leave
        self._done = False

    def __aiter__(self) -> "RequestStream":
        return self

    async def __anext__(self) -> RequestOutput:
        if self._done:
            raise StopAsyncIteration
        try:
            output = await self._queue.get()
        except BaseException:
            self._leave()
            raise
        if output.finished:
            self._done = True
            self._on_leave = None
        return output

    async def aclose(self) -> None:
        """Abort the request unless it has finished. Idempotent."""
        self._leave()

    def _leave(self) -> None:
        self._done = True
        on_leave, self._on_leave = self._on_leave, None
        if on_leave is not None:
            on_leave()

    def __del__(self) -> None:
        self._leave()
