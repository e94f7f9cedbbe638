"""The options of a Responses request in the dialect of chats."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from vllm.entrypoints.openai.pipeline.single_answer import check_single
from vllm.entrypoints.openai.responses.protocol import InputTokensRequest
from vllm.exceptions import UnsupportedFeatureError, UserInputError
from vllm.tokenizers.chat_tools import make_tool

INCLUDE_LOGPROBS = "message.output_text.logprobs"
INCLUDE_SEALED_REASONING = "reasoning.encrypted_content"
INCLUDE_IMAGE_URLS = "message.input_image.image_url"
# Of tools and contents that are not served: there is nothing to include.
_EMPTY_INCLUDES = (
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
_MAX_METADATA = 16
_MAX_METADATA_KEY = 64
_MAX_METADATA_VALUE = 512
# Tools of OpenAI's own that a model may leave unused, so requests with them go on without.
_HOSTED_TOOLS = (
    *("apply_patch", "code_interpreter", "computer", "computer_use", "computer_use_preview"),
    *("file_search", "image_generation", "local_shell", "mcp", "programmatic_tool_calling"),
    *("shell", "tool_search", "web_search", "web_search_preview"),
)
# Between a namespace and a function in it, where models see one name.
NAMESPACE_SEPARATOR = "__"


def check_foreign(extra: Mapping[str, Any]) -> None:
    """Refuse fields of other APIs.

    Raises:
        UserInputError: One belongs to another API.
    """
    for name, right in (("messages", "input"), ("max_completion_tokens", "max_output_tokens")):
        if extra.get(name) is not None:
            raise UserInputError(f"{name} belongs to another API: use {right}.", name)


@dataclass(frozen=True, slots=True)
class ChatTools:
    """The tools of a request as chats spell them.

    Attributes:
        functions: They; None: there are none.
        namespaces: Namespace and name of each function that has a namespace, by its name for the
            model.
        ignored: What was left out, in the request's words.
    """

    functions: list[dict[str, Any]] | None = None
    namespaces: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    ignored: Sequence[str] = ()


def join_tools(first: ChatTools, more: ChatTools) -> ChatTools:
    """Return both; of functions with one name, the first."""
    names = {tool["function"]["name"] for tool in first.functions or ()}
    new = [tool for tool in more.functions or () if tool["function"]["name"] not in names]
    return ChatTools(
        [*(first.functions or ()), *new] or None,
        {**more.namespaces, **first.namespaces},
        [*first.ignored, *more.ignored],
    )


def chat_tools(tools: Sequence[Any] | None, param: str = "tools") -> ChatTools:
    """Return a request's functions; hosted tools, which a model may leave unused, are left out.

    Args:
        tools: As the request has them.
        param: What to call them in an error.

    Raises:
        UserInputError: One is malformed.
        UnsupportedFeatureError: One is of a kind that nobody knows.
    """
    functions: list[dict[str, Any]] = []
    namespaces: dict[str, tuple[str, str]] = {}
    ignored: list[str] = []
    for i, tool in enumerate(tools or ()):
        where = f"{param}[{i}]"
        if not isinstance(tool, Mapping):
            _refuse(where, "must be an object with type and name", "tools")
        kind = str(tool.get("type"))
        if kind == "namespace":
            space = _tool_name(tool, where, "tools")
            inner = tool.get("tools")
            if not isinstance(inner, list):
                _refuse(f"{where}.tools", "must be a list of functions", "tools")
            for j, entry in enumerate(inner):
                made = _chat_tool(f"{where}.tools[{j}]", entry)
                name = _tool_name(made["function"], f"{where}.tools[{j}]", "tools")
                made["function"]["name"] = flat = flat_name(space, name)
                namespaces[flat] = (space, name)
                functions.append(made)
        elif kind.startswith(_HOSTED_TOOLS):
            ignored.append(f"{where}.{kind}")
        else:
            functions.append(_chat_tool(where, tool))
    return ChatTools(functions or None, namespaces, ignored)


def flat_name(namespace: str, name: str) -> str:
    """Return what the model calls a function of a namespace."""
    return f"{namespace.rstrip('_')}{NAMESPACE_SEPARATOR}{name}"


def _chat_tool(where: str, tool: Any) -> dict[str, Any]:
    if not isinstance(tool, Mapping):
        _refuse(where, "must be an object with type and name", "tools")
    kind = tool.get("type")
    if kind == "custom":
        raise UnsupportedFeatureError(
            f"{where}.type='custom' is not supported: give a 'function' with one text parameter.",
            "tools",
        )
    if kind != "function":
        raise UnsupportedFeatureError(
            f"{where}.type={str(kind)[:60]!r} is not supported: use 'function' or 'namespace'.",
            "tools",
        )
    names = ("name", "description", "parameters", "strict")
    function = {name: tool[name] for name in names if tool.get(name) is not None}
    if "name" not in function and isinstance(tool.get("function"), Mapping):
        _refuse(where, "is spelled as for chats: put name and parameters beside type", "tools")
    make_tool(where, function)  # checked here, where it has this API's place
    return {"type": "function", "function": function}


def chat_tool_choice(
    choice: Any, tools: list[dict[str, Any]] | None
) -> tuple[Any, list[dict[str, Any]] | None]:
    """Return ``tool_choice`` as chats spell it, and the tools that it leaves.

    Raises:
        UserInputError: It is malformed, or allows what is no tool of the request.
        UnsupportedFeatureError: It names a built-in tool.
    """
    if choice is None or isinstance(choice, str):
        return choice, tools
    if not isinstance(choice, Mapping):
        _refuse("tool_choice", "must be none, auto, required or an object", "tool_choice")
    kind = choice.get("type")
    if kind == "function":
        return {"type": "function", "function": {"name": _chosen_name(choice)}}, tools
    if kind != "allowed_tools":
        raise UnsupportedFeatureError(
            f"tool_choice.type={str(kind)[:60]!r} is not supported: use function or allowed_tools.",
            "tool_choice",
        )
    mode, allowed = choice.get("mode"), choice.get("tools")
    if mode not in ("auto", "required") or not isinstance(allowed, list) or not allowed:
        _refuse("tool_choice", "needs mode auto or required, and tools", "tool_choice")
    names = [_chosen_name(entry) for entry in allowed]
    known = {tool["function"].get("name"): tool for tool in tools or ()}
    unknown = [name for name in names if name not in known]
    if unknown:
        _refuse("tool_choice", f"allows {unknown[0][:60]!r}, which is no tool here", "tool_choice")
    return mode, [tool for name, tool in known.items() if name in names]


def _chosen_name(entry: Any) -> str:
    name = _tool_name(entry, "tool_choice", "tool_choice")
    space = entry.get("namespace")
    return flat_name(space, name) if isinstance(space, str) else name


def _tool_name(entry: Any, where: str, param: str) -> str:
    name = entry.get("name") if isinstance(entry, Mapping) else None
    if not isinstance(name, str) or not name:
        _refuse(where, "must say a function's name", param)
    return str(name)


def chat_response_format(text: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return ``text.format`` as the ``response_format`` of chats; None for free text.

    Raises:
        UserInputError: It is malformed.
    """
    wanted = (text or {}).get("format")
    if wanted is None:
        return None
    kind = wanted.get("type") if isinstance(wanted, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "json_object"}
    if kind != "json_schema":
        _refuse("text.format.type", "must be text, json_object or json_schema", "text")
    if not isinstance(wanted.get("schema"), Mapping):
        _refuse("text.format.schema", "must be a JSON schema object", "text")
    names = ("name", "schema", "strict", "description")
    schema = {name: wanted[name] for name in names if wanted.get(name) is not None}
    return {"type": "json_schema", "json_schema": {"name": "answer", **schema}}


def chat_effort(reasoning: Mapping[str, Any] | None) -> str | None:
    """Return ``reasoning.effort``. A ``summary`` is accepted: answers bring the reasoning itself.

    Raises:
        UserInputError: It is no text.
    """
    effort = (reasoning or {}).get("effort")
    if effort is not None and not isinstance(effort, str):
        _refuse("reasoning.effort", "must be a string", "reasoning")
    return effort


def check_include(include: Sequence[Any] | None) -> frozenset[str]:
    """Return what else the answer shall hold.

    Raises:
        UserInputError: A name is unknown.
    """
    known = (
        *(INCLUDE_LOGPROBS, INCLUDE_SEALED_REASONING, INCLUDE_IMAGE_URLS),
        *_EMPTY_INCLUDES,
    )
    for name in include or ():
        if name not in known:
            _refuse("include", f"holds {str(name)[:60]!r}: use {', '.join(known)}", "include")
    return frozenset(include or ())


def check_metadata(metadata: Mapping[str, Any] | None) -> dict[str, str] | None:
    """Return metadata that is small enough to keep.

    Raises:
        UserInputError: It is not.
    """
    if metadata is None:
        return None
    if len(metadata) > _MAX_METADATA:
        _refuse("metadata", f"has {len(metadata)} keys: at most {_MAX_METADATA}", "metadata")
    for key, value in metadata.items():
        if len(key) > _MAX_METADATA_KEY:
            _refuse("metadata", f"has a key above {_MAX_METADATA_KEY} characters", "metadata")
        if not isinstance(value, str) or len(value) > _MAX_METADATA_VALUE:
            _refuse(
                f"metadata[{key[:60]!r}]",
                f"must be a string of at most {_MAX_METADATA_VALUE} characters",
                "metadata",
            )
    return dict(metadata)


def check_limits(body: InputTokensRequest) -> None:
    """Refuse what no prompt can honour.

    Raises:
        UserInputError: A field belongs to another API.
        UnsupportedFeatureError: Texts shall be cut to fit.
    """
    if body.truncation not in (None, "disabled"):
        raise UnsupportedFeatureError(
            f"truncation={str(body.truncation)[:60]!r} is not supported: leave it out, and send "
            "what fits.",
            "truncation",
        )
    check_single(body)
    if body.max_tokens is not None:
        raise UserInputError(
            "max_tokens belongs to another API: use max_output_tokens.", "max_tokens"
        )


def _refuse(where: str, why: str, param: str) -> NoReturn:
    raise UserInputError(f"{where} {why}.", param)
