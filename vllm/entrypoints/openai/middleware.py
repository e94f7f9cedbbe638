"""The edge of the server: what happens to every request before a route sees it.

From the outside in: CORS (Starlette's), then ``EdgeMiddleware``: request id, metrics, API key,
phase of the server, size and encoding of the body.
"""

import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm.entrypoints.anthropic.errors import in_dialect_of
from vllm.entrypoints.openai.api_keys import KeyGuard
from vllm.entrypoints.openai.errors import HttpError, describe_exception
from vllm.entrypoints.openai.http_metrics import HttpMetrics
from vllm.entrypoints.openai.page_routes import is_page
from vllm.entrypoints.openai.request_scope import header_request_id
from vllm.entrypoints.openai.state import ServerState
from vllm.exceptions import EngineError
from vllm.logger import current_request_id
from vllm.v1.engine.tenant_limits import current_tenant, runs_in_background
from vllm.v1.metrics.tracing import TRACE_HEADERS, current_trace_headers

# Probes and scrapes need no key and are answered in every phase. Neither does the page: a browser
# cannot send a key with it, and what it shows it must ask for.
OPEN_PATHS = frozenset({"/health", "/ready", "/ping", "/version", "/metrics"})
# The longest context in token ids, as JSON, is far below.
MAX_BODY_BYTES = 64 * 1024 * 1024
# Files are written as they come. What they may be is checked where they are.
_UPLOADS, _MAX_UPLOAD_BYTES = "/v1/files", 1 << 30


class EdgeMiddleware:
    """Request ids, metrics, API keys, phase, the body's size and encoding, for every HTTP request.

    Args:
        app: The routes.
        state: Phase of the server; counts the open requests.
        metrics: Gets every request.
        keys: Which routes need which keys.
        echo_request_id: Whether responses carry ``X-Request-Id``.
        root_path: Where a proxy shows the server; paths may come with it or without.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        state: ServerState,
        metrics: HttpMetrics,
        keys: KeyGuard,
        echo_request_id: bool,
        root_path: str = "",
    ) -> None:
        self._app = app
        self._state = state
        self._metrics = metrics
        self._keys = keys
        self._echo_request_id = echo_request_id
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._root_path:
            scope["root_path"] = self._root_path
        started = time.monotonic()
        status = 500
        num_sent = 0
        method = scope["method"]
        if method == "HEAD":
            # What GET would say, without its body.
            scope = {**scope, "method": "GET"}
            send = _without_body(send)
        request_id = header_request_id(scope)

        async def observed_send(message: Message) -> None:
            nonlocal status, num_sent
            num_sent += len(message.get("body", b""))
            if message["type"] == "http.response.start":
                status = message["status"]
                if self._echo_request_id:
                    MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        in_log = current_request_id.set(request_id)
        in_trace = current_trace_headers.set(_trace_headers(scope))
        headers = Headers(scope=scope)
        of_tenant = current_tenant.set(self._keys.find_tenant(headers))
        in_background = runs_in_background.set(self._keys.is_inner(headers))
        try:
            await self._guard(scope, receive, observed_send)
        finally:
            current_request_id.reset(in_log)
            current_trace_headers.reset(in_trace)
            current_tenant.reset(of_tenant)
            runs_in_background.reset(in_background)
            handler = getattr(scope.get("route"), "path", "none")
            self._metrics.observe(
                handler,
                method,
                status,
                time.monotonic() - started,
                request_bytes=_content_length(Headers(scope=scope)),
                response_bytes=num_sent,
            )

    async def _guard(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = route_path(scope)
        if path in OPEN_PATHS or is_page(path):
            # A scrape is answered in every phase, with a key or without.
            headers = Headers(scope=scope)
            refusal = self._keys.find_refused_scrape(headers) if path == "/metrics" else None
            if refusal is None:
                await self._app(scope, receive, send)
            else:
                await send_error(send, refusal, path, header_request_id(scope))
            return
        refusal = self._find_refusal(scope, path)
        if refusal is not None:
            await send_error(send, refusal, path, header_request_id(scope))
            return
        with self._state.open_request():
            await self._app(scope, _limited(receive, _max_bytes(path)), send)

    def _find_refusal(self, scope: Scope, path: str) -> HttpError | None:
        headers = Headers(scope=scope)
        without_key = self._keys.find_refusal(path, headers)
        if without_key is not None:
            return without_key
        try:
            self._state.check_open()
        except EngineError as error:
            return describe_exception(error)
        if _content_length(headers) > _max_bytes(path):
            return _too_large(_max_bytes(path))
        encoding = headers.get("content-encoding", "identity")
        if encoding.strip().lower() not in ("", "identity"):
            return HttpError(
                415,
                f"'Content-Encoding: {encoding}' is not supported: send the body uncompressed.",
                "body",
            )
        return None


def _without_body(send: Send) -> Send:
    """Send a response's head, and end it there."""
    has_ended = False

    async def send_head(message: Message) -> None:
        nonlocal has_ended
        if message["type"] != "http.response.body":
            await send(message)
        elif not has_ended:
            has_ended = True
            await send({"type": "http.response.body", "body": b""})

    return send_head


def route_path(scope: Scope) -> str:
    """Return the path that routes are found by: without ``--root-path``, if it is there."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    if root and (path == root or path.startswith(f"{root}/")):
        return path[len(root) :]
    return path


def _trace_headers(scope: Scope) -> dict[str, str] | None:
    headers = Headers(scope=scope)
    return {name: headers[name] for name in TRACE_HEADERS if name in headers} or None


def _content_length(headers: Headers) -> int:
    length = headers.get("content-length", "")
    # Longer ones are nonsense, and int() of thousands of digits is slow or refused.
    return int(length) if length.isdecimal() and len(length) < 20 else 0


def _max_bytes(path: str) -> int:
    return _MAX_UPLOAD_BYTES if path == _UPLOADS else MAX_BODY_BYTES


def _too_large(limit: int) -> HttpError:
    return HttpError(413, f"The body is too large: at most {limit:,} bytes are taken.", "body")


def _limited(receive: Receive, limit: int) -> Receive:
    """Bound a body that does not say its length."""
    num_bytes = 0

    async def limited_receive() -> Message:
        nonlocal num_bytes
        message = await receive()
        if message["type"] == "http.request":
            num_bytes += len(message.get("body", b""))
            if num_bytes > limit:
                raise HTTPException(413, _too_large(limit).message)
        return message

    return limited_receive


async def send_error(send: Send, error: HttpError, path: str, request_id: str) -> None:
    """Send an error as the whole response, in the shape of the API that a path belongs to."""
    status, error_headers, body = in_dialect_of(path, error, request_id=request_id)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *((name.lower().encode(), value.encode()) for name, value in error_headers.items()),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
