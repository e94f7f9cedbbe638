"""The example's proxy, in front of servers that are played."""

import asyncio
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import h11
import httpx
import pytest
from starlette.requests import Request

_PATH = Path(__file__).parents[2] / "examples" / "disaggregated" / "proxy.py"
HELD = {"do_remote_prefill": True, "remote_request_id": "lease-1"}
Handler = Callable[[httpx.Request], httpx.Response]


@pytest.fixture(scope="module")
def proxy() -> ModuleType:
    spec = importlib.util.spec_from_file_location("disaggregated_proxy", _PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Played:
    """Servers by host; notes what each was asked."""

    def __init__(self, **handlers: Handler) -> None:
        self._handlers = handlers
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.paths: list[str] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content) if request.content else {}
        self.asked.append((request.url.host, body))
        self.paths.append(request.url.path)
        return self._handlers[request.url.host](request)

    @property
    def hosts(self) -> list[str]:
        return [host for host, _ in self.asked]


def prefills(request: httpx.Request) -> httpx.Response:
    return httpx.Response(200, json={"choices": [], "kv_transfer_params": HELD})


def answers(request: httpx.Request) -> httpx.Response:
    return httpx.Response(200, json={"choices": [{"text": "yes"}]})


def refuses(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("refused")


def fails(request: httpx.Request) -> httpx.Response:
    return httpx.Response(500, json={"error": {"message": "broken"}})


async def ask(
    proxy: ModuleType, played: Handler, body: Any, path: str = "/v1/completions"
) -> httpx.Response:
    """Ask a proxy in front of p1, p2 and d1, d2."""
    app = proxy.make_app(["http://p1", "http://p2"], ["http://d1", "http://d2"])
    inner = app.routes[0].endpoint.__self__
    await inner.close()
    inner._client = httpx.AsyncClient(transport=httpx.MockTransport(played))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://proxy") as client:
        reply = await client.post(path, content=body if isinstance(body, str) else json.dumps(body))
    await inner.close()
    return reply


BODY = {"prompt": "Hello", "max_tokens": 9, "n": 2, "stream_options": {}, "temperature": 1}


async def test_a_prompt_goes_to_one_server_and_its_answer_comes_from_another(
    proxy: ModuleType,
) -> None:
    played = Played(p1=prefills, d1=answers)
    reply = await ask(proxy, played, BODY)
    assert reply.json() == {"choices": [{"text": "yes"}]}
    (first, asked), (second, answered) = played.asked
    assert (first, second) == ("p1", "d1")
    assert asked == {
        "prompt": "Hello",
        "temperature": 1,
        "max_tokens": 1,
        "stream": False,
        "kv_transfer_params": {"do_remote_decode": True},
    }
    assert answered == {**BODY, "kv_transfer_params": HELD}


async def test_chats_have_their_own_limit(proxy: ModuleType) -> None:
    played = Played(p1=prefills, d1=answers)
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 7, "tools": []}
    await ask(proxy, played, body, "/v1/chat/completions")
    asked = played.asked[0][1]
    assert asked["max_completion_tokens"] == 1
    assert "max_tokens" not in asked
    assert asked["tools"] == []


@pytest.mark.parametrize("bad", [refuses, fails])
async def test_another_prefill_server_is_asked(proxy: ModuleType, bad: Handler) -> None:
    played = Played(p1=bad, p2=prefills, d1=answers)
    assert (await ask(proxy, played, BODY)).status_code == 200
    assert played.hosts[-2:] == ["p2", "d1"]
    assert played.asked[-1][1]["kv_transfer_params"] == HELD


async def test_without_prefill_servers_the_other_computes(proxy: ModuleType) -> None:
    played = Played(p1=refuses, p2=refuses, d1=answers)
    assert (await ask(proxy, played, BODY)).status_code == 200
    assert "kv_transfer_params" not in played.asked[-1][1]


async def test_another_decode_server_is_asked_with_the_same_prefix(proxy: ModuleType) -> None:
    played = Played(p1=prefills, d1=refuses, d2=answers)
    assert (await ask(proxy, played, BODY)).status_code == 200
    assert played.hosts[-1] == "d2"
    assert played.asked[-1][1]["kv_transfer_params"] == HELD


async def test_wrong_requests_are_answered_by_the_first_server(proxy: ModuleType) -> None:
    def says_no(request: httpx.Request) -> httpx.Response:
        return httpx.Response(400, json={"error": {"param": "temperature"}})

    played = Played(p1=says_no)
    reply = await ask(proxy, played, BODY)
    assert (reply.status_code, played.hosts) == (400, ["p1"])


async def test_what_no_decode_server_takes_is_let_go(proxy: ModuleType) -> None:
    def says_no(request: httpx.Request) -> httpx.Response:
        return httpx.Response(400, json={"error": {"param": "seed"}})

    for decode, status in ((says_no, 400), (refuses, 503)):
        played = Played(p1=prefills, d1=decode, d2=decode)
        assert (await ask(proxy, played, BODY)).status_code == status
        assert played.asked[-1] == ("p1", {"request_ids": ["lease-1"]})
        assert played.paths[-1] == "/abort_requests"


async def test_what_is_taken_is_the_decode_servers_to_give_back(proxy: ModuleType) -> None:
    played = Played(p1=prefills, d1=answers)
    await ask(proxy, played, BODY)
    assert played.paths == ["/v1/completions"] * 2


async def test_a_prefill_server_that_cannot_let_go_harms_nobody(proxy: ModuleType) -> None:
    def holds_on(request: httpx.Request) -> httpx.Response:
        return prefills(request) if request.url.path == "/v1/completions" else fails(request)

    played = Played(p1=holds_on, d1=fails)
    assert (await ask(proxy, played, BODY)).status_code == 500
    assert played.paths[-1] == "/abort_requests"


async def test_a_client_that_leaves_ends_its_request(proxy: ModuleType) -> None:
    has_begun, was_left = asyncio.Event(), asyncio.Event()
    played = Played(p1=prefills)

    async def route(request: httpx.Request) -> httpx.Response:
        if request.url.host == "p1":
            return played(request)
        has_begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            was_left.set()
        raise AssertionError

    app = proxy.make_app(["http://p1"], ["http://d1"])
    inner = app.routes[0].endpoint.__self__
    await inner.close()
    inner._client = httpx.AsyncClient(transport=httpx.MockTransport(route))
    messages = [{"type": "http.request", "body": json.dumps(BODY).encode(), "more_body": False}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await has_begun.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    sent: list[Any] = []
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    async with asyncio.timeout(30):
        await app({**scope, "query_string": b"", "http_version": "1.1"}, receive, send)
        await was_left.wait()
    assert sent[0]["status"] == 499
    assert played.paths == ["/v1/completions", "/abort_requests"]
    await inner.close()


async def test_a_prefix_that_is_refused_is_computed(proxy: ModuleType) -> None:
    def particular(request: httpx.Request) -> httpx.Response:
        if "kv_transfer_params" in json.loads(request.content):
            return httpx.Response(400, json={"error": {"param": "kv_transfer_params"}})
        return answers(request)

    played = Played(p1=prefills, d1=particular, d2=particular)
    assert (await ask(proxy, played, BODY)).status_code == 200
    assert [host[0] for host in played.hosts] == ["p", "d", "p", "d"]
    assert played.paths[2] == "/abort_requests"
    assert "kv_transfer_params" not in played.asked[3][1]


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": ["a", "b"]},
        {"prompt": [[1], [2]]},
        {"prompt": "a", "prompt_logprobs": 1},
        {"prompt": "a", "kv_transfer_params": HELD},
    ],
)
async def test_what_cannot_be_split_goes_to_a_decode_server(proxy: ModuleType, body: Any) -> None:
    played = Played(d1=answers)
    assert (await ask(proxy, played, body)).status_code == 200
    assert played.asked == [("d1", body)]


async def test_what_is_no_json_is_for_the_server_to_refuse(proxy: ModuleType) -> None:
    hosts = []

    def says_no(request: httpx.Request) -> httpx.Response:
        hosts.append(request.url.host)
        return httpx.Response(400)

    assert (await ask(proxy, says_no, "no json")).status_code == 400
    assert hosts == ["d1"]


def test_a_key_of_nothing_is_forwarded_as_a_header_may_be(proxy: ModuleType) -> None:
    raw = [(b"authorization", b"Bearer "), (b"x-name", b" a b "), (b"connection", b"close")]
    headers = proxy._forwarded_headers(Request({"type": "http", "headers": raw}))
    assert headers == {"authorization": "Bearer", "x-name": "a b"}
    # The HTTP client's own rule.
    h11.Request(method="POST", target="/", headers=[("host", "d1"), *headers.items()])
    with pytest.raises(h11.LocalProtocolError):
        h11.Request(method="POST", target="/", headers=[("host", "d1"), raw[0]])
