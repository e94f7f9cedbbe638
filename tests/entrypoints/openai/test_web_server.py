"""uvicorn as we set it up, with an application of a few lines."""

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from vllm.entrypoints.openai.server_args import ServerArgs
from vllm.entrypoints.openai.web_server import SignalFreeServer, make_uvicorn_config

_HEAD = "POST /echo HTTP/{version}\r\nHost: a\r\nContent-Length: 5\r\n\r\n"


async def _echo_in_parts(_: Any, receive: Any, send: Any) -> None:
    body = b""
    more_body = True
    while more_body:
        message = await receive()
        body += message["body"]
        more_body = message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for part in (body, b" once", b" more"):
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """A server's port."""
    config = make_uvicorn_config(_echo_in_parts, ServerArgs(), close_timeout_s=1)
    server = SignalFreeServer(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = asyncio.create_task(server.serve([listener]))
        yield listener.getsockname()[1]
        server.should_exit = True
        await serving


async def _ask(port: int, *pieces: str) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for piece in pieces:
        writer.write(piece.encode())
        await asyncio.sleep(0.02)  # else they arrive as one
    answer = await asyncio.wait_for(reader.read(), 30)
    writer.close()
    return answer


async def test_http_1_0_gets_no_chunks_but_an_end(port: int) -> None:
    head, _, body = (await _ask(port, _HEAD.format(version="1.0"), "hello")).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert b"transfer-encoding" not in head.lower()
    assert body == b"hello once more"


async def test_a_request_line_may_come_in_pieces(port: int) -> None:
    request = _HEAD.format(version="1.0") + "hello"
    assert (await _ask(port, request[:3], request[3:20], request[20:])).endswith(b"hello once more")
    request = _HEAD.format(version="1.1").replace("Host", "Connection: close\r\nHost") + "hello"
    answer = await _ask(port, request[:3], request[3:20], request[20:])
    assert b"transfer-encoding: chunked" in answer
    assert b"5\r\nhello\r\n" in answer


async def test_what_is_no_request_is_refused(port: int) -> None:
    assert (await _ask(port, "\x16\x03\x01 hello\n")).startswith(b"HTTP/1.1 400")
    assert (await _ask(port, "G" * 70_000)).startswith(b"HTTP/1.1 400")
