"""``/v1/responses`` over a fake engine."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from openai.types.responses import Response, ResponseItem, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.entrypoints.openai.conftest import Served

URL = "/v1/responses"
SDK_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
SDK_ITEM: TypeAdapter[Any] = TypeAdapter(ResponseItem)
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "What a town may expect.",
    "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
}
CALL = (
    '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="weather">\n'
    '<｜DSML｜parameter name="town" string="true">Rome</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
)


@pytest.fixture
def served(serve: Callable[..., Served]) -> Served:
    """An application with room for tools; its model reasons, then says Hello."""
    served = serve(served_model={"max_model_len": 2048})
    say(served, "I just answer.</think>Hello.")
    return served


def say(served: Served, text: str) -> None:
    """Let the model say something from now on."""
    served.engine.answer = served.context.tokenizer.encode(text, add_special_tokens=False)


def prompt_of(served: Served, job: int = -1) -> str:
    """The text of a prompt that the engine got."""
    return served.context.tokenizer.decode(served.engine.jobs[job][0])


async def create(served: Served, **body: Any) -> Response:
    """A response as the SDK reads it."""
    answer = await served.client.post(URL, json={"input": "hi", **body})
    assert answer.status_code == 200, answer.text
    return Response.model_validate_json(answer.content)


def events_in(answer: httpx.Response) -> list[Any]:
    """The events of a stream, as the SDK reads them."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in answer.text.splitlines() if line.startswith("data: ")]
    return [SDK_EVENT.validate_json(line.removeprefix("data: ")) for line in lines]


async def test_a_response(served: Served) -> None:
    served.engine.num_cached_tokens = 3
    response = await create(
        served,
        instructions="Be kind.",
        metadata={"team": "a"},
        max_output_tokens=200,
        temperature=0.5,
        reasoning={"effort": "low", "summary": "auto"},
        store=False,
    )
    assert response.status == "completed"
    reasoning, _ = response.output
    assert reasoning.content[0].text == "I just answer."  # type: ignore[union-attr,index]
    assert response.output_text == "Hello."
    assert (response.instructions, response.metadata) == ("Be kind.", {"team": "a"})
    assert response.temperature == 0.5
    assert response.usage is not None
    num_answer = len(served.engine.answer)
    assert response.usage.output_tokens == num_answer
    assert response.usage.input_tokens_details.cached_tokens == 3
    tokenizer = served.context.tokenizer
    thought = tokenizer.encode("I just answer.</think>", add_special_tokens=False)
    assert response.usage.output_tokens_details.reasoning_tokens == len(thought)
    prompt, params, *_ = served.engine.jobs[0]
    assert prompt_of(served).endswith("Be kind.<｜User｜>hi<｜Assistant｜><think>")
    assert response.usage.input_tokens == len(prompt)
    assert params.max_tokens == 200


async def test_a_text_format_reaches_the_engine(served: Served) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    wanted = {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}}
    response = await create(served, text=wanted)
    assert response.text is not None
    asked = served.engine.jobs[-1][1].structured_outputs
    assert asked is not None
    assert asked.json == schema
    await create(served, text={"format": {"type": "json_object"}})
    asked = served.engine.jobs[-1][1].structured_outputs
    assert asked is not None
    assert asked.json_object is True


async def test_a_stream_tells_what_a_response_says(served: Served) -> None:
    say(served, f"I call.</think>Let me see.{CALL}")
    body = {"input": "hi", "tools": [WEATHER], "stream": True}
    events = events_in(await served.client.post(URL, json=body))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    whole = await create(served, tools=[WEATHER])
    last = events[-1]
    assert last.type == "response.completed"
    told = [(i.type, i.to_dict(exclude_none=True)) for i in last.response.output]
    for (kind, streamed), item in zip(told, whole.output, strict=True):
        unstreamed = item.to_dict(exclude_none=True)
        ids = {"id", "call_id"}
        assert kind == item.type
        assert {k: v for k, v in streamed.items() if k not in ids} == {
            k: v for k, v in unstreamed.items() if k not in ids
        }
    assert last.response.usage == whole.usage
    assert "weather" in prompt_of(served)


async def test_a_conversation_goes_on(served: Served) -> None:
    say(served, f"I call.</think>{CALL}")
    first = await create(served, input="Weather in Rome?", tools=[WEATHER], instructions="Old.")
    call = first.output[-1]
    assert call.type == "function_call"
    assert json.loads(call.arguments) == {"town": "Rome"}
    say(served, "Good.</think>It rains.")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    second = await create(
        served, input=[result], previous_response_id=first.id, tools=[WEATHER], instructions="New."
    )
    continued = prompt_of(served)
    assert "New." in continued
    assert "Old." not in continued  # instructions are not carried over
    assert second.previous_response_id == first.id
    # The same by items, without the store.
    items = [{"role": "user", "content": "Weather in Rome?"}]
    items += [item.to_dict(exclude_none=True) for item in first.output]  # type: ignore[misc]
    await create(served, input=[*items, result], tools=[WEATHER], instructions="New.", store=False)
    assert prompt_of(served) == continued
    third = await create(served, input="Thanks", previous_response_id=second.id)
    assert "It rains." in prompt_of(served)
    assert third.status == "completed"


async def test_what_was_said_is_a_prefix_of_the_next_prompt(served: Served) -> None:
    say(served, f"I call.</think>Let me see.{CALL}<｜end▁of▁sentence｜>")
    first = await create(served, tools=[WEATHER])
    prompt = served.engine.jobs[0][0]
    call = first.output[-1]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}  # type: ignore[union-attr]
    await create(served, input=[result], previous_response_id=first.id, tools=[WEATHER])
    said = [*prompt, *served.engine.answer]
    assert served.engine.jobs[1][0][: len(said)] == said


async def test_a_stored_response_is_read_and_deleted(served: Served) -> None:
    made = await create(served, input=[{"role": "user", "content": "hi", "id": "msg_mine"}])
    read = await served.client.get(f"{URL}/{made.id}")
    assert Response.model_validate_json(read.content) == made
    page = (await served.client.get(f"{URL}/{made.id}/input_items")).json()
    assert [item["id"] for item in page["data"]] == ["msg_mine"]
    SDK_ITEM.validate_python(page["data"][0])
    deleted = await served.client.delete(f"{URL}/{made.id}")
    assert deleted.json() == {"id": made.id, "object": "response", "deleted": True}
    for answer, param in (
        (await served.client.get(f"{URL}/{made.id}"), None),
        (await served.client.delete(f"{URL}/{made.id}"), None),
        (await served.client.post(f"{URL}/{made.id}/cancel"), None),
        (await served.client.get(f"{URL}/{made.id}/input_items"), None),
        (
            await served.client.post(URL, json={"input": "x", "previous_response_id": made.id}),
            "previous_response_id",
        ),
    ):
        assert answer.status_code == 404
        error = answer.json()["error"]
        assert made.id in error["message"]
        assert error["param"] == param


async def test_input_items_come_in_pages(served: Served) -> None:
    items = [{"role": "user", "content": str(i), "id": f"msg_{i}"} for i in range(5)]
    made = await create(served, input=items)

    async def ids(query: str) -> tuple[list[str], bool]:
        page = (await served.client.get(f"{URL}/{made.id}/input_items?{query}")).json()
        assert page["first_id"] == (page["data"][0]["id"] if page["data"] else None)
        return [item["id"] for item in page["data"]], page["has_more"]

    assert await ids("order=asc&limit=2") == (["msg_0", "msg_1"], True)
    assert await ids("order=asc&limit=2&after=msg_3") == (["msg_4"], False)
    assert await ids("limit=3") == (["msg_4", "msg_3", "msg_2"], True)
    assert await ids("after=msg_0") == ([], False)
    for query in ("limit=0", "limit=101", "limit=x", "order=up", "after=msg_9"):
        answer = await served.client.get(f"{URL}/{made.id}/input_items?{query}")
        assert answer.status_code == 400, query


async def test_store_false_keeps_nothing(served: Served) -> None:
    made = await create(served, store=False)
    assert made.store is False  # type: ignore[attr-defined]
    assert (await served.client.get(f"{URL}/{made.id}")).status_code == 404


async def test_a_cut_response_can_be_continued(served: Served) -> None:
    served.engine.stop_reason = "unfinished text at $.a"
    made = await create(served, max_output_tokens=9)
    assert made.status == "incomplete"
    assert made.incomplete_details is not None
    assert made.incomplete_details.reason == "max_output_tokens"
    assert made.incomplete_details.model_extra == {"stop_reason": "unfinished text at $.a"}
    assert made.output[-1].status == "incomplete"  # type: ignore[union-attr]
    again = await create(served, previous_response_id=made.id)
    assert again.status == "completed"


async def test_too_many_top_logprobs_are_refused_where_none_are_included(
    served: Served,
) -> None:
    answer = await served.client.post(URL, json={"input": "x", "top_logprobs": 99})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "top_logprobs"


async def test_logprobs_are_those_of_the_message(served: Served) -> None:
    made = await create(
        served, include=["message.output_text.logprobs"], top_logprobs=2, temperature=1
    )
    logprobs = made.output[1].content[0].logprobs  # type: ignore[union-attr,index]
    assert "".join(entry.token for entry in logprobs) == "Hello."
    assert [len(entry.top_logprobs) for entry in logprobs] == [2] * len(logprobs)
    events = events_in(
        await served.client.post(
            URL,
            json={"input": "hi", "stream": True, "include": ["message.output_text.logprobs"]},
        )
    )
    told = [
        e for event in events if event.type == "response.output_text.delta" for e in event.logprobs
    ]
    assert "".join(entry.token for entry in told) == "Hello."


async def test_reasoning_is_carried_by_stateless_clients(served: Served) -> None:
    made = await create(
        served, include=["reasoning.encrypted_content"], store=False, tools=[WEATHER]
    )
    reasoning = made.output[0].to_dict(exclude_none=True)
    assert reasoning.pop("content")
    items = [{"role": "user", "content": "hi"}, reasoning, made.output[1].to_dict()]
    await create(served, input=[*items, {"role": "user", "content": "more"}], tools=[WEATHER])
    assert "<think>I just answer.</think>Hello." in prompt_of(served)


async def test_allowed_tools_leave_the_others_out(served: Served) -> None:
    other = {**WEATHER, "name": "stocks"}
    allowed = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": "stocks"}],
    }
    await create(served, tools=[WEATHER, other], tool_choice=allowed)
    assert "stocks" in prompt_of(served)
    assert "weather" not in prompt_of(served)
    await create(served, tools=[WEATHER], tool_choice="none")
    assert "weather" not in prompt_of(served)


async def test_tokens_are_counted_without_an_answer(served: Served) -> None:
    body = {"input": "hi", "instructions": "Be kind.", "tools": [WEATHER]}
    counted = (await served.client.post(f"{URL}/input_tokens", json=body)).json()
    made = await create(served, **body)
    assert made.usage is not None
    assert counted == {"input_tokens": made.usage.input_tokens, "object": "response.input_tokens"}
    assert len(served.engine.jobs) == 1


async def test_an_engine_that_dies_fails_the_stream(served: Served) -> None:
    served.engine.fail_at = 7
    events = events_in(await served.client.post(URL, json={"input": "hi", "stream": True}))
    last = events[-1]
    assert last.type == "response.failed"
    assert last.response.status == "failed"
    assert last.response.error.code == "server_error"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (await served.client.post(URL, json={"input": "hi"})).status_code == 500


async def start_background(served: Served, **body: Any) -> Response:
    """A background response whose model waits."""
    served.engine.hold.clear()
    return await create(served, background=True, **body)


async def wait_for_status(served: Served, response_id: str, status: str) -> Response:
    """The response once it has a status."""
    for _ in range(1000):
        answer = await served.client.get(f"{URL}/{response_id}")
        response = Response.model_validate_json(answer.content)
        if response.status == status:
            return response
        await asyncio.sleep(0)
    raise AssertionError(f"{response_id} never got {status}: {response}")


async def test_a_background_response(served: Served) -> None:
    queued = await start_background(served, input=[{"role": "user", "content": "x", "id": "msg_1"}])
    assert queued.status == "queued"
    assert queued.background is True
    page = (await served.client.get(f"{URL}/{queued.id}/input_items")).json()
    assert [item["id"] for item in page["data"]] == ["msg_1"]
    body = {"input": "x", "previous_response_id": queued.id}
    assert (await served.client.post(URL, json=body)).status_code == 400
    assert served.state.num_open_requests == 1  # a drain waits for it
    served.engine.hold.set()
    done = await wait_for_status(served, queued.id, "completed")
    assert done.output_text == "Hello."
    assert served.state.num_open_requests == 0
    assert (await served.client.post(URL, json=body)).status_code == 200
    again = await served.client.post(f"{URL}/{queued.id}/cancel")
    assert again.json()["status"] == "completed"


async def test_a_background_response_is_cancelled(served: Served) -> None:
    queued = await start_background(served)
    answer = await served.client.post(f"{URL}/{queued.id}/cancel")
    assert Response.model_validate_json(answer.content).status == "cancelled"
    assert (await wait_for_status(served, queued.id, "cancelled")).status == "cancelled"
    assert served.state.num_open_requests == 0
    assert served.engine.num_left == 1
    served.engine.hold.set()
    made = await create(served)
    refused = await served.client.post(f"{URL}/{made.id}/cancel")
    assert refused.status_code == 400


async def test_a_background_response_is_deleted(served: Served) -> None:
    queued = await start_background(served)
    assert (await served.client.delete(f"{URL}/{queued.id}")).json()["deleted"] is True
    assert (await served.client.get(f"{URL}/{queued.id}")).status_code == 404


async def test_a_background_response_fails(served: Served) -> None:
    served.engine.fail_at = 2
    queued = await start_background(served)
    served.engine.hold.set()
    failed = await wait_for_status(served, queued.id, "failed")
    assert failed.error is not None
    body = {"input": "x", "previous_response_id": queued.id}
    answer = await served.client.post(URL, json=body)
    assert answer.status_code == 400
    assert "failed" in answer.json()["error"]["message"]


async def test_events_of_a_background_response_are_read_again(served: Served) -> None:
    served.engine.hold.set()
    first = events_in(
        await served.client.post(URL, json={"input": "x", "background": True, "stream": True})
    )
    assert [event.type for event in first[:3]] == [
        "response.created",
        "response.queued",
        "response.in_progress",
    ]
    assert first[-1].type == "response.completed"
    name = first[0].response.id
    for after in (-1, 4, len(first) - 2, len(first) + 5):
        answer = await served.client.get(f"{URL}/{name}?stream=true&starting_after={after}")
        assert events_in(answer) == first[after + 1 :]
    plain = await create(served)
    answer = await served.client.get(f"{URL}/{plain.id}?stream=true")
    assert answer.status_code == 400


BAD: list[tuple[dict[str, Any], str | None]] = [
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": "\ud800"}, "input"),
    ({"instructions": 3}, "instructions"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 10**9}, "max_output_tokens"),
    ({"max_tokens": 5}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"max_tool_calls": 0}, "max_tool_calls"),
    ({"temperature": 3}, "temperature"),
    ({"n": 2}, "n"),
    ({"metadata": {"a": 1}}, "metadata"),
    ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
    ({"metadata": {"k" * 65: ""}}, "metadata"),
    ({"metadata": {"a": "\ud800"}}, "metadata"),
    ({"include": ["everything"]}, "include"),
    ({"include": [{}]}, "include"),
    ({"include": ["message.output_text.logprobs"], "top_logprobs": 21}, "top_logprobs"),
    ({"truncation": "auto"}, "truncation"),
    ({"background": True, "store": False}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"tools": [{"type": "custom", "name": "patch"}]}, "tools"),
    ({"tools": [{"type": "telepathy"}]}, "tools"),
    ({"tools": [{"type": "namespace", "name": "fs"}]}, "tools"),
    ({"tools": [{"type": "namespace", "tools": [WEATHER]}]}, "tools"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"tools": [WEATHER, WEATHER]}, "tools"),
    ({"tools": [{**WEATHER, "parameters": {"x": "\ud800"}}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "mcp", "server_label": "x"}}, "tool_choice"),
    ({"tool_choice": {"type": "function", "name": "f"}, "tools": [WEATHER]}, "tool_choice"),
    ({"tool_choice": {"type": "allowed_tools"}, "tools": [WEATHER]}, "tool_choice"),
    ({"text": {"format": {"type": "yaml"}}}, "text"),
    ({"text": {"format": {"type": "json_schema"}}}, "text"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
    ({"reasoning": {"effort": 3}}, "reasoning"),
    ({"reasoning": "high"}, "reasoning"),
]


@pytest.mark.parametrize(("body", "param"), BAD)
async def test_bad_requests(served: Served, body: dict[str, Any], param: str | None) -> None:
    content = json.dumps({"input": "hi", **body})
    answer = await served.client.post(
        URL, content=content, headers={"content-type": "application/json"}
    )
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["message"]
    assert served.engine.jobs == []


async def test_tools_are_refused_by_name(served: Served) -> None:
    answer = await served.client.post(URL, json={"input": "x", "tools": [{"type": "telepathy"}]})
    assert "telepathy" in answer.json()["error"]["message"]


async def test_hosted_tools_are_left_out_and_named(served: Served) -> None:
    hosted = [{"type": "web_search"}, WEATHER, {"type": "image_generation", "size": "auto"}]
    body = {"input": "x", "tools": hosted, "text": {"verbosity": "low"}}
    answer = await served.client.post(URL, json=body)
    assert answer.status_code == 200
    ignored = "tools[0].web_search, tools[2].image_generation, text.verbosity"
    assert answer.headers["x-ignored-fields"] == ignored
    assert "weather" in prompt_of(served)
    assert "image_generation" not in prompt_of(served)
    only = {"input": "x", "tools": [{"type": "web_search"}], "tool_choice": "auto"}
    assert (await served.client.post(URL, json=only)).status_code == 200
    nameless = {"input": "x", "tools": [{"type": "web_search"}, {"type": "function"}]}
    error = (await served.client.post(URL, json=nameless)).json()["error"]
    assert error["message"].startswith("tools[1].name must be")


@pytest.mark.parametrize("streams", [False, True])
async def test_functions_of_a_namespace_are_flat_for_the_model(
    served: Served, streams: bool
) -> None:
    space = {"type": "namespace", "name": "sky", "description": "Sky.", "tools": [WEATHER]}
    say(served, "</think>" + CALL.replace('"weather"', '"sky__weather"'))
    body: dict[str, Any] = {"input": "x", "tools": [space], "stream": streams}
    answer = await served.client.post(URL, json=body)
    assert "sky__weather" in prompt_of(served)
    if streams:
        call = events_in(answer)[-1].response.output[-1]
    else:
        call = Response.model_validate_json(answer.content).output[-1]
    assert (call.namespace, call.name) == ("sky", "weather")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    sent = [{"role": "user", "content": "x"}, call.to_dict(), result]
    assert (await served.client.post(URL, json={**body, "input": sent})).status_code == 200
    assert '<｜DSML｜invoke name="sky__weather">' in prompt_of(served)
    forced = {"type": "function", "name": "weather", "namespace": "sky"}
    await served.client.post(URL, json={**body, "tool_choice": forced})
    assert "sky__weather" in served.engine.jobs[-1][1].structured_outputs.structural_tag
