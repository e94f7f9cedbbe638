"""Input items: checked, listed in the SDK's shape, turned into chats."""

from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types.responses import ResponseItem
from pydantic import TypeAdapter

from tests.entrypoints.rubbish import json_like
from vllm.entrypoints.openai.opaque_reasoning import seal_reasoning
from vllm.entrypoints.openai.responses.bodies import (
    InputTokensDetails,
    OutputTokensDetails,
    ResponseBody,
    ResponseUsage,
)
from vllm.entrypoints.openai.responses.builder import ResponseBuilder
from vllm.entrypoints.openai.responses.input_items import make_chat, read_input
from vllm.entrypoints.openai.responses.store import Item
from vllm.exceptions import ResponseNotFoundError, UnsupportedFeatureError, UserInputError
from vllm.parser.pieces import (
    ContentText,
    Piece,
    ReasoningText,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from vllm.tokenizers.breakpoints import Breakpoint
from vllm.tokenizers.chat_messages import parse_messages

SDK_ITEM: TypeAdapter[Any] = TypeAdapter(ResponseItem)
STORED = {"id": "fc_1", "type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}


def find_item(item_id: str) -> Item:
    """A store of one item."""
    if item_id != STORED["id"]:
        raise ResponseNotFoundError("no such item", "input")
    return {**STORED, "status": "completed"}


def chat_of(value: Any, instructions: str | None = None) -> list[dict[str, Any]]:
    """The messages of an input."""
    return make_chat(read_input(value, find_item), instructions)[0]


def test_a_text_is_a_user_message() -> None:
    assert chat_of("hi", "Be terse.") == [
        {"role": "system", "content": "Be terse."},
        {"role": "user", "content": "hi"},
    ]


def test_items_become_turns() -> None:
    items = [
        {"role": "developer", "content": "Use tools."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "go"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "I call."}]},
        {"type": "item_reference", "id": "fc_1"},
        {"type": "function_call_output", "call_id": "c1", "output": "42"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    ]
    developer, user, assistant, tool, refusal = chat_of(items)
    assert developer == {"role": "developer", "content": "Use tools."}
    assert user == {"role": "user", "content": "go"}
    assert (assistant["reasoning"], assistant["content"]) == ("hm", "I call.")
    assert assistant["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}
    assert tool == {"role": "tool", "tool_call_id": "c1", "content": "42"}
    assert refusal == {"role": "assistant", "content": "No."}


def test_items_are_listed_as_the_sdk_has_them() -> None:
    items = read_input(
        [
            {"role": "user", "content": "go", "id": "msg_own"},
            {"role": "assistant", "content": "I call."},
            {"id": "fc_1"},
            {"type": "function_call_output", "call_id": "c1", "output": [
                {"type": "input_text", "text": "42"}
            ]},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
        ],
        find_item,
    )  # fmt: skip
    for item in items:
        SDK_ITEM.validate_python(dict(item))
    ids = [item["id"] for item in items]
    assert ids[0] == "msg_own"
    assert ids[2] == "fc_1"
    assert len(set(ids)) == 5


def test_reasoning_comes_back_from_its_opaque_form() -> None:
    item = {"type": "reasoning", "summary": [], "encrypted_content": seal_reasoning("hm")}
    assert chat_of([item, {"role": "assistant", "content": "Hi"}]) == [
        {"role": "assistant", "content": "Hi", "reasoning": "hm"}
    ]
    # Another server's cannot be read, and the conversation goes on without it.
    assert chat_of([{**item, "encrypted_content": "gAAAAB"}, {"role": "user", "content": "x"}]) == [
        {"role": "user", "content": "x"}
    ]


def test_marks_of_parts_are_breakpoints() -> None:
    mark = {"mode": "explicit", "ttl": "12h"}
    parts = [
        {"type": "input_text", "text": "a long text", "prompt_cache_breakpoint": mark},
        {"type": "input_text", "text": "a question"},
    ]
    items = read_input([{"role": "user", "content": parts}], find_item)
    _, marks, origins = make_chat(items, "System.")
    assert origins == [-1, 0]
    assert marks == [Breakpoint(1, 0, 43200.0)]
    many = [{"role": "user", "content": [parts[0]]}] * 17
    with pytest.raises(UserInputError, match="17 prompt_cache_breakpoints: at most 16"):
        make_chat(read_input(many, find_item))


BAD: list[tuple[Any, str]] = [
    (7, "a string or a list"),
    ({"role": "user"}, "a string or a list"),
    (["hi"], r"input\[0\] must be an object"),
    ([{"role": "pope", "content": "x"}], r"input\[0\].role is 'pope'"),
    ([{"role": "user"}], "content must be a string or a list"),
    ([{"role": "user", "content": [3]}], r"content\[0\] must be an object"),
    (
        [{"type": "function_call", "name": "f", "call_id": "c", "arguments": 3}],
        "arguments must be a string",
    ),
    ([{"type": "function_call_output", "output": "x"}], "call_id must be a string"),
    ([{"type": "reasoning", "content": "hm"}], "must be a list of reasoning_text"),
    ([{"role": "user", "content": "x", "id": 5}], "id must be 1 to 256"),
    ([{"type": "item_reference", "id": "msg_9"}], "no such item"),
]  # fmt: skip


@pytest.mark.parametrize(("value", "message"), BAD)
def test_malformed_items_are_named(value: Any, message: str) -> None:
    with pytest.raises(UserInputError, match=message):
        read_input(value, find_item)


@pytest.mark.parametrize(
    "item",
    [
        {"type": "hologram", "call_id": "c"},
        {"role": "assistant", "content": [{"type": "input_image", "image_url": "x"}]},
        {"role": "user", "content": [{"type": "input_file", "file_id": "x"}]},
    ],
)
def test_what_is_not_served_is_refused_by_name(item: dict[str, Any]) -> None:
    name = item.get("type") or item["content"][0]["type"]
    with pytest.raises(UnsupportedFeatureError, match=name):
        read_input([item], find_item)


PIECES = st.lists(
    st.one_of(
        st.builds(ReasoningText, st.text("ab ", min_size=1, max_size=4)),
        st.builds(ContentText, st.text("ab ", min_size=1, max_size=4)),
        st.just("call"),
    ),
    min_size=1,
    max_size=8,
)


def test_a_call_that_broke_off_is_not_shown_again() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": '}
    whole = {**call, "call_id": "d", "arguments": "{}", "status": "completed"}
    (turn,) = parse_messages(chat_of([call | {"status": "incomplete"}, whole]))
    assert [call.id for call in turn.tool_calls] == ["d"]


@pytest.mark.slow
@given(PIECES)
@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_an_answer_comes_back_as_it_was_said(drawn: list[Any]) -> None:
    """What the model said once, in the model's order, is one turn with the same texts."""
    reasoning = [p for p in drawn if isinstance(p, ReasoningText)]
    content = [p for p in drawn if isinstance(p, ContentText)]
    pieces: list[Piece] = [*reasoning, *content]
    num_calls = drawn.count("call")
    for i in range(num_calls):
        pieces += [ToolCallStart(i, f"c{i}", "f"), ToolCallArguments(i, "{}"), ToolCallEnd(i)]
    builder = ResponseBuilder(ResponseBody("resp_1", 1, "m"))
    builder.start()
    builder.add(pieces)
    usage = ResponseUsage(1, InputTokensDetails(0, 0), 1, OutputTokensDetails(0), 2)
    builder.finish("stop", usage)
    items = [msgspec.to_builtins(item) for item in builder.body.output]
    (turn,) = parse_messages(chat_of(items))
    assert turn.reasoning == "".join(p.text for p in reasoning)
    assert turn.content == "".join(p.text for p in content)
    assert [call.id for call in turn.tool_calls] == [f"c{i}" for i in range(num_calls)]


NAMES = ["type", "role", "content", "text", "id", "call_id", "name", "arguments", "output"]
NAMES += ["summary", "encrypted_content", "refusal", "prompt_cache_breakpoint", "mode", "ttl"]
WORDS = ["message", "function_call", "function_call_output", "reasoning", "input_text", "explicit"]
WORDS += ["output_text", "item_reference", "fc_1", "system", "30m"]


@pytest.mark.slow
@given(st.one_of(json_like(NAMES, WORDS), st.lists(json_like(NAMES, WORDS), max_size=4)))
@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_rubbish_is_refused_or_becomes_a_chat(value: Any) -> None:
    try:
        messages = chat_of(value)
    except UserInputError:
        return
    if messages:
        assert len(parse_messages(messages)) == len(messages)
