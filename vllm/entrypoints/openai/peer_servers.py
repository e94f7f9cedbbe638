"""Other server processes of the same command: a request for what one of them keeps goes there.

    client --> process 2: GET /v1/responses/resp_1 --(not here)--> process 1, then 3, ... --> answer

Which process a connection reaches is the kernel's choice, but stored responses are one's own. Each
process therefore serves the same application on a Unix socket in the command's private folder too.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator
from urllib.parse import quote

import httpx
import uvicorn
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from vllm.entrypoints.openai.diagnosis.diagnoses import Diagnoses
from vllm.entrypoints.openai.disconnect import ClientGoneError, until_disconnect
from vllm.entrypoints.openai.web_server import SignalFreeServer
from vllm.exceptions import ShuttingDownError
from vllm.logger import init_logger

logger = init_logger(__name__)

# Says that a process asks: who has nothing answers so, and asks nobody.
_ASKED_BY_PEER = "x-vllm-peer"
_NOT_FOUND = 404
# Where a process tells the others its fingerprints, on its Unix socket alone.
_FINGERPRINTS = "/peer/fingerprints/"
_OWNER = "x-vllm-owner"
# What belongs to one connection, or is made anew.
_DROPPED = frozenset({"host", "connection", "keep-alive", "transfer-encoding", "date", "server"})
# An answer takes as long as it takes; a peer of this machine is there or not.
_TIMEOUT = httpx.Timeout(None, connect=5.0)
_CLOSE_TIMEOUT_S = 3


class PeerServers:
    """The other processes, and the socket on which they reach this one.

    Owns: the socket and the connections, while the server runs.

    Args:
        folder: Where the sockets are; only this user may enter it.
        client: Number of this process, from 1.
        num_clients: How many there are.
    """

    def __init__(self, folder: str, client: int, num_clients: int) -> None:
        paths = [os.path.join(folder, f"peer{i + 1}") for i in range(num_clients)]
        self._own = paths.pop(client - 1)
        self._clients = [
            httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=path), timeout=_TIMEOUT)
            for path in paths
        ]
        self._server: SignalFreeServer | None = None
        self._serving: asyncio.Task[None] | None = None

    def start(self, app: ASGIApp, diagnoses: Diagnoses) -> None:
        """Serve the application to the other processes too, without TLS and access log.

        Args:
            app: The application.
            diagnoses: Has the fingerprints that only they may ask for.
        """
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(self._own)
        listener.listen()
        config = uvicorn.Config(
            _PeerSide(app, diagnoses),
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=_CLOSE_TIMEOUT_S,
        )
        self._server = SignalFreeServer(config)
        self._serving = asyncio.create_task(self._server.serve([listener]))

    async def stop(self) -> None:
        """Close the connections; idempotent."""
        for client in self._clients:
            await client.aclose()
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._serving

    @staticmethod
    def has_asked(request: Request) -> bool:
        """Whether another process of the command asks, on behalf of its client."""
        return _ASKED_BY_PEER in request.headers

    async def ask(self, request: Request) -> Response | None:
        """Have a request answered by the process that can; None: there is none.

        Args:
            request: Asks for something that is not here.
        """
        if self.has_asked(request):
            return None
        body = await request.body()
        for client in self._clients:
            reply = await self._send(client, request, body)
            if reply is not None:
                return _RelayedResponse(reply)
        return None

    async def ask_first(self, request: Request) -> Response:
        """Have a request answered by the first process, its body passed on as it comes.

        Raises:
            ShuttingDownError: It does not answer.
            ClientGoneError: The client leaves.
        """
        outgoing = self._outgoing(self._clients[0], request, request.stream())
        try:
            return _RelayedResponse(await self._clients[0].send(outgoing, stream=True))
        except ClientDisconnect as error:
            raise ClientGoneError from error
        except httpx.HTTPError as error:
            # It ends, and with it the whole command.
            raise ShuttingDownError(
                f"The API server process that has batches does not answer: {error!r}."
            ) from error

    async def find_fingerprint(self, response_id: str, owner: bytes | None) -> bytes | None:
        """Return the fingerprint of a response of an owner's; None: no process has it."""
        path = _FINGERPRINTS + quote(response_id, safe="")
        headers = {} if owner is None else {_OWNER: owner.hex()}
        for client in self._clients:
            try:
                reply = await client.get(f"http://peer{path}", headers=headers)
            except httpx.HTTPError as error:
                logger.warning("Another API server process does not answer: %r.", error)
                continue
            if reply.status_code != _NOT_FOUND:
                return reply.content
        return None

    async def _send(
        self, client: httpx.AsyncClient, request: Request, body: bytes
    ) -> httpx.Response | None:
        try:
            reply = await client.send(self._outgoing(client, request, body), stream=True)
        except httpx.HTTPError as error:
            logger.warning("Another API server process does not answer: %r.", error)
            return None
        if reply.status_code == _NOT_FOUND:
            await reply.aclose()
            return None
        return reply

    @staticmethod
    def _outgoing(
        client: httpx.AsyncClient, request: Request, body: bytes | AsyncIterator[bytes]
    ) -> httpx.Request:
        """Return a client's request as a peer gets it."""
        headers = [(n, v) for n, v in request.headers.items() if n not in _DROPPED]
        # As it came: an id may hold what an URL quotes.
        target = request.scope["raw_path"] + b"?" + request.scope["query_string"]
        url = httpx.URL("http://peer", raw_path=target)
        return client.build_request(
            request.method, url, headers=[*headers, (_ASKED_BY_PEER, "1")], content=body
        )


class _PeerSide:
    """The application as the other processes see it: it tells them fingerprints, too."""

    def __init__(self, app: ASGIApp, diagnoses: Diagnoses) -> None:
        self._app = app
        self._diagnoses = diagnoses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        path = str(scope.get("path", ""))
        if not path.startswith(_FINGERPRINTS):
            await self._app(scope, receive, send)
            return
        owner = Headers(scope=scope).get(_OWNER)
        found = self._diagnoses.find_encoded(
            path.removeprefix(_FINGERPRINTS), None if owner is None else bytes.fromhex(owner)
        )
        answer = Response(b"", _NOT_FOUND) if found is None else Response(found)
        await answer(scope, receive, send)


class _RelayedResponse(Response):
    """A peer's answer, passed on as it comes."""

    def __init__(self, reply: httpx.Response) -> None:
        self._reply = reply
        self.status_code = reply.status_code
        self.background = None
        self.raw_headers = [
            (name.lower(), value)
            for name, value in reply.headers.raw
            if name.lower().decode("latin-1") not in _DROPPED
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        try:
            await until_disconnect(receive, self._pass_on(send))
        except ClientGoneError:
            logger.info("Client left in mid-stream: another process ends its request")
        except httpx.HTTPError as error:
            # The connection breaks off, as it would if this process had gone.
            logger.warning("Another API server process broke off: %r.", error)
        finally:
            with contextlib.suppress(httpx.HTTPError):
                await self._reply.aclose()

    async def _pass_on(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code}
        await send({**start, "headers": self.raw_headers})
        async for chunk in self._reply.aiter_raw():
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
