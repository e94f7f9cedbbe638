"""Tools for a chat template that knows of none: told in the system text, as a person would.

A template that ignores ``tools`` drops calls and results of earlier turns too, so these become
text as well: a call as the model is asked to write it, a result as the next turn's text.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from vllm.tokenizers.chat_messages import ChatMessage, ImageRef, Part
from vllm.tokenizers.chat_tools import ToolSpec
from vllm.tokenizers.tool_calls import MessageCall

# The text of calls, as the model's parser reads them.
WriteCalls = Callable[[Sequence[MessageCall]], str]
_BETWEEN = "\n\n"
# What stands for an argument in the example, by its type.
_SAMPLES: Mapping[str, Any] = {
    "string": "...",
    "integer": 1,
    "number": 1.5,
    "boolean": True,
    "array": [],
    "object": {},
    "null": None,
}


def describe_tools(
    messages: Iterable[tuple[int, ChatMessage]], tools: Sequence[ToolSpec], write_calls: WriteCalls
) -> list[tuple[int, ChatMessage]]:
    """Return a chat's messages with its tools, calls and results as plain text.

    Args:
        messages: With their places in the request.
        tools: What the model may call.
        write_calls: Writes calls as they are to be written.
    """
    told: list[tuple[int, ChatMessage]] = []
    names: dict[str | None, str] = {}
    for place, message in messages:
        if message.tool_calls:
            names |= {call.id: call.name for call in message.tool_calls}
            text = _join(message.content, write_calls(message.tool_calls))
            message = replace(
                message, content=text, parts=_behind_images(message, text), tool_calls=()
            )
        elif message.role == "tool":
            name = message.name or names.get(message.tool_call_id)
            head = f"Result of {name}:" if name else "Result:"
            text = f"{head}\n{message.content}"
            message = ChatMessage("user", text, parts=_behind_images(message, text))
        told.append((place, message))
    if not tools:
        return told
    text = _introduce(tools, write_calls)
    place, first = told[0]
    if first.role == "system":
        whole = _join(first.content, text)
        joined = replace(first, content=whole, parts=_behind_images(first, whole))
        return [(place, joined), *told[1:]]
    return [(place, ChatMessage("system", text)), *told]


def _behind_images(message: ChatMessage, text: str) -> tuple[Part, ...] | None:
    """The parts of a message that has another text now: its pictures, then that; None: no picture.

    Pictures stand in front, as models are asked about them in training.
    """
    images = [part for part in message.parts or () if isinstance(part, ImageRef)]
    return (*images, text) if images else None


def _introduce(tools: Sequence[ToolSpec], write_calls: WriteCalls) -> str:
    """The wording, in the one place where it stands."""
    lines = "\n".join(json.dumps(tool.function, ensure_ascii=False) for tool in tools)
    example = write_calls([MessageCall(None, tools[0].name, json.dumps(_sample(tools[0])))])
    return (
        f"You can call these functions:\n\n{lines}\n\n"
        "To call a function, answer with nothing but the call. It is written like this, with the "
        f"name and the arguments that you need:\n\n{example}\n\n"
        "The next message then brings the result. Answer in words where no function helps."
    )


def _sample(tool: ToolSpec) -> dict[str, Any]:
    """Return arguments of an example: those that must be there, else the first."""
    properties = tool.parameters.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    required = tool.parameters.get("required")
    names = [n for n in required if n in properties] if isinstance(required, list) else []
    return {name: _sample_value(properties[name]) for name in names or list(properties)[:1]}


def _sample_value(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return _SAMPLES["string"]
    values = schema.get("enum")
    if isinstance(values, list) and values:
        return values[0]
    kind = schema.get("type")
    kind = kind[0] if isinstance(kind, list) and kind else kind
    return _SAMPLES.get(kind, "...") if isinstance(kind, str) else _SAMPLES["string"]


def _join(*texts: str) -> str:
    return _BETWEEN.join(text for text in texts if text)
