"""Items of conversations that began on other servers, so that they can go on here.

A call of a tool that only other servers have is shown to the model as any call, with what came of
it; what shows nothing that a text could say is left out, and named in ``X-Ignored-Fields``. Tools
that an item offers join the request's own.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from vllm.entrypoints.openai.chat_assembly import ChatAssembler
from vllm.entrypoints.openai.responses.store import Item

# They bring tools.
_OFFERS = frozenset({"additional_tools", "tool_search_output"})
# They say nothing to a model of texts, or what they found is not in them.
LEFT_OUT = frozenset(
    {
        *("web_search_call", "file_search_call", "image_generation_call", "ghost_snapshot"),
        *("mcp_list_tools", "mcp_approval_request", "mcp_approval_response"),
        *("tool_search_call", "compaction", "compaction_summary", "context_compaction"),
    }
)
# What of a call its arguments are, in the order in which they are looked for.
_CALLS: Mapping[str, tuple[str, ...]] = {
    "custom_tool_call": ("input",),
    "local_shell_call": ("action",),
    "shell_call": ("action",),
    "apply_patch_call": ("operation",),
    "computer_call": ("action", "actions"),
    "mcp_call": ("arguments",),
    "code_interpreter_call": ("code",),
}
_OUTPUTS = frozenset(
    {
        *("custom_tool_call_output", "local_shell_call_output", "shell_call_output"),
        *("apply_patch_call_output", "computer_call_output"),
    }
)
FOREIGN = frozenset({*_OFFERS, *LEFT_OUT, *_CALLS, *_OUTPUTS})
# Fields that hold what a call gave, in an item of its own or in the call's.
_RESULTS = ("output", "outputs", "result", "error")


def find_left_out(items: Sequence[Any] | str | None) -> list[str]:
    """Return what of an ``input`` is left out of the prompt, in the request's words."""
    return [
        f"input[{i}].{item['type']}"
        for i, item in enumerate(items if isinstance(items, list) else ())
        if isinstance(item, Mapping) and str(item.get("type")) in LEFT_OUT
    ]


def find_offers(items: Sequence[Item]) -> list[tuple[str, Sequence[Any]]]:
    """Return the tools that items offer, each list with what to call it in an error."""
    return [
        (f"input[{i}].tools", item["tools"])
        for i, item in enumerate(items)
        if item["type"] in _OFFERS and isinstance(item.get("tools"), list)
    ]


def add_foreign(chat: ChatAssembler, item: Item) -> None:
    """Show an item to the model, if it can be shown.

    Mutates: chat.
    """
    kind = item["type"]
    if kind in _CALLS:
        call_id = _call_id(item)
        chat.add_call(call_id, _name(item), _arguments(item, _CALLS[kind]))
        given = _find_result(item)
        if kind != "computer_call" and given is not None:
            chat.add_tool_result(call_id, [_as_text(given)])
    elif kind in _OUTPUTS:
        given = _find_result(item)
        chat.add_tool_result(_call_id(item), ["" if given is None else _as_text(given)])


def _call_id(item: Item) -> str:
    for name in ("call_id", "id"):
        value = item.get(name)
        if isinstance(value, str) and value:
            return value
    return str(item["id"])


def _name(item: Item) -> str:
    """The tool's name: its own, or that of its kind."""
    name = item.get("name")
    return name if isinstance(name, str) and name else str(item["type"]).removesuffix("_call")


def _arguments(item: Item, fields: Sequence[str]) -> str:
    """The arguments as the text of a JSON object."""
    field = next((name for name in fields if item.get(name) is not None), None)
    if field is None:
        return "{}"
    value = item[field]
    if field == "arguments" and isinstance(value, str):
        return value
    return json.dumps(value if isinstance(value, Mapping) else {field: value}, ensure_ascii=False)


def _find_result(item: Item) -> Any:
    return next((item[name] for name in _RESULTS if item.get(name) is not None), None)


def _as_text(value: Any) -> str:
    """What a call gave, as text: texts of parts, else its JSON."""
    if isinstance(value, str):
        return value
    parts = value if isinstance(value, list) else [value]
    return "\n".join(map(_part_text, parts))


def _part_text(part: Any) -> str:
    if isinstance(part, Mapping):
        for name in ("text", "logs"):
            if isinstance(part.get(name), str):
                return str(part[name])
    return part if isinstance(part, str) else json.dumps(part, ensure_ascii=False)
