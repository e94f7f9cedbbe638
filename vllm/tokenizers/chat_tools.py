"""The tools of a chat request, checked."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.exceptions import UnsupportedFeatureError, UserInputError

_MAX_NAME_CHARS = 256


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A function that the model may call.

    Attributes:
        name: Of the function.
        function: The ``function`` object of the request as it was sent, which prompts show, without
            its nulls.
        parameters: The JSON schema of its arguments; empty: it takes what it gets.
    """

    name: str
    function: Mapping[str, Any]
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the model may, must or must not call.

    Attributes:
        mode: "none", "auto", "required", or "named".
        name: Of the one function to call, with mode "named".
    """

    mode: str
    name: str | None = None

    @property
    def is_forced(self) -> bool:
        """Whether an answer without a call is ruled out."""
        return self.mode in ("required", "named")


NO_TOOLS = ToolChoice("none")


def parse_tools(tools: Any) -> tuple[ToolSpec, ...]:
    """Check a request's ``tools`` in the chat dialect: ``{type: function, function: {...}}``.

    Raises:
        UserInputError: One is malformed.
        UnsupportedFeatureError: One is no function.
    """
    if tools is None:
        return ()
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise UserInputError("tools must be a list of functions.", "tools")
    if not tools:
        return ()
    specs = tuple(_parse_tool(f"tools[{i}]", tool) for i, tool in enumerate(tools))
    twice, times = Counter(spec.name for spec in specs).most_common(1)[0]
    if times > 1:
        raise UserInputError(f"tools holds two functions named {twice!r}: rename one.", "tools")
    return specs


def _parse_tool(where: str, tool: Any) -> ToolSpec:
    if not isinstance(tool, Mapping):
        raise UserInputError(f"{where} must be an object with type and function.", "tools")
    kind = tool.get("type", "function")
    if kind != "function":
        raise UnsupportedFeatureError(
            f"{where}.type={str(kind)[:60]!r} is not supported: only 'function' is.", "tools"
        )
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise UserInputError(f"{where}.function must be an object with a name.", "tools")
    return make_tool(f"{where}.function", function)


def make_tool(where: str, function: Mapping[str, Any]) -> ToolSpec:
    """Check one function: its name, description and parameters.

    Raises:
        UserInputError: It has no usable name, or its parameters are no JSON schema object.
    """
    name = function.get("name")
    is_name = isinstance(name, str) and name.isprintable() and not set(name) & set("\"<>'\\")
    if not is_name or not 1 <= len(str(name)) <= _MAX_NAME_CHARS:
        raise UserInputError(
            f"{where}.name must be a string of 1 to {_MAX_NAME_CHARS} printable characters without "
            "quotes, backslashes and angle brackets.",
            "tools",
        )
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise UserInputError(f"{where}.description must be a string.", "tools")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise UserInputError(f"{where}.parameters must be a JSON schema object.", "tools")
    # Null is how many clients spell "absent"; a template would print it.
    shown = {field: value for field, value in function.items() if value is not None}
    return ToolSpec(str(name), shown, parameters or {})


def parse_tool_choice(choice: Any, tools: Sequence[ToolSpec]) -> ToolChoice:
    """Check a request's ``tool_choice``; absent it is "auto", which without tools is "none".

    Raises:
        UserInputError: It is unknown, needs tools, or names one that is not among them.
    """
    if choice in (None, "auto"):
        return ToolChoice("auto") if tools else NO_TOOLS
    if choice == "none":
        return NO_TOOLS
    name = _chosen_name(choice)
    if not tools:
        raise UserInputError(
            "tool_choice asks for a call, which needs tools: give some, or use auto.",
            "tool_choice",
        )
    if name is None:
        return ToolChoice(str(choice))
    if all(tool.name != name for tool in tools):
        raise UserInputError(
            f"tool_choice names {name[:60]!r}, which is not among the tools.", "tool_choice"
        )
    return ToolChoice("named", name)


def narrow_tools(
    choice: Any, tools: tuple[ToolSpec, ...]
) -> tuple[ToolChoice, tuple[ToolSpec, ...]]:
    """Check ``tool_choice`` where it may also list the tools that are allowed.

    Returns:
        The choice, and the tools that it leaves.

    Raises:
        UserInputError: As ``parse_tool_choice``; or what is allowed is no tool of the request.
    """
    if not isinstance(choice, Mapping) or choice.get("type") != "allowed_tools":
        return parse_tool_choice(choice, tools), tools
    allowed = choice.get("allowed_tools")
    found = allowed if isinstance(allowed, Mapping) else {}
    mode, entries = found.get("mode"), found.get("tools")
    is_list = isinstance(entries, list) and all(isinstance(entry, Mapping) for entry in entries)
    if mode not in ("auto", "required") or not is_list or not entries:
        raise UserInputError(
            "tool_choice.allowed_tools needs mode 'auto' or 'required', and tools: a list of "
            "{'type': 'function', 'function': {'name': ...}}.",
            "tool_choice",
        )
    names = {parse_tool_choice(entry, tools).name for entry in entries}
    return ToolChoice(mode), tuple(tool for tool in tools if tool.name in names)


def _chosen_name(choice: Any) -> str | None:
    if choice == "auto" or choice == "required":
        return None
    if isinstance(choice, Mapping) and choice.get("type", "function") == "function":
        function = choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if isinstance(name, str):
            return name
    raise UserInputError(
        "tool_choice must be 'none', 'auto', 'required', {'type': 'function', 'function': "
        "{'name': ...}} or {'type': 'allowed_tools', 'allowed_tools': {...}}.",
        "tool_choice",
    )
