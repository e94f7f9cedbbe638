import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm.exceptions import UserInputError
from vllm.tokenizers.tool_calls import (
    Member,
    MessageCall,
    parse_calls,
    read_arguments,
    read_members,
    split_object,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


def test_calls_are_checked_and_keep_their_spelling():
    sent = [
        {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x":  1}'}},
        {"function": {"name": "g", "arguments": {"ü": [1]}}},
        {"id": "b", "function": {"name": "h", "arguments": ""}},
    ]
    assert parse_calls("here", sent) == (
        MessageCall("a", "f", '{"x":  1}'),
        MessageCall(None, "g", '{"ü": [1]}'),
        MessageCall("b", "h", "{}"),
    )
    assert parse_calls("here", None) == ()


@pytest.mark.parametrize(
    "call",
    [
        "f",
        {"id": 1, "function": {"name": "f"}},
        {"id": "a"},
        {"id": "a", "function": {"name": ""}},
        {"id": "a", "function": {"name": "f", "arguments": 3}},
    ],
)
def test_malformed_calls(call):
    with pytest.raises(UserInputError, match=r"here\[0\]"):
        parse_calls("here", [call])


@given(st.dictionaries(st.text(), JSON), st.sampled_from([None, 0, 2]), st.booleans())
def test_an_object_falls_into_its_members(value, indent, ascii_only):
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    members = split_object(f"\n {text} ")
    assert members is not None
    assert [(m.key, m.value) for m in members] == list(value.items())
    assert [json.loads(m.raw) for m in members] == list(value.values())
    assert all(m.raw == m.raw.strip() and m.raw in text for m in members)


@pytest.mark.parametrize("text", ["", "[]", "1", '{"a"}', '{"a": 1,}', '{"a": 1} x', "{'a': 1}"])
def test_what_is_no_object(text):
    assert split_object(text) is None


@pytest.mark.parametrize("cut", ['{"path": "/et', "[1]", "{" * 100_000])
def test_a_call_that_was_cut_off_comes_back_as_it_was(cut):
    (call,) = parse_calls("here", [{"id": "a", "function": {"name": "f", "arguments": cut}}])
    assert call.arguments == cut
    assert read_members(cut) == [Member("arguments", cut, cut)]
    assert [member.key for member in read_members('{"x": 1}')] == ["x"]


@pytest.mark.parametrize(
    "nothing",
    [
        *(None, "", "  ", "\n", "null", " null ", '""', '"\\"\\""', "[]", "[ ]", [], {}, '"null"'),
        *('"[]"', '"{}"', "undefined", '" "'),
    ],
)
def test_no_arguments_are_an_empty_object(nothing):
    assert read_arguments(nothing) == "{}"


@pytest.mark.parametrize(
    "said",
    [
        *('{"a": null}', '{"a": ', "nul", "[1]", '"a"', "0", "false", '[""]', '{"a": []}', '"'),
        *('"{\\"a\\": 1}"', "{}", "{ }"),
    ],
)
def test_arguments_that_say_something_stay(said):
    assert read_arguments(said) == said


@pytest.mark.parametrize("wrong", [3, 1.5, True, False, [1], [None]])
def test_what_are_no_arguments(wrong):
    assert read_arguments(wrong) is None
