import pytest

from vllm.exceptions import UnsupportedFeatureError, UserInputError
from vllm.tokenizers.chat_messages import ChatMessage, ChatOptions, check_options, parse_messages

USER = {"role": "user", "content": "hi"}


def test_plain_messages():
    parsed = parse_messages(
        [
            {"role": "system", "content": ""},
            USER | {"name": "bob"},
            {"role": "assistant", "content": None, "tool_calls": [], "refusal": None},
        ]
    )
    assert parsed == [
        ChatMessage("system", ""),
        ChatMessage("user", "hi", name="bob"),
        ChatMessage("assistant", ""),
    ]


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content"])
def test_reasoning_under_both_names(key):
    message = {"role": "assistant", "content": "a", key: "r"}
    assert parse_messages([message]) == [ChatMessage("assistant", "a", "r")]


def test_what_a_model_refused_is_text():
    parts = [{"type": "refusal", "refusal": "No."}]
    assert parse_messages([{"role": "assistant", "content": parts}])[0].content == "No."


def test_text_parts_are_joined_by_lines():
    parts = [{"type": "text", "text": "a"}, "b", {"type": "text", "text": ""}]
    assert parse_messages([{"role": "user", "content": parts}])[0].content == "a\nb\n"
    assert parse_messages([{"role": "user", "content": []}])[0].content == ""


@pytest.mark.parametrize(
    ("messages", "shown"),
    [
        ([], "messages is empty"),
        (["x"], r"messages\[0\] must be an object"),
        ([USER, {"content": "x"}], r"messages\[1\]\.role=None is unknown"),
        ([{"role": "bot", "content": "x"}], "role='bot' is unknown"),
        ([{"role": ["user"], "content": "x"}], "is unknown"),
        ([{"role": "user"}], r"content is missing"),
        ([{"role": "system", "content": None}], r"content is missing"),
        ([{"role": "user", "content": 3}], "must be a string or a list"),
        ([{"role": "user", "content": {"type": "text"}}], "must be a string or a list"),
        ([{"role": "user", "content": [3]}], r"content\[0\] must be an object with a type"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\]\.text must be"),
        ([{"role": "user", "content": [{"type": "text", "text": 1}]}], r"\.text must be"),
        ([{"role": "assistant", "content": "", "reasoning": 3}], "reasoning must be a string"),
    ],
)
def test_malformed_messages(messages, shown):
    with pytest.raises(UserInputError, match=shown) as caught:
        parse_messages(messages)
    assert caught.value.param == "messages"
    assert not isinstance(caught.value, UnsupportedFeatureError)


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ({"role": "function", "content": "x"}, "function"),
        ({"role": "assistant", "tool_calls": [{"type": "custom"}]}, r"\[0\]\.type='custom'"),
        (USER | {"tools": [{}]}, r"messages\[0\]\.tools"),
        (USER | {"task": "title"}, r"messages\[0\]\.task"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "image_url"),
    ],
)
def test_known_but_not_supported(message, shown):
    with pytest.raises(UnsupportedFeatureError, match=shown):
        parse_messages([message])


@pytest.mark.parametrize(
    ("options", "param"),
    [
        (ChatOptions(response_format={"type": "json_object"}), "response_format"),
    ],
)
def test_unsupported_options(options, param):
    with pytest.raises(UnsupportedFeatureError, match=param) as caught:
        check_options(options, parse_messages([USER]))
    assert caught.value.param == param


def test_harmless_options():
    options = ChatOptions(tools=(), response_format={"type": "text"}, reasoning_effort="low")
    check_options(options, parse_messages([USER]))


@pytest.mark.parametrize(
    ("options", "param", "shown"),
    [
        (ChatOptions(reasoning_effort="huge"), "reasoning_effort", "'huge' is unknown"),
        (ChatOptions(continue_final_message=True), "continue_final_message", "cannot both"),
        (
            ChatOptions(continue_final_message=True, add_generation_prompt=False),
            "continue_final_message",
            "not 'user'",
        ),
    ],
)
def test_contradicting_options(options, param, shown):
    with pytest.raises(UserInputError, match=shown) as caught:
        check_options(options, parse_messages([USER]))
    assert caught.value.param == param
