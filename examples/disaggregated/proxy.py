"""A proxy for prefill apart from decode: one address in front of prefill and decode servers.

    client --> proxy --(the prompt, max_tokens 1, do_remote_decode)--> prefill server
                     <--(kv_transfer_params: where its KV is held)----
                     --(the request, these params)--> decode server --> answer, streamed on

    python examples/disaggregated/proxy.py --port 8000 --prefill http://127.0.0.1:8100 \
        --decode http://127.0.0.1:8200

A prefill server that fails is passed over for the next; with none left the decode server computes
the prompt itself. Once a byte of an answer has reached the client, nothing is asked again. Where no
decode server takes the prompt, or its client leaves first, the prefill server is told to let go.
"""

import argparse
import asyncio
import itertools
import json
import logging
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

logger = logging.getLogger("proxy")

GENERATING = ("/v1/completions", "/v1/chat/completions")
# What says how much to answer, and how: the prefill server answers one token that nobody reads.
# All else stays, because it may be part of the prompt.
_ANSWER_FIELDS = (
    *("n", "best_of", "stream", "stream_options", "max_tokens", "max_completion_tokens"),
    *("min_tokens", "logprobs", "top_logprobs", "echo"),
)
_HOP_HEADERS = {"host", "content-length", "connection", "transfer-encoding", "accept-encoding"}
_PARAMS = "kv_transfer_params"
# nginx's status for a client that left; nobody reads it.
_CLIENT_GONE = 499
_CONNECT_TIMEOUT_S = 10.0
_KEEP_ALIVE_S = 2.0
# The client waits for it, and it can do without.
_WITHDRAW_TIMEOUT_S = 5.0
# Of a connection that ended before an answer began: the next one may be well.
_DROPPED = (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError)


class Servers:
    """Servers of one kind; those with the fewest requests first.

    Args:
        urls: Their addresses.
    """

    def __init__(self, urls: Iterable[str]) -> None:
        self._num_open = {url.rstrip("/"): 0 for url in urls}
        self._turn = itertools.count()

    def in_order(self) -> list[str]:
        """Return all of them, the one to ask first in front."""
        urls = list(self._num_open)
        shift = next(self._turn) % len(urls)
        return sorted(urls[shift:] + urls[:shift], key=self._num_open.__getitem__)

    def begin(self, url: str) -> None:
        """Count a request."""
        self._num_open[url] += 1

    def end(self, url: str) -> None:
        """The other half of ``begin``."""
        self._num_open[url] -= 1


def prefill_body(body: dict[str, Any]) -> dict[str, Any]:
    """Return what the prefill server is asked for a client's request."""
    kept = {name: value for name, value in body.items() if name not in _ANSWER_FIELDS}
    limit = "max_completion_tokens" if "messages" in body else "max_tokens"
    return {**kept, limit: 1, "stream": False, "kv_transfer_params": {"do_remote_decode": True}}


def can_split(body: dict[str, Any]) -> bool:
    """Whether a request has one prompt whose rows another server may compute."""
    if body.get("prompt_logprobs") is not None or body.get("kv_transfer_params"):
        return False
    if body.get("echo") and body.get("logprobs") is not None:
        return False
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        return len(prompt) == 1
    return "messages" in body or bool(prompt)


class Proxy:
    """Sends each request to a prefill and a decode server.

    Owns: the connections.

    Args:
        prefill: URLs of prefill servers.
        decode: URLs of decode servers.
        timeout_s: Of one request to one server, between two bytes.
    """

    def __init__(self, prefill: Iterable[str], decode: Iterable[str], timeout_s: float) -> None:
        self._prefill, self._decode = Servers(prefill), Servers(decode)
        timeout = httpx.Timeout(timeout_s, connect=_CONNECT_TIMEOUT_S)
        # Servers close connections that idle for longer; one that dies under a request looks alike.
        limits = httpx.Limits(max_connections=None, keepalive_expiry=_KEEP_ALIVE_S)
        self._client = httpx.AsyncClient(timeout=timeout, limits=limits)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def generate(self, request: Request) -> Response:
        """Answer a completion or a chat."""
        raw = await request.body()
        answering = asyncio.create_task(self._generate(request, raw))
        # The body is read: what else comes is that the client left.
        leaving = asyncio.create_task(request.receive())
        await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        if not answering.done():
            answering.cancel()
            await asyncio.wait((answering,))
            if answering.cancelled():
                return Response(status_code=_CLIENT_GONE)
        return answering.result()

    async def _generate(self, request: Request, raw: bytes) -> Response:
        headers = _forwarded_headers(request)
        body = _read_object(raw)
        if body is None or not can_split(body):
            return await self._answer(request, raw, headers)
        for url in self._prefill.in_order():
            try:
                reply = await self._ask_prefill(url, request.url.path, body, headers)
            except httpx.HTTPError as error:
                logger.warning("Prefill server %s fails: %r.", url, error)
                continue
            if reply.status_code < 400:
                params = (_read_object(reply.content) or {}).get("kv_transfer_params")
                if isinstance(params, dict) and params.get("do_remote_prefill"):
                    return await self._decode_held(request, raw, {**body, _PARAMS: params}, url)
                break
            if reply.status_code < 500:
                return Response(reply.content, reply.status_code, _answer_headers(reply))
            logger.warning("Prefill server %s answers %d.", url, reply.status_code)
        return await self._answer(request, raw, headers)

    async def _decode_held(
        self, request: Request, raw: bytes, body: dict[str, Any], holder: str
    ) -> Response:
        """Have a prompt decoded that a prefill server holds; it shall not hold it in vain."""
        headers = _forwarded_headers(request)
        is_taken = False
        try:
            answer = await self._answer(request, json.dumps(body).encode(), headers)
            is_taken = answer.status_code < 400
        finally:
            if not is_taken:
                await asyncio.shield(self._withdraw(holder, body[_PARAMS], headers))
        if isinstance(answer, StreamingResponse) or not _blames_params(answer):
            return answer
        logger.warning("The decode server does not take the prefix: it computes it.")
        return await self._answer(request, raw, headers)

    async def _withdraw(self, url: str, params: dict[str, Any], headers: dict[str, str]) -> None:
        ids = {"request_ids": [params.get("remote_request_id")]}
        try:
            reply = await self._client.post(
                url + "/abort_requests", json=ids, headers=headers, timeout=_WITHDRAW_TIMEOUT_S
            )
            reply.raise_for_status()
        except httpx.HTTPError as error:
            logger.warning("Prefill server %s holds a prompt for nobody: %r.", url, error)

    async def _ask_prefill(
        self, url: str, path: str, body: dict[str, Any], headers: dict[str, str]
    ) -> httpx.Response:
        self._prefill.begin(url)
        try:
            try:
                return await self._client.post(url + path, json=prefill_body(body), headers=headers)
            except _DROPPED:
                return await self._client.post(url + path, json=prefill_body(body), headers=headers)
        finally:
            self._prefill.end(url)

    async def pass_on(self, request: Request) -> Response:
        """Hand anything else to a decode server."""
        return await self._answer(request, await request.body(), _forwarded_headers(request))

    async def _answer(self, request: Request, body: bytes, headers: dict[str, str]) -> Response:
        """Return a decode server's answer; another one is asked as long as none has begun."""
        # Twice each: a connection from before may have died since.
        for url in [url for url in self._decode.in_order() for _ in range(2)]:
            target = httpx.URL(url + request.url.path, query=request.url.query.encode())
            outgoing = self._client.build_request(
                request.method, target, content=body, headers=headers
            )
            self._decode.begin(url)
            try:
                reply = await self._client.send(outgoing, stream=True)
                if not reply.headers.get("content-type", "").startswith("text/event-stream"):
                    await reply.aread()
            except httpx.HTTPError as error:
                self._decode.end(url)
                logger.warning("Decode server %s fails: %r.", url, error)
                continue
            except BaseException:
                self._decode.end(url)
                raise
            if reply.is_closed:
                self._decode.end(url)
                return Response(reply.content, reply.status_code, _answer_headers(reply))
            stream = self._relay(url, reply)
            return StreamingResponse(stream, reply.status_code, _answer_headers(reply))
        error = {"message": "No decode server answers.", "type": "ServiceUnavailableError"}
        return JSONResponse({"error": error}, 503)

    async def _relay(self, url: str, reply: httpx.Response) -> AsyncIterator[bytes]:
        """Yield a stream's bytes; it breaks off where the decode server does."""
        try:
            async for chunk in reply.aiter_raw():
                yield chunk
        except httpx.HTTPError as error:
            logger.warning("A stream ends early: %r.", error)
            message = {"message": "The decode server went away.", "type": "InternalServerError"}
            yield b"data: " + json.dumps({"error": message}).encode() + b"\n\n"
        finally:
            self._decode.end(url)
            # A client that leaves ends the request at its server.
            await asyncio.shield(reply.aclose())

    async def health(self, request: Request) -> Response:
        """200 as long as a decode server is well: it can do everything."""
        for url in self._decode.in_order():
            try:
                if (await self._client.get(url + "/health")).status_code == 200:
                    return Response(status_code=200)
            except httpx.HTTPError as error:
                logger.debug("Decode server %s: %r.", url, error)
        return Response(status_code=503)


def _blames_params(answer: Response) -> bool:
    if answer.status_code != 400:
        return False
    error = (_read_object(bytes(answer.body)) or {}).get("error")
    return isinstance(error, dict) and error.get("param") == "kv_transfer_params"


def _read_object(raw: bytes) -> dict[str, Any] | None:
    try:
        body = json.loads(raw)
    except ValueError:
        return None  # the decode server says what is wrong
    return body if isinstance(body, dict) else None


def _forwarded_headers(request: Request) -> dict[str, str]:
    # Clients without a key send "Bearer " with nothing behind it; httpx refuses blanks at the ends.
    headers = request.headers.items()
    return {k: v.strip() for k, v in headers if k.lower() not in _HOP_HEADERS}


def _answer_headers(reply: httpx.Response) -> dict[str, str]:
    dropped = _HOP_HEADERS | {"content-encoding", "date", "server"}
    return {k: v for k, v in reply.headers.items() if k.lower() not in dropped}


def make_app(prefill: Iterable[str], decode: Iterable[str], timeout_s: float = 600.0) -> Starlette:
    """Build the application.

    Args:
        prefill: URLs of prefill servers.
        decode: URLs of decode servers.
        timeout_s: Of one request to one server, between two bytes.
    """
    proxy = Proxy(prefill, decode, timeout_s)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await proxy.close()

    routes = [Route(path, proxy.generate, methods=["POST"]) for path in GENERATING]
    routes.append(Route("/health", proxy.health))
    methods = ["GET", "POST", "DELETE"]
    routes.append(Route("/{path:path}", proxy.pass_on, methods=methods))
    return Starlette(routes=routes, lifespan=lifespan)


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description="Proxy for prefill apart from decode.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--prefill", nargs="+", required=True, metavar="URL")
    parser.add_argument("--decode", nargs="+", required=True, metavar="URL")
    parser.add_argument("--timeout", type=float, default=600.0, help="Seconds between two bytes.")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    app = make_app(args.prefill, args.decode, args.timeout)
    uvicorn.run(app, host=args.host, port=args.port, log_level="warning")


if __name__ == "__main__":
    main()
