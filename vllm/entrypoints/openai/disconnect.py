"""Work that stops when the client leaves, and the event stream built on it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from vllm.logger import init_logger

logger = init_logger(__name__)

T = TypeVar("T")


class ClientGoneError(Exception):
    """The client closed its connection before the answer was complete."""


async def _wait_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def until_disconnect(receive: Receive, work: Awaitable[T]) -> T:
    """Return the result of ``work``, which is cancelled when the client leaves.

    Args:
        receive: The ASGI receive channel, after the body was read.
        work: What to wait for.

    Raises:
        ClientGoneError: The client left first; ``work`` has ended by then.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_wait_disconnect(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        for pending in (task, watcher):
            pending.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


class EventStreamResponse(Response):
    """Server-sent events from an iterator that ends early when the client leaves.

    Args:
        events: Encoded events. It must not raise: errors are events too.
        on_close: Awaited in the end, whatever happened.
        name: Of the request, for the log.
        headers: Further response headers.
        on_gone: Called if the client leaves before the end.
    """

    media_type = "text/event-stream; charset=utf-8"

    def __init__(
        self,
        events: AsyncIterator[bytes],
        on_close: Callable[[], Awaitable[None]],
        name: str,
        headers: Mapping[str, str] | None = None,
        *,
        on_gone: Callable[[], None] = lambda: None,
    ) -> None:
        self._events = events
        self._on_close = on_close
        self._name = name
        self._on_gone = on_gone
        self.status_code = 200
        self.background = None
        # Proxies must pass events on as they come.
        self.init_headers(
            {"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})}
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            await until_disconnect(receive, self._send_all(send))
        except ClientGoneError:
            self._on_gone()
            logger.info("Client left request %s in mid-stream: aborted", self._name)
        finally:
            await self._on_close()

    async def _send_all(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
