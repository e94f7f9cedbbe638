"""Comments on silent streams."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from vllm.entrypoints.openai.keep_alive import KeepAliveMiddleware
from vllm.entrypoints.openai.operations_args import OperationsArgs

COMMENT = b": keep-alive\n\n"
PING = b'event: ping\ndata: {"type": "ping"}\n\n'
EVENT = b"data: 1\n\n"


async def _receive() -> Message:
    raise AssertionError("nobody asks")


async def _run(
    content_type: bytes, wait: Callable[[list[bytes]], Any], interval_s: float = 0.001
) -> list[bytes]:
    """Bodies of a response that sends an event, waits as told, sends another and ends."""
    bodies: list[bytes] = []

    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        headers = [(b"content-type", content_type)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for event in (EVENT, EVENT):
            await send({"type": "http.response.body", "body": event, "more_body": True})
            await wait(bodies)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        await asyncio.sleep(0.01)  # nothing may follow the end

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            bodies.append(message["body"])

    await KeepAliveMiddleware(app, interval_s=interval_s)({"type": "http"}, _receive, send)
    return bodies


async def _until_comments(bodies: list[bytes]) -> None:
    seen = bodies.count(COMMENT)
    while bodies.count(COMMENT) < seen + 2:
        await asyncio.sleep(0)


async def test_silence_is_filled_between_whole_events() -> None:
    bodies = await asyncio.wait_for(_run(b"text/event-stream; charset=utf-8", _until_comments), 30)
    assert bodies[0] == EVENT
    assert bodies[-1] == b""
    assert [body for body in bodies if body != COMMENT] == [EVENT, EVENT, b""]
    assert bodies.count(COMMENT) >= 4


@pytest.mark.parametrize("content_type", [b"application/json", b"text/event-stream"])
async def test_no_comment_elsewhere_or_before_its_time(content_type: bytes) -> None:
    async def wait(_bodies: list[bytes]) -> None:
        await asyncio.sleep(0.02 if content_type == b"application/json" else 0)

    interval_s = 0.001 if content_type == b"application/json" else 60.0
    assert await _run(content_type, wait, interval_s) == [EVENT, EVENT, b""]


async def test_an_error_of_the_application_passes_and_ends_the_watch() -> None:
    async def fail(_bodies: list[bytes]) -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await _run(b"text/event-stream", fail)
    others = asyncio.all_tasks() - {asyncio.current_task()}
    assert not others


@pytest.mark.parametrize(
    ("path", "body", "filler"),
    [
        ("/v1/completions", {"prompt": "x", "max_tokens": 2}, COMMENT),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, COMMENT),
        ("/v1/responses", {"input": "x"}, COMMENT),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}, PING),
    ],
)
async def test_a_long_prompt_is_no_silence(
    serve: Any, path: str, body: dict[str, Any], filler: bytes
) -> None:
    """The engine's first token comes only once something has gone out."""
    served = serve(
        operations=OperationsArgs(keep_alive_s=0.001), served_model={"max_model_len": 2048}
    )
    served.engine.hold.clear()
    content = json.dumps({**body, "stream": True}).encode()
    requests = [{"type": "http.request", "body": content}]
    messages: list[Message] = []

    async def receive() -> Message:
        if requests:
            return requests.pop()
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        messages.append(message)
        if message.get("body") == filler:
            served.engine.hold.set()

    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode()}
    scope |= {"query_string": b"", "headers": [(b"content-type", b"application/json")]}
    await asyncio.wait_for(served.app(scope, receive, send), 30)
    assert messages[0]["status"] == 200
    bodies = [message["body"] for message in messages[1:]]
    assert filler in bodies[:2]
    events = [one for one in bodies if one not in (COMMENT, PING, b"")]
    ends = {"/v1/messages": b"message_stop", "/v1/responses": b"response.completed"}
    assert ends.get(path, b"data: [DONE]\n\n") in b"".join(events[-2:])
    assert len(events) >= 2
