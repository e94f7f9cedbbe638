"""Content blocks as chat messages."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from tests.entrypoints.rubbish import json_like
from vllm.entrypoints.anthropic.conversion import convert_messages
from vllm.entrypoints.openai.opaque_reasoning import seal_reasoning
from vllm.exceptions import UnsupportedFeatureError, UserInputError
from vllm.multimodal.reader import GivenImage
from vllm.multimodal.sources import Origin
from vllm.tokenizers.breakpoints import Breakpoint
from vllm.tokenizers.chat_messages import parse_messages

HI: list[Any] = [{"role": "user", "content": "hi"}]
MARK = {"type": "ephemeral"}


def text(value: str, **fields: Any) -> dict[str, Any]:
    """A text block."""
    return {"type": "text", "text": value, **fields}


def test_a_conversation_with_tools() -> None:
    messages = [
        {"role": "user", "content": [text("What is"), text("the weather?")]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                text("I "),
                text("look."),
                {"type": "tool_use", "id": "t1", "name": "look", "input": {"town": "Zürich"}},
                {"type": "tool_use", "id": "t2", "name": "look", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [text("rain")]},
                {"type": "tool_result", "tool_use_id": "t2", "content": "gone", "is_error": True},
                text("And?"),
            ],
        },
    ]
    chat = convert_messages([text("Be kind."), text("Be terse.")], messages)
    assert not chat.continues
    system, user, assistant, first, second, last = parse_messages(chat.messages)
    assert (system.role, system.content) == ("system", "Be kind.\nBe terse.")
    assert user.content == "What is\nthe weather?"
    assert (assistant.reasoning, assistant.content) == ("hm", "I look.")
    assert [call.id for call in assistant.tool_calls] == ["t1", "t2"]
    sent = chat.messages[2]["tool_calls"][0]["function"]["arguments"]
    assert sent == '{"town": "Zürich"}'
    assert (first.tool_call_id, first.content) == ("t1", "rain")
    assert (second.tool_call_id, second.content) == ("t2", "Error: gone")
    assert (last.role, last.content) == ("user", "And?")


def test_a_last_message_of_the_assistants_is_continued() -> None:
    chat = convert_messages(None, [*HI, {"role": "assistant", "content": "The answer is"}])
    assert chat.continues
    assert chat.messages[-1] == {"role": "assistant", "content": "The answer is"}


CALL = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "rain"}


def said(role: str, *contents: Any) -> list[dict[str, Any]]:
    """Messages of one role in a row."""
    return [{"role": role, "content": content} for content in contents]


@pytest.mark.parametrize(
    ("messages", "shown"),
    [
        (said("user", "a", "b"), [("user", "a\nb")]),
        (said("user", "a", [text("b"), text("c")], "d"), [("user", "a\nb\nc\nd")]),
        (said("user", [], "a"), [("user", "a")]),
        (said("assistant", "a", "b") + HI, [("assistant", "a\n\nb"), ("user", "hi")]),
        (
            said("assistant", [text("a"), text("b")], "c") + HI,
            [("assistant", "ab\n\nc"), ("user", "hi")],
        ),
        (said("assistant", "", "b") + HI, [("assistant", "b"), ("user", "hi")]),
        (
            said("assistant", "a", [CALL]) + said("user", [RESULT]),
            [("assistant", "a"), ("tool", "rain")],
        ),
        (
            said("assistant", [CALL, {**CALL, "id": "t2"}])
            + said("user", [RESULT], [{**RESULT, "tool_use_id": "t2", "content": "snow"}], "so?"),
            [("assistant", ""), ("tool", "rain"), ("tool", "snow"), ("user", "so?")],
        ),
        (
            said("assistant", [CALL]) + said("user", [RESULT, text("so?")], "well?"),
            [("assistant", ""), ("tool", "rain"), ("user", "so?\nwell?")],
        ),
        (
            said("user", "a") + said("system", "b") + said("user", "c"),
            [("user", "a"), ("system", "b"), ("user", "c")],
        ),
        (
            said("user", "a") + said("assistant", "b") + said("user", "c", "d"),
            [("user", "a"), ("assistant", "b"), ("user", "c\nd")],
        ),
    ],
)
def test_neighbours_of_one_role_are_one_message(
    messages: list[Any], shown: list[tuple[str, str]]
) -> None:
    chat = convert_messages(None, messages)
    found = parse_messages(chat.messages)
    assert [(message.role, message.content) for message in found] == shown


def test_marks_of_joined_messages_are_behind_their_own_text() -> None:
    first = said("user", [text("a", cache_control=MARK), text("b")])
    chat = convert_messages(
        None, [*first, *said("user", [text("c", cache_control=MARK), text("d")])]
    )
    assert chat.breakpoints == (Breakpoint(0, 0), Breakpoint(0, 2))


def test_an_answer_in_two_messages_is_continued_behind_the_last() -> None:
    chat = convert_messages(None, [*HI, *said("assistant", "a", "b")])
    assert chat.continues
    assert parse_messages(chat.messages)[-1].content == "a\n\nb"


@pytest.mark.parametrize("nothing", [None, "", [], "null", "[]", '""', {}])
def test_a_call_without_input_has_no_arguments(nothing: Any) -> None:
    calls = said("assistant", [{**CALL, "input": nothing}])
    chat = convert_messages(None, [*calls, *said("user", [RESULT])])
    assert parse_messages(chat.messages)[0].tool_calls[0].arguments == "{}"


def test_hidden_thinking_comes_back() -> None:
    block = {"type": "thinking", "thinking": "", "signature": seal_reasoning("hm")}
    chat = convert_messages(None, [{"role": "assistant", "content": [block, text("Hi")]}, *HI])
    assert chat.messages[0]["reasoning"] == "hm"


def test_thinking_of_other_servers_is_left_out() -> None:
    foreign = [
        {"type": "thinking", "thinking": "", "signature": "WaUjzkyp"},
        {"type": "redacted_thinking", "data": "EmwKAhgBEgy3"},
        text("Hi"),
    ]
    chat = convert_messages(None, [{"role": "assistant", "content": foreign}, *HI])
    assert chat.messages[0] == {"role": "assistant", "content": "Hi"}


def test_input_that_was_cut_off_comes_back_as_it_was() -> None:
    use = {"type": "tool_use", "id": "t", "name": "f", "input": '{"path": "/et'}
    chat = convert_messages(None, [{"role": "assistant", "content": [use]}, *HI])
    assert chat.messages[0]["tool_calls"][0]["function"]["arguments"] == '{"path": "/et'


def test_marks_stand_where_blocks_end() -> None:
    hour = {"type": "ephemeral", "ttl": "1h"}
    messages = [
        {"role": "user", "content": [text("long", cache_control=MARK), text("short")]},
        {"role": "assistant", "content": [text("ok", cache_control=hour)]},
        {"role": "user", "content": "go on"},
    ]
    tools = [{"name": "f", "input_schema": {}, "cache_control": MARK}]
    chat = convert_messages("System.", messages, tools=tools, cache_control=hour)
    assert list(chat.breakpoints) == [
        Breakpoint(0, None, None),  # tools stand with the system prompt
        Breakpoint(1, 0, None),
        Breakpoint(2, None, 3600.0),
        Breakpoint(3, None, 3600.0),
    ]


@pytest.mark.parametrize(
    ("mark", "message"),
    [({}, "ephemeral"), ("ephemeral", "ephemeral"), ({**MARK, "ttl": "2h"}, "ttl='2h'")],
)
def test_marks_are_checked(mark: Any, message: str) -> None:
    with pytest.raises(UserInputError, match=message):
        convert_messages(None, [{"role": "user", "content": [text("x", cache_control=mark)]}])


def test_there_are_four_marks_at_most() -> None:
    blocks = [text(str(i), cache_control=MARK) for i in range(4)]
    convert_messages(None, [{"role": "user", "content": blocks}])
    with pytest.raises(UserInputError, match="marks 5 places with cache_control: at most 4"):
        convert_messages(None, [{"role": "user", "content": blocks}], cache_control=MARK)


BAD: list[tuple[Any, Any, str]] = [
    (None, [], "messages is empty"),
    (None, ["hi"], r"messages\[0\] must be an object"),
    (None, [{"role": "tool", "content": "x"}], r"messages\[0\].role is 'tool'"),
    (None, [{"role": "user"}], r"messages\[0\].content must be a string or a list"),
    (None, [{"role": "user", "content": ["x"]}], r"content\[0\] must be an object"),
    (None, [{"role": "user", "content": [{"text": "x"}]}], r"content\[0\].type must be"),
    (None, [{"role": "user", "content": [{"type": "text"}]}], r"content\[0\].text must be"),
    (None, [{"role": "user", "content": []}], "no content"),
    (7, HI, "system must be a string or a list"),
    (
        None,
        [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t"}]}],
        "no tool_use block before it",
    ),
    (
        None,
        [
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "t", "name": "f", "input": 3}],
            },
            *HI,
        ],
        "input must be an object",
    ),
    (
        None,
        [
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}],
            }
        ],
        "send the tool_result",
    ),
]


@pytest.mark.parametrize(("system", "messages", "message"), BAD)
def test_malformed_messages_are_named(system: Any, messages: Any, message: str) -> None:
    with pytest.raises(UserInputError, match=message):
        convert_messages(system, messages)


@pytest.mark.parametrize(
    ("role", "kind"),
    [
        ("assistant", "image"),
        ("system", "image"),
        *((r, k) for r in ("user", "assistant") for k in ("document", "search_result")),
        ("user", "server_tool_use"),
    ],
)
def test_what_is_not_served_is_refused_by_name(role: str, kind: str) -> None:
    block = {"type": kind, "source": {"type": "base64"}, "data": "x"}
    with pytest.raises(UnsupportedFeatureError, match=rf"content\[0\] has type '{kind}'"):
        convert_messages(None, [{"role": role, "content": [block]}])


def test_pictures_stand_between_the_texts_of_questions_and_results() -> None:
    use = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    seen = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "eA"}}
    linked = {"type": "image", "source": {"type": "url", "url": "https://a.example/b.png"}}
    text = {"type": "text", "text": "a"}
    result = {"type": "tool_result", "tool_use_id": "t", "is_error": True, "content": [seen, text]}
    messages = [
        {"role": "user", "content": [text, linked, text]},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]

    asked, _, given = convert_messages(None, messages).messages

    shown = GivenImage("messages[0].content[1]", Origin(address="https://a.example/b.png"))
    assert asked["content"] == [text, shown, text]
    of_result = GivenImage("messages[2].content[0].content[0]", Origin(data="eA"))
    assert given["content"] == [{"type": "text", "text": "Error:"}, of_result, text]


@pytest.mark.parametrize(
    ("source", "place"),
    [
        (None, "source"),
        ({"type": "base64"}, "source.data"),
        ({"type": "base64", "data": 1}, "source.data"),
        ({"type": "url"}, "source.url"),
        ({"type": "url", "url": "gopher://x"}, "url"),
        ({"type": "file", "file_id": "f"}, "file"),
        ({"type": "other"}, "source.type"),
    ],
)
def test_malformed_pictures_are_named(source: Any, place: str) -> None:
    block = {"type": "image", "source": source}
    with pytest.raises(UserInputError, match=rf"content\[0\].*{place}"):
        convert_messages(None, [{"role": "user", "content": [block]}])


NAMES = ["type", "role", "content", "text", "id", "name", "input", "tool_use_id", "is_error"]
NAMES += ["thinking", "signature", "cache_control", "ttl"]
WORDS = ["tool_use", "tool_result", "thinking", "image", "ephemeral", "5m", "t1"]


@pytest.mark.slow
@given(json_like(NAMES, WORDS), json_like(NAMES, WORDS))
@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_rubbish_is_refused_or_becomes_a_chat(system: Any, messages: Any) -> None:
    for given_messages in (messages, [{"role": "user", "content": messages}], [messages]):
        if not isinstance(given_messages, list):
            continue
        try:
            chat = convert_messages(system, given_messages)
            json.dumps(chat.messages)
        except UserInputError:
            continue
        assert len(parse_messages(chat.messages)) == len(chat.messages)
