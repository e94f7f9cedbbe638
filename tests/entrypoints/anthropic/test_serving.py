"""``/v1/messages`` over a fake engine."""

import json
import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from anthropic.types import ErrorResponse, Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from tests.entrypoints.openai.conftest import Served
from vllm.exceptions import QueueFullError

URL = "/v1/messages"
SDK_EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
LOOK = {
    "name": "look",
    "description": "Looks the weather up.",
    "input_schema": {"type": "object", "properties": {"town": {"type": "string"}}},
}
CALL = (
    '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="look">\n'
    '<｜DSML｜parameter name="town" string="true">Rome</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
)
BODY: dict[str, Any] = {"max_tokens": 1500, "messages": [{"role": "user", "content": "hi"}]}
ADAPTIVE = {"type": "adaptive"}


@pytest.fixture
def served(serve: Callable[..., Served]) -> Served:
    """An application with room for tools."""
    served = serve(served_model={"max_model_len": 2048})
    say(served, "Hello.")
    return served


def say(served: Served, text: str) -> None:
    """Let the model say something from now on."""
    served.engine.answer = served.context.tokenizer.encode(text, add_special_tokens=False)


def prompt_of(served: Served) -> str:
    """The text of the last prompt that the engine got."""
    return served.context.tokenizer.decode(served.engine.jobs[-1][0])


async def create(served: Served, **body: Any) -> Message:
    """A message as the SDK reads it."""
    answer = await served.client.post(URL, json={**BODY, **body})
    assert answer.status_code == 200, answer.text
    assert answer.headers["request-id"]
    return Message.model_validate_json(answer.content)


def events_in(answer: httpx.Response) -> list[Any]:
    """The events of a stream, pings left out, as the SDK reads them."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    parsed = []
    for frame in answer.text.split("\n\n")[:-1]:
        name, data = frame.split("\n")
        if name == "event: ping":
            continue
        parsed.append(SDK_EVENT.validate_json(data.removeprefix("data: ")))
        assert name == f"event: {parsed[-1].type}"
    return parsed


async def test_a_message(served: Served) -> None:
    served.engine.num_cached_tokens = 16
    message = await create(served, system="Be kind. " * 20, temperature=0.5, top_k=7)
    assert message.id.startswith("msg_")
    assert [block.to_dict(exclude_none=True) for block in message.content] == [
        {"type": "text", "text": "Hello."}
    ]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    prompt, params, *_ = served.engine.jobs[0]
    unit = served.context.config.cache_config.block_size
    usage = message.usage
    assert usage.cache_read_input_tokens == 16
    assert usage.cache_creation_input_tokens == len(prompt) // unit * unit - 16
    assert usage.input_tokens == len(prompt) % unit
    assert usage.output_tokens == len(served.engine.answer)
    assert (params.temperature, params.top_k, params.max_tokens) == (0.5, 7, 1500)
    assert prompt_of(served).endswith("Be kind. <｜User｜>hi<｜Assistant｜></think>")


async def test_a_stream_tells_what_a_message_says(served: Served) -> None:
    say(served, f"I call.</think>Let me see.{CALL}")
    body = {**BODY, "thinking": ADAPTIVE, "tools": [LOOK]}
    events = events_in(await served.client.post(URL, json={**body, "stream": True}))
    assert events[0].type == "message_start"
    assert events[0].message.content == []
    assert events[0].message.usage.output_tokens <= 1
    assert [event.type for event in events[-2:]] == ["message_delta", "message_stop"]
    whole = await create(served, thinking=ADAPTIVE, tools=[LOOK])
    assert events[-2].delta.stop_reason == whole.stop_reason == "tool_use"
    assert events[-2].usage.output_tokens == whole.usage.output_tokens
    assert events[-2].usage.output_tokens_details == whole.usage.output_tokens_details
    texts: dict[int, str] = {}
    for event in events:
        if event.type == "content_block_delta" and event.delta.type != "signature_delta":
            (told,) = (v for k, v in event.delta.to_dict().items() if k != "type")
            texts[event.index] = texts.get(event.index, "") + told
    thinking, text, call = (block.to_dict() for block in whole.content)
    assert texts[0] == thinking["thinking"] == "I call."
    assert texts[1] == text["text"] == "Let me see."
    assert json.loads(texts[2]) == call["input"] == {"town": "Rome"}


async def test_what_was_said_is_a_prefix_of_the_next_prompt(served: Served) -> None:
    say(served, f"I call.</think>Let me see.{CALL}<｜end▁of▁sentence｜>")
    for display in ("summarized", "omitted"):
        thinking = {**ADAPTIVE, "display": display}
        message = await create(served, thinking=thinking, tools=[LOOK])
        blocks = [block.to_dict(exclude_none=True) for block in message.content]
        said = [*served.engine.jobs[-1][0], *served.engine.answer]
        result = {"type": "tool_result", "tool_use_id": blocks[-1]["id"], "content": "rain"}
        messages = [
            *BODY["messages"],
            {"role": "assistant", "content": blocks},
            {"role": "user", "content": [result]},
        ]
        await create(served, thinking=thinking, tools=[LOOK], messages=messages)
        assert served.engine.jobs[-1][0][: len(said)] == said


async def test_thinking_is_off_unless_asked_for(served: Served) -> None:
    cases: list[tuple[dict[str, Any] | None, str]] = [
        (None, "</think>"),
        ({"type": "disabled"}, "</think>"),
        (ADAPTIVE, "<think>"),
        ({"type": "enabled", "budget_tokens": 1024}, "<think>"),
    ]
    for thinking, end in cases:
        await create(served, thinking=thinking)
        assert prompt_of(served).endswith("<｜Assistant｜>" + end)
        budget = (thinking or {}).get("budget_tokens")
        assert served.engine.jobs[-1][1].thinking_token_budget == budget


async def test_a_schema_reaches_the_engine(served: Served) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    await create(served, output_config={"format": {"type": "json_schema", "schema": schema}})
    asked = served.engine.jobs[-1][1].structured_outputs
    assert asked is not None
    assert asked.json == schema


async def test_a_message_may_be_begun(served: Served) -> None:
    messages = [*BODY["messages"], {"role": "assistant", "content": "The answer is"}]
    await create(served, messages=messages)
    assert prompt_of(served).endswith("<｜Assistant｜></think>The answer is")


async def test_a_message_that_is_cut(served: Served) -> None:
    message = await create(served, max_tokens=2)
    assert message.stop_reason == "max_tokens"
    assert not message.model_extra
    assert message.usage.output_tokens == 2


async def test_what_went_on_in_a_message_that_is_cut(served: Served) -> None:
    served.engine.stop_reason = "unfinished text at $.a"
    whole = await create(served, max_tokens=2)
    body = {**BODY, "max_tokens": 2, "stream": True}
    *_, end, _ = events_in(await served.client.post(URL, json=body))
    for stop in (whole, end.delta):
        assert stop.stop_reason == "max_tokens"
        assert stop.stop_explanation == "unfinished text at $.a"


async def test_stop_sequences_reach_the_engine(served: Served) -> None:
    await create(served, stop_sequences=["\n\nHuman:", "END"])
    assert served.engine.jobs[-1][1].stop == ["\n\nHuman:", "END"]


async def test_marks_are_boundaries_for_the_cache(served: Served) -> None:
    mark = {"type": "ephemeral", "ttl": "5m"}
    system = [{"type": "text", "text": "Be kind. " * 9, "cache_control": mark}]
    await create(served, system=system)
    marked = served.engine.boundaries[-1][0]
    tokenizer, prompt = served.context.tokenizer, served.engine.jobs[-1][0]
    shared = tokenizer.decode(prompt[:marked]).removesuffix("<｜User｜>")  # any user may follow
    assert shared == "<｜begin▁of▁sentence｜>" + "Be kind. " * 9


async def test_tokens_are_counted_without_an_answer(served: Served) -> None:
    body = {"messages": BODY["messages"], "system": "Be kind.", "tools": [LOOK]}
    counted = (await served.client.post(f"{URL}/count_tokens", json=body)).json()
    assert served.engine.jobs == []
    usage = (await create(served, **body)).usage
    read, made = usage.cache_read_input_tokens or 0, usage.cache_creation_input_tokens or 0
    assert counted == {"input_tokens": usage.input_tokens + read + made}


async def test_calls_are_not_parallel_where_that_is_asked_for(served: Served) -> None:
    second = CALL.replace("\n\n<｜DSML｜tool_calls>\n", "").replace("Rome", "Oslo")
    twice = CALL.replace("</｜DSML｜invoke>\n</｜DSML｜tool_calls>", "</｜DSML｜invoke>\n") + second
    say(served, twice)
    both = await create(served, tools=[LOOK], tool_choice={"type": "auto"})
    assert [block.type for block in both.content] == ["tool_use", "tool_use"]
    single = {"type": "auto", "disable_parallel_tool_use": True}
    one = await create(served, tools=[LOOK], tool_choice=single)
    assert [block.type for block in one.content] == ["tool_use"]
    none = await create(served, tools=[LOOK], tool_choice={"type": "none"})
    # The call that nobody may make is all that the model said: it is told as text.
    assert [block.type for block in none.content] == ["text"]
    assert none.stop_reason == "end_turn"
    assert "look" not in prompt_of(served)


async def test_an_engine_that_dies_ends_the_stream_with_an_error(served: Served) -> None:
    served.engine.fail_at = 2
    answer = await served.client.post(URL, json={**BODY, "stream": True})
    name, data = answer.text.strip().split("\n\n")[-1].split("\n")
    assert name == "event: error"
    assert ErrorResponse.model_validate_json(data.removeprefix("data: ")).error.type == "api_error"
    assert (await served.client.post(URL, json=BODY)).status_code == 500


async def test_a_full_queue_is_an_overload(served: Served) -> None:
    served.engine.refuse = QueueFullError("full", 7)
    for body in (BODY, {**BODY, "stream": True}):
        answer = await served.client.post(URL, json=body)
        assert answer.status_code == 529
        assert answer.headers["retry-after"] == "7"
        assert ErrorResponse.model_validate_json(answer.content).error.type == "overloaded_error"


BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 10**9}, "max_tokens"),
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
    ({"system": 3}, "system"),
    ({"temperature": 3}, "temperature"),
    ({"n": 2}, "n=2"),
    ({"stop_sequences": [""]}, "stop"),
    ({"stop_sequences": ["a"] * 129}, "stop_sequences"),
    ({"stop_sequences": "a"}, "stop_sequences"),
    ({"thinking": {"type": "maybe"}}, "thinking.type"),
    ({"thinking": {"type": "between_tools"}}, "thinking.type"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 100}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1500}}, "below max_tokens"),
    ({"thinking": {**ADAPTIVE, "display": "all"}}, "thinking.display"),
    ({"thinking": "on"}, "thinking"),
    ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "web_search_20250305"),
    ({"tools": [LOOK, LOOK]}, "tools"),
    ({"tools": [{**LOOK, "input_schema": {"x": "\ud800"}}]}, "JSON"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tool_choice": {"type": "tool", "name": "f"}, "tools": [LOOK]}, "tool_choice"),
    ({"tool_choice": "any"}, "tool_choice"),
    ({"output_config": {"effort": 3}}, "output_config.effort"),
    ({"output_config": {"effort": "huge"}}, "output_config.effort"),
    ({"output_config": {"format": {"type": "json"}}}, "output_config.format"),
    ({"output_format": {"type": "json"}}, "output_format must be"),
    ({"cache_control": {"type": "eternal"}}, "cache_control"),
    ({"container": "c"}, "container"),
    ({"mcp_servers": [{}]}, "mcp_servers"),
]


@pytest.mark.parametrize(("body", "word"), BAD)
async def test_bad_requests(served: Served, body: dict[str, Any], word: str) -> None:
    content = json.dumps({**BODY, **body})
    headers = {"content-type": "application/json"}
    answer = await served.client.post(URL, content=content, headers=headers)
    assert answer.status_code == 400, answer.text
    error = ErrorResponse.model_validate_json(answer.content)
    assert error.error.type == "invalid_request_error"
    assert word in error.error.message
    assert error.request_id == answer.headers["request-id"]
    assert served.engine.jobs == []


async def test_other_refusals_have_the_shape_too(serve: Callable[..., Served]) -> None:
    served = serve(api_keys=("sesame",))
    keys: list[dict[str, str]] = [
        {"x-api-key": "sesame"},
        {"authorization": "Bearer sesame"},
        {"x-api-key": "sesame", "authorization": "Bearer other"},
    ]
    for headers in keys:
        answer = await served.client.post(URL, json={**BODY, "max_tokens": 5}, headers=headers)
        assert answer.status_code == 200
    refusals: list[tuple[httpx.Response, int, str]] = [
        (await served.client.post(URL, json=BODY), 401, "authentication_error"),
        (
            await served.client.post(URL, json=BODY, headers={"x-api-key": "other"}),
            401,
            "authentication_error",
        ),
        (
            await served.client.post(URL, json={**BODY, "model": "other"}, headers=keys[0]),
            404,
            "not_found_error",
        ),
        (await served.client.get(URL, headers=keys[0]), 405, "invalid_request_error"),
        (await served.client.post(f"{URL}/batches", headers=keys[0]), 404, "not_found_error"),
        (
            await served.client.post(
                URL, content=b"{", headers={**keys[0], "content-type": "application/json"}
            ),
            400,
            "invalid_request_error",
        ),
    ]
    for answer, status, kind in refusals:
        assert answer.status_code == status
        error = ErrorResponse.model_validate_json(answer.content)
        assert error.error.type == kind
        assert error.request_id == answer.headers["request-id"]
    served.state.start_drain()
    answer = await served.client.post(URL, json=BODY, headers=keys[0])
    assert answer.status_code == 503
    assert answer.headers["retry-after"]
    assert ErrorResponse.model_validate_json(answer.content).error.type == "api_error"


async def test_threads_are_refused_as_servers_without_them_do(served: Served) -> None:
    """The SDK then sends the whole conversation; taken in silence it would lose its history."""
    thread = {"type": "create"}
    answer = await served.client.post(URL + "?beta=true", json={**BODY, "thread": thread})
    assert answer.status_code == 400
    assert answer.json()["error"]["details"] == {
        "error_code": "thread_unsupported_request",
        "unsupported": ["thread"],
    }
    assert served.engine.jobs == []


async def test_a_prompt_that_fills_the_context(served: Served) -> None:
    messages = [{"role": "user", "content": "word " * 4000}]
    answer = await served.client.post(URL, json={**BODY, "messages": messages})
    assert answer.status_code == 400
    error = ErrorResponse.model_validate_json(answer.content).error
    assert re.fullmatch(r"prompt is too long: \d+ tokens > 2048 maximum", error.message)
