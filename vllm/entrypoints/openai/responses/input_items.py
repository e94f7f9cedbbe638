"""What a Responses request says, item by item: checked, given ids, turned into chat messages."""

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from vllm.entrypoints.openai.cache_hints import read_breakpoint_ttl
from vllm.entrypoints.openai.chat_assembly import ChatAssembler
from vllm.entrypoints.openai.opaque_reasoning import open_reasoning
from vllm.entrypoints.openai.responses.foreign_items import FOREIGN, add_foreign
from vllm.entrypoints.openai.responses.options import flat_name
from vllm.entrypoints.openai.responses.store import Item
from vllm.exceptions import UnsupportedFeatureError, UserInputError
from vllm.tokenizers.breakpoints import Breakpoint
from vllm.tokenizers.given_images import read_image_part
from vllm.tokenizers.tool_calls import read_arguments

MAX_BREAKPOINTS = 16
_INPUT_ROLES = ("user", "system", "developer")
_TEXT_TYPES = ("input_text", "output_text", "text")
_IMAGE = "input_image"
_ID_PREFIX_OF_TYPE = {
    "message": "msg_",
    "reasoning": "rs_",
    "function_call": "fc_",
    "function_call_output": "fco_",
}
_MAX_ID_CHARS = 256
# Of a call that broke off: its arguments are no JSON, and the model is not shown it again.
_CUT_OFF = "incomplete"


def new_item_id(item_type: str) -> str:
    """Return an id that no other item has."""
    return _ID_PREFIX_OF_TYPE.get(item_type, "item_") + uuid.uuid4().hex


def read_input(value: Any, find_item: Callable[[str], Item]) -> list[Item]:
    """Return the items of an ``input`` field, checked, in the form that ``input_items`` lists.

    Args:
        value: A text, or a list of items.
        find_item: Resolves an ``item_reference``.

    Raises:
        UserInputError: An item is malformed, or refers to one that is not stored.
        UnsupportedFeatureError: One is of a type or holds content that is not served.
    """
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise UserInputError(
            f"input must be a string or a list of items, not {type(value).__name__}.", "input"
        )
    return [_read_item(f"input[{i}]", item, find_item) for i, item in enumerate(value)]


def _read_item(where: str, item: Any, find_item: Callable[[str], Item]) -> Item:
    if not isinstance(item, Mapping):
        _refuse(where, f"must be an object, not {type(item).__name__}")
    kind = item.get("type")
    if kind is None:
        kind = "message" if "role" in item else "item_reference"
    if kind == "item_reference":
        return find_item(_text_field(where, item, "id"))
    reader = _READERS.get(kind) if isinstance(kind, str) else None
    is_foreign = isinstance(kind, str) and kind in FOREIGN
    if is_foreign:
        reader = _read_foreign
    if reader is None:
        known = ", ".join((*_READERS, "item_reference"))
        raise UnsupportedFeatureError(
            f"{where}.type={str(kind)[:60]!r} is not supported: use {known}.", "input"
        )
    # An empty id is how some clients write none.
    given = None if item.get("id") == "" else item.get("id")
    is_id = isinstance(given, str) and 0 < len(given) <= _MAX_ID_CHARS and given.isprintable()
    if given is not None and not is_id:
        _refuse(f"{where}.id", f"must be 1 to {_MAX_ID_CHARS} printable characters")
    head = {"id": given or new_item_id(kind), "type": kind}
    if is_foreign and isinstance(item.get("status"), str):
        head["status"] = item["status"]
    was_cut = kind == "function_call" and item.get("status") == _CUT_OFF
    return {"status": _CUT_OFF if was_cut else "completed", **reader(where, item), **head}


def _read_foreign(_where: str, item: Mapping[str, Any]) -> dict[str, Any]:
    """An item of another server as it came: whatever is in it can be shown or left out."""
    return dict(item)


def _read_message(where: str, item: Mapping[str, Any]) -> dict[str, Any]:
    role = item.get("role")
    if role == "assistant":
        parts = _read_parts(where, item.get("content"), takes_images=False)
        texts = [part["text"] for part in parts]
        content = [{"type": "output_text", "text": text, "annotations": []} for text in texts]
        return {"role": role, "content": content}
    if role not in _INPUT_ROLES:
        _refuse(
            f"{where}.role",
            f"is {str(role)[:60]!r}: use {', '.join((*_INPUT_ROLES, 'assistant'))}",
        )
    return {"role": role, "content": _read_parts(where, item.get("content"))}


def _read_parts(where: str, content: Any, *, takes_images: bool = True) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "input_text", "text": content}]
    if not isinstance(content, list):
        _refuse(f"{where}.content", "must be a string or a list of parts")
    return [
        _read_part(f"{where}.content[{i}]", part, takes_images) for i, part in enumerate(content)
    ]


def _read_part(where: str, part: Any, takes_images: bool) -> dict[str, Any]:
    if not isinstance(part, Mapping):
        _refuse(where, "must be an object with a type")
    kind = part.get("type")
    if kind == "refusal":
        return {"type": "input_text", "text": _text_field(where, part, "refusal")}
    read: dict[str, Any]
    if kind == _IMAGE and takes_images:
        read = _read_image(where, part)
    elif kind in _TEXT_TYPES:
        read = {"type": "input_text", "text": _text_field(where, part, "text")}
    else:
        known = (*_TEXT_TYPES, _IMAGE) if takes_images else _TEXT_TYPES
        raise UnsupportedFeatureError(
            f"{where}.type={str(kind)[:60]!r} is not supported: use {', '.join(known)}.", "input"
        )
    mark = part.get("prompt_cache_breakpoint")
    if mark is not None:
        read_breakpoint_ttl(mark, f"{where}.prompt_cache_breakpoint", "input")
        read["prompt_cache_breakpoint"] = mark
    return read


def _read_image(where: str, part: Mapping[str, Any]) -> dict[str, Any]:
    """A picture, as ``input_items`` lists it; its form is checked, its bytes are not read yet."""
    given = read_image_part(where, part, "input")
    url = part.get("image_url")
    url = url.get("url") if isinstance(url, Mapping) else url
    read = {"type": _IMAGE, "image_url": url, "detail": given.detail}
    return read if given.uuid is None else {**read, "uuid": given.uuid}


def without_image_urls(item: Item) -> Item:
    """Return an item without the addresses of its pictures, which may be megabytes."""
    changed = dict(item)
    for name in ("content", "output"):
        parts = item.get(name)
        if isinstance(parts, list):
            changed[name] = [
                {**part, "image_url": None} if part.get("type") == _IMAGE else part
                for part in parts
            ]
    return changed


def _read_call(where: str, item: Mapping[str, Any]) -> dict[str, Any]:
    names = ["call_id", "name"]
    names += ["namespace"] if item.get("namespace") is not None else []
    arguments = read_arguments(item.get("arguments"))
    if arguments is None:
        _refuse(f"{where}.arguments", "must be a string")
    return {**{name: _text_field(where, item, name) for name in names}, "arguments": arguments}


def _read_call_output(where: str, item: Mapping[str, Any]) -> dict[str, Any]:
    output = item.get("output")
    if not isinstance(output, str):
        parts = _read_parts(where, output)
        output = [
            {name: value for name, value in part.items() if name != "prompt_cache_breakpoint"}
            for part in parts
        ]
    return {"call_id": _text_field(where, item, "call_id"), "output": output}


def _read_reasoning(where: str, item: Mapping[str, Any]) -> dict[str, Any]:
    sealed = item.get("encrypted_content")
    parts = item.get("content")
    if parts is None:
        parts = []
    if not isinstance(parts, list):
        _refuse(f"{where}.content", "must be a list of reasoning_text parts")
    texts = [_text_field(f"{where}.content[{i}]", part, "text") for i, part in enumerate(parts)]
    if not texts and sealed is not None:
        if not isinstance(sealed, str):
            _refuse(f"{where}.encrypted_content", "must be a string")
        # What another server sealed cannot be read, and the conversation goes on without it.
        opened = open_reasoning(sealed)
        texts = [] if opened is None else [opened]
    content = [{"type": "reasoning_text", "text": text} for text in texts]
    return {"summary": _read_summary(where, item.get("summary")), "content": content}


def _read_summary(where: str, summary: Any) -> list[dict[str, Any]]:
    if summary is None:
        return []
    if not isinstance(summary, list):
        _refuse(f"{where}.summary", "must be a list of summary_text parts")
    return [
        {"type": "summary_text", "text": _text_field(f"{where}.summary[{i}]", part, "text")}
        for i, part in enumerate(summary)
    ]


_READERS: Mapping[str, Callable[[str, Mapping[str, Any]], dict[str, Any]]] = {
    "message": _read_message,
    "function_call": _read_call,
    "function_call_output": _read_call_output,
    "reasoning": _read_reasoning,
}


def _text_field(where: str, item: Any, name: str) -> str:
    if not isinstance(item, Mapping):
        _refuse(where, "must be an object")
    value = item.get(name)
    if not isinstance(value, str):
        _refuse(f"{where}.{name}", "must be a string")
    return str(value)


def _refuse(where: str, why: str) -> NoReturn:
    raise UserInputError(f"{where} {why}.", "input")


def make_chat(
    items: Sequence[Item], instructions: str | None = None
) -> tuple[list[dict[str, Any]], list[Breakpoint], list[int]]:
    """Return the chat messages of checked items, the places that clients marked, and origins.

    Origins are, for each message, the place of the item that it begins with; -1: the instructions.

    Args:
        items: Of the whole conversation, oldest first.
        instructions: The system message in front of them.

    Raises:
        UserInputError: There are too many marks.
    """
    chat = ChatAssembler()
    breakpoints: list[Breakpoint] = []
    if instructions:
        chat.add_message("system", [instructions])
    origins = [-1] * len(chat.messages)
    for place, item in enumerate(items):
        _add_item(chat, place, item, breakpoints)
        origins += [place] * (len(chat.messages) - len(origins))
    if len(breakpoints) > MAX_BREAKPOINTS:
        raise UserInputError(
            f"input holds {len(breakpoints)} prompt_cache_breakpoints: at most {MAX_BREAKPOINTS}.",
            "input",
        )
    return chat.messages, breakpoints, origins


def _chat_parts(where: str, parts: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The texts and pictures of a content."""
    return [
        read_image_part(f"{where}.content[{i}]", part, "input")
        if part["type"] == _IMAGE
        else part["text"]
        for i, part in enumerate(parts)
    ]


def _add_item(chat: ChatAssembler, place: int, item: Item, breakpoints: list[Breakpoint]) -> None:
    kind = item["type"]
    if kind == "reasoning":
        text = "".join(part["text"] for part in item["content"] or ())
        if text:
            chat.add_reasoning(text)
    elif kind == "function_call" and item.get("status") == _CUT_OFF:
        return
    elif kind == "function_call":
        space, name = item.get("namespace"), item["name"]
        name = flat_name(space, name) if isinstance(space, str) else name
        chat.add_call(item["call_id"], name, item["arguments"])
    elif kind == "function_call_output":
        output = item["output"]
        parts = [output] if isinstance(output, str) else _chat_parts(f"input[{place}]", output)
        chat.add_tool_result(item["call_id"], parts)
    elif kind in FOREIGN:
        add_foreign(chat, item)
    elif item["role"] == "assistant":
        chat.add_text("".join(part["text"] for part in item["content"]))
    else:
        chat.add_message(item["role"], _chat_parts(f"input[{place}]", item["content"]))
        for i, part in enumerate(item["content"]):
            mark = part.get("prompt_cache_breakpoint")
            if mark is not None:
                ttl_s = read_breakpoint_ttl(mark, "prompt_cache_breakpoint", "input")
                breakpoints.append(Breakpoint(chat.last_index, i, ttl_s))
