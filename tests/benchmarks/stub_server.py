"""An OpenAI-compatible server that says what it is told to, in any pieces."""

import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

Answer = Callable[[dict[str, Any]], list[str]]


def events(*objects: Any, done: bool = True) -> list[str]:
    """Texts of SSE events."""
    texts = [f"data: {json.dumps(o)}\n\n" for o in objects]
    return texts + (["data: [DONE]\n\n"] if done else [])


def completion(text: str, finish: str | None = None) -> dict[str, Any]:
    """A chunk of a completion."""
    return {"id": "cmpl-1", "choices": [{"index": 0, "text": text, "finish_reason": finish}]}


def usage(num_prompt: int, num_output: int, **details: Any) -> dict[str, Any]:
    """The usage chunk."""
    counts: dict[str, Any] = {"prompt_tokens": num_prompt, "completion_tokens": num_output}
    if details:
        counts["prompt_tokens_details"] = details
    return {"choices": [], "usage": counts}


class Stub:
    """A server under test.

    Attributes:
        bodies: What it was sent.
        headers: And with which headers.
        answer: Makes the events of a body; may raise ``web.HTTPException``.
        metrics: The text of /metrics by how many bodies came; None: there is no such page.
        piece: Bytes of a write; 0: an event each.
    """

    def __init__(self, answer: Answer, piece: int = 0) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[Mapping[str, str]] = []
        self.answer = answer
        self.metrics: Callable[[int], str] | None = None
        self.piece = piece
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one request."""
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(request.headers.copy())
        texts = self.answer(body)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        whole = "".join(texts).encode()
        pieces = (
            [whole[i : i + self.piece] for i in range(0, len(whole), self.piece)]
            if self.piece
            else [text.encode() for text in texts]
        )
        for piece in pieces:
            await response.write(piece)
        return response

    async def show_metrics(self, _request: web.Request) -> web.Response:
        """Answer /metrics."""
        if self.metrics is None:
            raise web.HTTPNotFound
        return web.Response(text=self.metrics(len(self.bodies)))

    async def models(self, request: web.Request) -> web.Response:
        """List the model."""
        return web.json_response({"data": [{"id": "stub", "root": "deepseek-v4"}]})


@asynccontextmanager
async def serving(stub: Stub) -> AsyncIterator[Stub]:
    """Serve a stub."""
    app = web.Application()
    app.router.add_get("/v1/models", stub.models)
    app.router.add_get("/metrics", stub.show_metrics)
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses"):
        app.router.add_post(path, stub.handle)
    async with TestServer(app) as server:
        stub.url = str(server.make_url("/")).rstrip("/")
        yield stub
