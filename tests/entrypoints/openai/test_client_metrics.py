"""What clients send is put right on every API, and counted."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.entrypoints.openai.conftest import Served
from tests.tokenizers.family_tokenizers import byte_level
from tests.tokenizers.order_templates import NO_SYSTEM
from vllm.tokenizers import make_chat_encoder

LINE = "x-anthropic-billing-header: cc_version=2.1.332.{}; cc_entrypoint=cli; cch=a1b{};\n"
HI = {"role": "user", "content": "hi"}
COUNTER = "vllm:billing_lines_left_out_total"


def bodies(text: str) -> dict[str, dict[str, Any]]:
    """A chat with a system text for each route."""
    chat = [{"role": "system", "content": text}, HI]
    blocks = [{"type": "text", "text": part} for part in text.split("\n") if part]
    return {
        "/v1/chat/completions": {"messages": chat, "max_tokens": 1},
        "/v1/messages": {"system": text, "messages": [HI], "max_tokens": 1},
        "/v1/messages?blocks": {"system": blocks, "messages": [HI], "max_tokens": 1},
        "/v1/messages?inside": {"messages": chat, "max_tokens": 1},
        "/v1/messages/count_tokens": {"system": text, "messages": [HI]},
        "/v1/responses": {"instructions": text, "input": "hi", "store": False},
        "/v1/responses?items": {"input": chat, "store": False},
        "/v1/responses?developer": {
            "input": [{"role": "developer", "content": text}, HI],
            "store": False,
        },
        "/v1/responses/input_tokens": {"instructions": text, "input": "hi"},
        "/tokenize": {"messages": chat},
    }


ROUTES = list(bodies(""))


async def told(served: Served, route: str, text: str) -> Any:
    """The prompt's tokens, or how many they are."""
    answer = await served.client.post(route.partition("?")[0], json=bodies(text)[route])
    assert answer.status_code == 200, answer.text
    if served.engine.jobs:
        return served.engine.jobs.pop()[0]
    found = answer.json()
    return found.get("tokens", found.get("input_tokens"))


async def metric(served: Served, name: str) -> float:
    lines = (await served.client.get("/metrics")).text.splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(name + " "))


@pytest.fixture
def served(serve: Callable[..., Served]) -> Served:
    """An application with room for prompts."""
    return serve(served_model={"max_model_len": 2048})


@pytest.mark.parametrize("route", ROUTES)
async def test_prompts_with_other_digits_are_equal(served: Served, route: str) -> None:
    first, second, plain = [
        await told(served, route, line + "Be brief.")
        for line in (LINE.format("1ab", "2c"), LINE.format("9fe", "77"), "")
    ]
    assert first == second == plain
    assert await metric(served, COUNTER) == 2


async def test_the_line_is_named_once_in_the_log(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "vllm")
    for _ in range(3):
        await told(served, "/tokenize", LINE.format("1ab", "2c") + "Be brief.")
    assert sum("billing line" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("route", ROUTES)
async def test_late_systems_and_neighbours_are_served(
    serve: Callable[..., Served], route: str
) -> None:
    """A template that takes users and assistants by turns gets every text."""
    served = serve(served_model={"max_model_len": 2048})
    tokenizer = byte_level()
    encoder = make_chat_encoder({}, tokenizer, NO_SYSTEM)
    context = replace(served.context, chat_encoder=encoder, tokenizer=tokenizer)
    served.app.state.context = context
    body = bodies("Be brief.")[route]
    more = [HI, {"role": "system", "content": "Be kind."}, {"role": "assistant", "content": "yes"}]
    more += [{"role": "assistant", "content": "no"}, {"role": "user", "content": "so?"}]
    for name in ("messages", "input"):
        if name in body:
            given = body[name] if isinstance(body[name], list) else [HI]
            body = {**body, name: given + more}
    answer = await served.client.post(route.partition("?")[0], json=body)
    assert answer.status_code == 200, answer.text
    if served.engine.jobs:
        text = tokenizer.decode(served.engine.jobs[-1][0])
        places = [text.index(word) for word in ("Be brief.", "hi", "Be kind.", "yes", "no", "so?")]
        assert places == sorted(places)
    assert await metric(served, "vllm:joined_messages_total") > 0


@pytest.mark.parametrize("nothing", [None, "null", '""', "[]", ""])
async def test_calls_without_arguments_have_an_empty_object(served: Served, nothing: Any) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": nothing}}
    chat = [HI, {"role": "assistant", "content": None, "tool_calls": [call]}]
    chat.append({"role": "tool", "tool_call_id": "c1", "content": "done"})
    items = [HI, {"type": "function_call", "call_id": "c1", "name": "f", "arguments": nothing}]
    items.append({"type": "function_call_output", "call_id": "c1", "output": "done"})
    block = {"type": "tool_use", "id": "c1", "name": "f", "input": nothing}
    blocks: list[dict[str, Any]] = [HI, {"role": "assistant", "content": [block]}]
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "done"}
    blocks.append({"role": "user", "content": [result]})
    for url, body in {
        "/v1/chat/completions": {"messages": chat, "max_tokens": 1},
        "/v1/responses": {"input": items, "store": False},
        "/v1/messages": {"messages": blocks, "max_tokens": 1},
    }.items():
        answer = await served.client.post(url, json=body)
        assert answer.status_code == 200, answer.text
        text = served.context.tokenizer.decode(served.engine.jobs[-1][0])
        assert "null" not in text
        assert '"arguments"' not in text
