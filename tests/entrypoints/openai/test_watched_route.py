"""Work whose client has left is dropped wherever it stands; events, no clocks."""

import asyncio
import json
import threading
from collections.abc import Callable, MutableMapping
from dataclasses import replace
from typing import Any

import pytest

from tests.entrypoints.openai.conftest import Served
from vllm.tokenizers import ChatOptions, ChatPrompt

BIG = 300_000
HI = {"role": "user", "content": "hi"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [HI]},
    "/v1/messages": {"messages": [HI], "max_tokens": 3},
    "/v1/messages/count_tokens": {"messages": [HI]},
    "/v1/responses": {"input": "hi", "store": False},
    "/v1/responses/input_tokens": {"input": "hi"},
    "/tokenize": {"messages": [HI]},
    "/v1/cache/prefixes": {"messages": [HI]},
}


class HeldEncoder:
    """An encoder that waits until it is let go on."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()

    def encode_chat(self, messages: Any, options: ChatOptions) -> ChatPrompt:
        self.begun.set()
        assert self.go_on.wait(30)
        return ChatPrompt("hi", [5], in_reasoning=False)


def scope_of(route: str) -> dict[str, Any]:
    """A connection's, as a server tells it."""
    headers = [(b"content-type", b"application/json"), (b"host", b"t")]
    return {
        **{"type": "http", "method": "POST", "path": route, "raw_path": route.encode()},
        **{"headers": headers, "query_string": b"", "http_version": "1.1", "scheme": "http"},
        **{"client": ("c", 1), "server": ("s", 80), "root_path": ""},
    }


@pytest.mark.parametrize("route", list(BODIES))
async def test_a_client_that_leaves_while_its_chat_is_read(
    serve: Callable[..., Served], route: str
) -> None:
    served = serve(served_model={"max_model_len": 2048})
    encoder = HeldEncoder()
    served.app.state.context = replace(served.context, chat_encoder=encoder)
    body = json.dumps(BODIES[route]).encode()
    incoming: asyncio.Queue[MutableMapping[str, Any]] = asyncio.Queue()
    incoming.put_nowait({"type": "http.request", "body": body, "more_body": False})
    sent: list[MutableMapping[str, Any]] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    handling = asyncio.create_task(served.app(scope_of(route), incoming.get, send))
    assert await asyncio.to_thread(encoder.begun.wait, 30)
    assert served.state.num_open_requests == 1
    incoming.put_nowait({"type": "http.disconnect"})
    await handling  # and not first what the thread does
    assert served.state.num_open_requests == 0
    assert served.engine.jobs == []
    assert sent[0]["status"] == 499
    encoder.go_on.set()
    metrics = (await served.client.get("/metrics")).text
    assert "vllm:dropped_requests_total 1.0" in metrics


@pytest.mark.parametrize("route", list(BODIES))
async def test_a_client_that_leaves_in_the_middle_of_its_body(served: Served, route: str) -> None:
    incoming: asyncio.Queue[MutableMapping[str, Any]] = asyncio.Queue()
    incoming.put_nowait({"type": "http.request", "body": b'{"mess', "more_body": True})
    incoming.put_nowait({"type": "http.disconnect"})
    sent: list[MutableMapping[str, Any]] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    await served.app(scope_of(route), incoming.get, send)
    assert sent[0]["status"] == 499
    assert served.state.num_open_requests == 0


LONG = "word " * 60_000
TOO_LONG: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": LONG}]},
    "/v1/chat/completions?parts": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": LONG}]}]
    },
    "/v1/chat/completions?assistant": {
        "messages": [HI, {"role": "assistant", "content": LONG}, HI]
    },
    "/v1/chat/completions?many": {"messages": [{"role": "user", "content": "word " * 999}] * 99},
    "/v1/completions": {"prompt": LONG},
    "/v1/completions?several": {"prompt": ["a", LONG]},
    "/v1/completions?ids": {"prompt": [5] * BIG},
    "/v1/messages": {"messages": [{"role": "user", "content": LONG}], "max_tokens": 3},
    "/v1/messages?system": {"system": LONG, "messages": [HI], "max_tokens": 3},
    "/v1/responses": {"input": LONG},
    "/v1/responses?instructions": {"input": "hi", "instructions": LONG},
    "/v1/cache/prefixes": {"prompt": LONG},
}


@pytest.mark.parametrize("route", list(TOO_LONG))
async def test_what_cannot_fit_is_refused_unread(
    served: Served, monkeypatch: pytest.MonkeyPatch, route: str
) -> None:
    read: list[int] = []
    encode = served.context.tokenizer.encode_batch

    def watched(texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        read.extend(map(len, texts))
        return encode(texts, add_special_tokens)

    monkeypatch.setattr(served.context.tokenizer, "encode_batch", watched)
    answer = await served.client.post(route.partition("?")[0], json=TOO_LONG[route])
    assert answer.status_code == 400
    assert "prompt is too long: " in answer.text or "maximum context length is" in answer.text
    assert max(read, default=0) < 1000


async def test_what_is_cut_or_only_counted_is_read(serve: Callable[..., Served]) -> None:
    served = serve(served_model={"max_model_len": 256})
    cut = {"prompt": LONG, "truncate_prompt_tokens": -1, "max_tokens": 2}
    assert (await served.client.post("/v1/completions", json=cut)).status_code == 200
    for url in ("/tokenize", "/v1/messages/count_tokens"):
        messages = [{"role": "user", "content": LONG}]
        counted = await served.client.post(url, json={"messages": messages})
        assert counted.status_code == 200
        assert max(v for v in counted.json().values() if type(v) is int) > 50_000


@pytest.mark.parametrize(
    ("end", "status"),
    [("}", 200), ("", 400), (', "temperature": NaN}', 400), (', "x": "\\ud800"}', 200)],
)
async def test_large_bodies_are_read_as_small_ones(served: Served, end: str, status: int) -> None:
    for pad in (10, BIG):
        body = f'{{"prompt": "hi", "max_tokens": 1, "pad": "{"x" * pad}"{end}'
        answer = await served.client.post(
            "/v1/completions", content=body, headers={"content-type": "application/json"}
        )
        assert answer.status_code == status, answer.text
