"""Bodies of chat requests, as files hold them, in the chat dialect."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.entrypoints.anthropic.conversion import convert_messages
from vllm.entrypoints.anthropic.tools import convert_tools
from vllm.entrypoints.openai.responses.input_items import make_chat, read_input
from vllm.entrypoints.openai.responses.options import chat_tools
from vllm.exceptions import ResponseNotFoundError, UserInputError
from vllm.tokenizers import ChatOptions
from vllm.tokenizers.breakpoints import Breakpoint
from vllm.tokenizers.chat_tools import parse_tools

# Blocks that no chat has.
_BLOCK_TYPES = ("tool_use", "tool_result", "thinking")


@dataclass(frozen=True, slots=True)
class ChatBody:
    """A body in the chat dialect.

    Attributes:
        messages: Of the chat.
        options: Of its prompt.
        breakpoints: Places that the client marked.
        moves_results: Whether pictures in results of calls may go into a question behind them.
    """

    messages: Sequence[Mapping[str, Any]]
    options: ChatOptions
    breakpoints: Sequence[Breakpoint] = ()
    moves_results: bool = False


def _guess_api(body: Mapping[str, Any]) -> str:
    if "input" in body:
        return "responses"
    if "system" in body or "cache_control" in body:
        return "messages"
    messages = body.get("messages")
    contents = [m.get("content") for m in messages or () if isinstance(m, Mapping)]
    blocks = [block for content in contents if isinstance(content, list) for block in content]
    found = [block for block in blocks if isinstance(block, Mapping)]
    is_anthropic = any(b.get("type") in _BLOCK_TYPES or "cache_control" in b for b in found)
    return "messages" if is_anthropic else "chat"


def read_chat(body: Mapping[str, Any], api: str | None = None) -> ChatBody:
    """Return the chat of a request's body.

    Args:
        body: Of ``/v1/chat/completions``, ``/v1/messages`` or ``/v1/responses``.
        api: "chat", "messages" or "responses"; None: as the body looks.

    Raises:
        UserInputError: It is malformed.
    """
    api = api or _guess_api(body)
    kwargs = body.get("chat_template_kwargs") or {}
    if api == "messages":
        converted = convert_messages(
            body.get("system"),
            body.get("messages") or (),
            tools=body.get("tools") or (),
            cache_control=body.get("cache_control"),
        )
        is_on = (body.get("thinking") or {}).get("type") in ("enabled", "adaptive")
        options = ChatOptions(
            add_generation_prompt=not converted.continues,
            continue_final_message=converted.continues,
            template_kwargs={"thinking": is_on, "enable_thinking": is_on, **kwargs},
            tools=parse_tools(convert_tools(body.get("tools"))),
        )
        return ChatBody(converted.messages, options, converted.breakpoints, moves_results=True)
    if api == "responses":
        items = read_input(body.get("input") or [], _find_nothing)
        made, breakpoints, _ = make_chat(items, body.get("instructions"))
        options = ChatOptions(
            reasoning_effort=(body.get("reasoning") or {}).get("effort"),
            template_kwargs=kwargs,
            tools=parse_tools(chat_tools(body.get("tools")).functions),
        )
        return ChatBody(made, options, breakpoints, moves_results=True)
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise UserInputError("The body has no messages.", "messages")
    continues = bool(body.get("continue_final_message"))
    options = ChatOptions(
        add_generation_prompt=body.get("add_generation_prompt") is not False and not continues,
        continue_final_message=continues,
        reasoning_effort=body.get("reasoning_effort"),
        template_kwargs=kwargs,
        tools=parse_tools(body.get("tools")),
    )
    return ChatBody(messages, options)


def _find_nothing(name: str) -> Any:
    raise ResponseNotFoundError(f"There is no item {name[:80]!r}: no response is stored.", "input")
