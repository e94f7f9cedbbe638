"""Clients that leave."""

import asyncio
from collections.abc import AsyncIterator, MutableMapping
from typing import Any

import pytest

from vllm.entrypoints.openai.disconnect import (
    ClientGoneError,
    EventStreamResponse,
    until_disconnect,
)

Message = MutableMapping[str, Any]


async def _leave() -> Message:
    return {"type": "http.disconnect"}


async def _stay() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


async def test_work_ends_when_the_client_leaves() -> None:
    cancelled = False

    async def work() -> None:
        nonlocal cancelled
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled = True
            raise

    with pytest.raises(ClientGoneError):
        await until_disconnect(_leave, work())
    assert cancelled


async def test_results_and_errors_pass() -> None:
    async def fail() -> None:
        raise ValueError("x")

    assert await until_disconnect(_stay, asyncio.sleep(0, "done")) == "done"
    with pytest.raises(ValueError, match="x"):
        await until_disconnect(_stay, fail())


async def _run(receive: Any, events: AsyncIterator[bytes]) -> tuple[list[Message], int]:
    sent: list[Message] = []
    num_closed = 0

    async def send(message: Message) -> None:
        sent.append(message)

    async def close() -> None:
        nonlocal num_closed
        num_closed += 1

    response = EventStreamResponse(events, close, "r", {"X-A": "b"})
    await response({"type": "http"}, receive, send)
    return sent, num_closed


async def test_a_whole_stream() -> None:
    async def events() -> AsyncIterator[bytes]:
        yield b"one"
        yield b"two"

    sent, num_closed = await _run(_stay, events())
    assert sent[0]["status"] == 200
    assert dict(sent[0]["headers"])[b"x-a"] == b"b"
    assert [message.get("body") for message in sent[1:]] == [b"one", b"two", b""]
    assert sent[-1].get("more_body", False) is False
    assert num_closed == 1


async def test_a_left_stream_is_closed() -> None:
    left = asyncio.Event()

    async def receive() -> Message:
        await left.wait()
        return {"type": "http.disconnect"}

    async def events() -> AsyncIterator[bytes]:
        yield b"one"
        left.set()
        await asyncio.Event().wait()

    sent, num_closed = await _run(receive, events())
    assert [message.get("body") for message in sent[1:]] == [b"one"]
    assert num_closed == 1
