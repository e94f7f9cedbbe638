"""What the client makes of streams of three APIs, and of everything that goes wrong."""

import json
import time
from typing import Any

import pytest
from aiohttp import web

from tests.benchmarks.stub_server import Stub, completion, events, serving, usage
from vllm.benchmarks.client.dialects import DIALECTS
from vllm.benchmarks.client.observation import Observation
from vllm.benchmarks.client.target import Target, find_model, open_session, send
from vllm.benchmarks.datasets.prompt import BenchRequest
from vllm.exceptions import ConfigError

REQUEST = BenchRequest("Hello there", 3, 4)


async def _ask(stub: Stub, backend: str = "openai") -> Observation:
    async with serving(stub), open_session(0) as session:
        target = Target(stub.url, DIALECTS[backend], "stub", sampling={"ignore_eos": True})
        return await send(session, target, REQUEST, time.perf_counter(), "bench-0")


@pytest.mark.parametrize("piece", [0, 1, 5])
async def test_completions(piece: int) -> None:
    answer = events(
        completion("a"),
        completion(""),
        completion("bc", "length"),
        usage(3, 4, cached_tokens=2, miss_tokens={"first_seen": 1}),
    )
    stub = Stub(lambda _: answer, piece)
    seen = await _ask(stub)
    assert seen.error == ""
    assert (seen.text, len(seen.chunk_s)) == ("abc", 3)
    # Several tokens in a chunk: the server's count wins.
    assert (seen.num_output_tokens, seen.usage.cached_tokens) == (4, 2)
    assert seen.usage.miss_tokens == {"first_seen": 1}
    body = stub.bodies[0]
    assert (body["max_tokens"], body["stream_options"]) == (4, {"include_usage": True})
    assert body["ignore_eos"] is True
    assert stub.headers[0]["X-Request-Id"] == "bench-0"


async def test_what_a_server_does_not_report_stays_unknown() -> None:
    answer = events(completion("a"), completion("b", "stop"))
    seen = await _ask(Stub(lambda _: answer))
    assert (seen.num_output_tokens, seen.num_prompt_tokens) == (2, 3)
    assert seen.usage.cached_tokens is None
    assert seen.usage.miss_tokens is None


def _delta(finish: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"id": "chat-1", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


@pytest.mark.parametrize(
    ("deltas", "num_chunks"),
    [
        # The role comes first, alone; the end comes last, alone.
        ([_delta(role="assistant", content=""), _delta(content="a"), _delta("stop")], 1),
        # The role comes with the first token, the end with the last.
        ([_delta(role="assistant", content="a"), _delta("stop", content="b")], 2),
        # Thoughts and calls are tokens too.
        ([_delta(role="assistant"), _delta(reasoning="x"), _delta("stop", tool_calls=[{}])], 2),
    ],
)
async def test_chat_counts_tokens_and_not_the_role(
    deltas: list[dict[str, Any]], num_chunks: int
) -> None:
    stub = Stub(lambda _: events(*deltas))
    seen = await _ask(stub, "openai-chat")
    assert (seen.error, len(seen.chunk_s)) == ("", num_chunks)
    assert stub.bodies[0]["messages"] == [{"role": "user", "content": "Hello there"}]
    assert stub.bodies[0]["max_completion_tokens"] == 4


@pytest.mark.parametrize("end", ["response.completed", "response.incomplete"])
async def test_responses(end: str) -> None:
    counts = {
        "input_tokens": 9,
        "output_tokens": 2,
        "input_tokens_details": {"cached_tokens": 8},
    }
    answer = [
        f"event: {o['type']}\ndata: {json.dumps(o)}\n\n"
        for o in (
            {"type": "response.created", "response": {"id": "resp_1", "usage": None}},
            {"type": "response.output_text.delta", "delta": "Hi"},
            {"type": "response.output_text.delta", "delta": "!"},
            {"type": "response.output_text.done", "text": "Hi!"},
            {"type": end, "response": {"id": "resp_1", "usage": counts}},
        )
    ]
    stub = Stub(lambda _: answer)
    seen = await _ask(stub, "openai-responses")
    assert (seen.error, seen.text, seen.request_id) == ("", "Hi!", "resp_1")
    assert (seen.num_prompt_tokens, seen.num_output_tokens) == (9, 2)
    assert seen.usage.cached_tokens == 8
    assert (stub.bodies[0]["input"], stub.bodies[0]["max_output_tokens"]) == ("Hello there", 4)


def _refuse(_: dict[str, Any]) -> list[str]:
    raise web.HTTPBadRequest(text='{"error": {"message": "too long"}}')


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (_refuse, "HTTP 400: too long"),
        (lambda _: events(completion("a"), {"error": {"message": "died"}}), "died"),
        (lambda _: events(completion("a"), done=False), "ended before"),
        (lambda _: events(), "no token"),
        (lambda _: ["data: {oops\n\n"], "no JSON"),
    ],
)
async def test_failures_say_why_and_count_no_tokens(answer: Any, message: str) -> None:
    seen = await _ask(Stub(answer))
    assert message in seen.error
    assert (seen.success, seen.num_output_tokens) == (False, 0)


async def test_nobody_listens() -> None:
    async with open_session(0) as session:
        target = Target("http://127.0.0.1:9", DIALECTS["openai"], "stub")
        seen = await send(session, target, REQUEST, time.perf_counter(), "bench-0")
        assert not seen.success
        with pytest.raises(ConfigError, match="give --model"):
            await find_model(session, target)


async def test_the_first_model_is_found() -> None:
    async with serving(Stub(lambda _: [])) as stub, open_session(0) as session:
        target = Target(stub.url, DIALECTS["openai"])
        assert await find_model(session, target) == ("stub", "deepseek-v4")
