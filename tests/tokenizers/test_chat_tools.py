from typing import Any

import pytest

from vllm.exceptions import UnsupportedFeatureError, UserInputError
from vllm.tokenizers.chat_tools import ToolChoice, narrow_tools, parse_tool_choice, parse_tools


def function(**fields):
    return {"type": "function", "function": {"name": "f", **fields}}


def test_functions_are_taken_as_they_were_sent():
    schema = {"type": "object", "properties": {"x": {"type": "string"}}}
    (first, second) = parse_tools(
        [function(description="d", parameters=schema, strict=True), function(name="g")]
    )
    assert (first.name, first.parameters) == ("f", schema)
    assert first.function == {"name": "f", "description": "d", "parameters": schema, "strict": True}
    assert (second.name, second.parameters) == ("g", {})
    assert parse_tools(None) == ()


@pytest.mark.parametrize(
    ("tools", "shown"),
    [
        ("f", "list"),
        (["f"], r"tools\[0\]"),
        ([{"type": "function"}], "function must be"),
        ([function(name="")], "name"),
        ([function(name='a"b')], "name"),
        ([function(name="x" * 300)], "256"),
        ([function(name=3)], "name"),
        ([function(description=3)], "description"),
        ([function(parameters=[])], "parameters"),
        ([function(), function()], "two functions named 'f'"),
    ],
)
def test_malformed_tools(tools, shown):
    with pytest.raises(UserInputError, match=shown) as caught:
        parse_tools(tools)
    assert caught.value.param == "tools"


def test_other_kinds_of_tools():
    with pytest.raises(UnsupportedFeatureError, match="'web_search'"):
        parse_tools([{"type": "web_search"}])


TOOLS = parse_tools([function()])
NAMED = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("choice", "tools", "expected"),
    [
        (None, (), ToolChoice("none")),
        (None, TOOLS, ToolChoice("auto")),
        ("none", (), ToolChoice("none")),
        ("none", TOOLS, ToolChoice("none")),
        ("auto", TOOLS, ToolChoice("auto")),
        ("auto", parse_tools([]), ToolChoice("none")),
        ("required", TOOLS, ToolChoice("required")),
        (NAMED, TOOLS, ToolChoice("named", "f")),
    ],
)
def test_choices(choice, tools, expected):
    assert parse_tool_choice(choice, tools) == expected
    assert expected.is_forced == (expected.mode in ("required", "named"))


def allowed(*names: str, mode: str = "auto") -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_a_choice_may_list_the_tools_it_allows():
    tools = parse_tools([{"function": {"name": name}} for name in "abc"])
    assert narrow_tools("required", tools) == (ToolChoice("required"), tools)
    assert narrow_tools(allowed("c", "a"), tools) == (ToolChoice("auto"), (tools[0], tools[2]))
    assert narrow_tools(allowed("b", mode="required"), tools)[0] == ToolChoice("required")


@pytest.mark.parametrize(
    ("choice", "shown"),
    [
        (allowed("d"), "'d'"),
        (allowed(), "needs mode"),
        (allowed("a", mode="none"), "needs mode"),
        ({"type": "allowed_tools"}, "needs mode"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": ["auto"]}}, "needs"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{}]}}, "must be"),
    ],
)
def test_wrong_lists_of_allowed_tools(choice, shown):
    with pytest.raises(UserInputError, match=shown) as caught:
        narrow_tools(choice, parse_tools([{"function": {"name": "a"}}]))
    assert caught.value.param == "tool_choice"


@pytest.mark.parametrize(
    ("choice", "tools", "shown"),
    [
        ("required", (), "needs tools"),
        (NAMED, (), "needs tools"),
        ("any", TOOLS, "must be"),
        ({"type": "function"}, TOOLS, "must be"),
        ({"type": "function", "function": {"name": "g"}}, TOOLS, "'g'"),
        (3, TOOLS, "must be"),
    ],
)
def test_wrong_choices(choice, tools, shown):
    with pytest.raises(UserInputError, match=shown) as caught:
        parse_tool_choice(choice, tools)
    assert caught.value.param == "tool_choice"
