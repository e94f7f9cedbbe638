"""Tools of the Messages API as chats spell them."""

from typing import Any

import pytest

from vllm.entrypoints.anthropic.tools import convert_tool_choice, convert_tools
from vllm.exceptions import UnsupportedFeatureError, UserInputError
from vllm.tokenizers.chat_tools import parse_tool_choice, parse_tools

SCHEMA = {"type": "object", "properties": {}}
LOOK = {"name": "look", "description": "Looks.", "input_schema": SCHEMA, "type": "custom"}


def test_tools() -> None:
    assert convert_tools(None) is None
    assert convert_tools([]) is None
    (spec,) = parse_tools(convert_tools([LOOK]))
    assert spec.function == {"name": "look", "description": "Looks.", "parameters": SCHEMA}


def test_choices() -> None:
    tools = parse_tools(convert_tools([LOOK]))
    wanted = {"auto": "auto", "any": "required", "none": "none", "tool": "named"}
    for kind, mode in wanted.items():
        choice, is_parallel = convert_tool_choice({"type": kind, "name": "look"})
        assert parse_tool_choice(choice, tools).mode == mode
        assert is_parallel is None
    assert convert_tool_choice(None) == (None, None)
    single = {"type": "any", "disable_parallel_tool_use": True}
    assert convert_tool_choice(single) == ("required", False)


@pytest.mark.parametrize("tool", ["look", {"name": "look"}, {"name": "look", "input_schema": "{}"}])
def test_malformed_tools(tool: Any) -> None:
    with pytest.raises(UserInputError, match=r"tools\[0\]"):
        convert_tools([tool])


@pytest.mark.parametrize("name", ["name", "description"])
def test_a_malformed_tool_is_named_as_it_was_sent(name: str) -> None:
    with pytest.raises(UserInputError, match=rf"tools\[1\]\.{name} must be"):
        convert_tools([LOOK, {**LOOK, name: 5}])


@pytest.mark.parametrize("kind", ["bash_20250124", "web_search_20250305", "computer_20250124"])
def test_tools_of_anthropics_are_refused_by_name(kind: str) -> None:
    with pytest.raises(UnsupportedFeatureError, match=kind):
        convert_tools([{"type": kind, "name": "x"}])


@pytest.mark.parametrize(
    "choice",
    [{}, {"type": "all"}, {"type": "tool"}, {"type": "any", "disable_parallel_tool_use": 1}],
)
def test_malformed_choices(choice: Any) -> None:
    with pytest.raises(UserInputError, match="tool_choice"):
        convert_tool_choice(choice)
