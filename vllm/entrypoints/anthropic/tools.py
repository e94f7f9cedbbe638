"""Tools of the Messages API as chats spell them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm.exceptions import UnsupportedFeatureError, UserInputError
from vllm.tokenizers.chat_tools import make_tool


def convert_tools(tools: Sequence[Any] | None) -> list[dict[str, Any]] | None:
    """Return a request's tools as chats spell them; None if there are none.

    Raises:
        UserInputError: One is malformed.
        UnsupportedFeatureError: One is Anthropic's own, such as a web search.
    """
    if not tools:
        return None
    return [_convert_tool(f"tools[{i}]", tool) for i, tool in enumerate(tools)]


def _convert_tool(where: str, tool: Any) -> dict[str, Any]:
    if not isinstance(tool, Mapping):
        raise UserInputError(f"{where} must be an object with name and input_schema.", "tools")
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise UnsupportedFeatureError(
            f"{where}.type={str(kind)[:60]!r} is not supported: only tools of your own are.",
            "tools",
        )
    if not isinstance(tool.get("input_schema"), Mapping):
        raise UserInputError(f"{where}.input_schema must be a JSON schema object.", "tools")
    function = {"name": tool.get("name"), "parameters": tool["input_schema"]}
    for name in ("description", "strict"):
        if tool.get(name) is not None:
            function[name] = tool[name]
    make_tool(where, function)  # checked here, where it has this API's place
    return {"type": "function", "function": function}


_CHOICE_OF_TYPE: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "auto": lambda choice: "auto",
    "any": lambda choice: "required",
    "none": lambda choice: "none",
    "tool": lambda choice: {"type": "function", "function": {"name": choice.get("name")}},
}


def convert_tool_choice(choice: Mapping[str, Any] | None) -> tuple[Any, bool | None]:
    """Return ``tool_choice`` as chats spell it, and whether calls may be parallel (None: unsaid).

    Raises:
        UserInputError: It is malformed.
    """
    if choice is None:
        return None, None
    kind = choice.get("type")
    convert = _CHOICE_OF_TYPE.get(kind) if isinstance(kind, str) else None
    if convert is None:
        raise UserInputError(
            f"tool_choice.type={str(kind)[:60]!r} is unknown: use {', '.join(_CHOICE_OF_TYPE)}.",
            "tool_choice",
        )
    if kind == "tool" and not isinstance(choice.get("name"), str):
        raise UserInputError("tool_choice.name must be a string.", "tool_choice")
    single = choice.get("disable_parallel_tool_use")
    if single is not None and not isinstance(single, bool):
        raise UserInputError(
            "tool_choice.disable_parallel_tool_use must be true or false.", "tool_choice"
        )
    return convert(choice), None if single is None else not single
