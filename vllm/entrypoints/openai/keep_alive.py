"""What keeps a silent event stream open through proxies that close idle connections."""

import asyncio

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_COMMENT = b": keep-alive\n\n"
# Anthropic's streams have an event for it, by which its clients know that the server lives.
_PING = b'event: ping\ndata: {"type": "ping"}\n\n'
_MESSAGES_PATH = "/v1/messages"


class KeepAliveMiddleware:
    """Sends ``: keep-alive`` on event streams that were silent for a while, ``ping`` on Messages.

    Clients of server-sent events skip comments, and those of Messages skip pings.

    Args:
        app: What answers.
        interval_s: Seconds of silence after which a comment goes out.
    """

    def __init__(self, app: ASGIApp, *, interval_s: float) -> None:
        self._app = app
        self._interval_s = interval_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_messages = str(scope.get("path", "")).endswith(_MESSAGES_PATH)
        kept = _KeptAlive(send, self._interval_s, _PING if is_messages else _COMMENT)
        try:
            await self._app(scope, receive, kept.send)
        finally:
            await kept.close()


class _KeptAlive:
    """One response's way out.

    Owns: the task that watches for silence, once the response is known to be an event stream.
    """

    def __init__(self, send: Send, interval_s: float, filler: bytes) -> None:
        self._send = send
        self._filler = filler
        self._interval_s = interval_s
        self._lock = asyncio.Lock()
        self._sent_at = 0.0
        self._watcher: asyncio.Task[None] | None = None

    async def send(self, message: Message) -> None:
        """Pass a message on."""
        is_start = message["type"] == "http.response.start"
        if not is_start and not message.get("more_body", False):
            await self.close()
        async with self._lock:
            await self._send(message)
        self._sent_at = asyncio.get_running_loop().time()
        if is_start and Headers(raw=message["headers"]).get("content-type", "").startswith(
            "text/event-stream"
        ):
            self._watcher = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        # Asleep for as long as silence would take from the last message on: a message wakes nobody.
        loop = asyncio.get_running_loop()
        while True:
            left_s = self._sent_at + self._interval_s - loop.time()
            if left_s > 0:
                await asyncio.sleep(left_s)
                continue
            async with self._lock:
                await self._send(
                    {"type": "http.response.body", "body": self._filler, "more_body": True}
                )
            self._sent_at = loop.time()

    async def close(self) -> None:
        """End the watch; nothing follows the response's last message."""
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)
