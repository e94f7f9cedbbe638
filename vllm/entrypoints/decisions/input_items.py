"""The input of a decision: a text or items in order, checked, as messages of a chat."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import msgspec

from vllm.entrypoints.openai.cache_hints import read_breakpoint_ttl
from vllm.entrypoints.openai.chat_assembly import ChatAssembler, as_content
from vllm.entrypoints.openai.responses.options import flat_name
from vllm.exceptions import UnsupportedFeatureError, UserInputError
from vllm.tokenizers.breakpoints import Breakpoint
from vllm.tokenizers.tool_calls import read_arguments

# As OpenAI's contract has them.
MAX_JSON_LEVELS = 32
MAX_JSON_VALUES = 10_000
MAX_JSON_BYTES = 256 * 1024
# Of the places that a client marks the last ones count.
_MAX_MARKS = 4
_PLAIN_ROLES = ("system", "developer")
_PHASES = (None, "commentary", "final_answer")


@dataclass(frozen=True, slots=True)
class Conversation:
    """What every question is about.

    Attributes:
        messages: In the chat dialect; at least one.
        breakpoints: Places that the client marked.
    """

    messages: Sequence[dict[str, Any]]
    breakpoints: Sequence[Breakpoint] = ()


def read_input(value: Any) -> Conversation:
    """Check an ``input`` field.

    Raises:
        UserInputError: An item is malformed, or an output has no call before it.
        UnsupportedFeatureError: One holds an image, or is of a kind that is not served.
    """
    if isinstance(value, str):
        return Conversation([{"role": "user", "content": value}])
    if not isinstance(value, list):
        _refuse("input", f"must be a string or a list of items, not {type(value).__name__}")
    if not value:
        _refuse("input", "is empty: give at least one item")
    reader = _Reader()
    for i, item in enumerate(value):
        reader.add(f"input[{i}]", item)
    return Conversation(reader.chat.messages, reader.marks[-_MAX_MARKS:])


def read_parts(where: str, content: Any, *, may_hold_json: bool = True) -> list[str]:
    """Return the texts of a content: a string, or a list of parts.

    Raises:
        UserInputError: It is malformed.
        UnsupportedFeatureError: A part is no text.
    """
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list) or not content:
        _refuse(where, "must be a string or a list of parts, at least one")
    return [
        _read_part(f"{where}[{i}]", part, may_hold_json=may_hold_json)
        for i, part in enumerate(content)
    ]


def read_json(where: str, value: Any) -> str:
    """Return a JSON value as compact text.

    Raises:
        UserInputError: It is larger than a decision may hold.
    """
    _check_json(where, value)
    try:
        encoded = msgspec.json.encode(value)
    except (UnicodeEncodeError, RecursionError, TypeError, ValueError) as error:
        raise UserInputError(
            f"{where} cannot be written as JSON: {error}.", _param(where)
        ) from error
    if len(encoded) > MAX_JSON_BYTES:
        _refuse(where, f"takes {len(encoded)} bytes as compact JSON: at most {MAX_JSON_BYTES}")
    return encoded.decode()


def _check_json(where: str, value: Any) -> None:
    level, count = [value], 0
    for _ in range(MAX_JSON_LEVELS + 1):
        count += len(level)
        if count > MAX_JSON_VALUES:
            _refuse(where, f"holds more than {MAX_JSON_VALUES} values")
        containers = [entry for entry in level if isinstance(entry, dict | list)]
        if not containers:
            return
        level = []
        for entry in containers:
            level += entry.values() if isinstance(entry, dict) else entry
    _refuse(where, f"is nested more than {MAX_JSON_LEVELS} levels deep")


@dataclass(slots=True)
class _Reader:
    """Adds items to a chat.

    Owns: the chat, the marks, and the ids of calls so far.
    """

    chat: ChatAssembler = field(default_factory=ChatAssembler)
    marks: list[Breakpoint] = field(default_factory=list)
    call_ids: set[str] = field(default_factory=set)

    def add(self, where: str, item: Any) -> None:
        if not isinstance(item, Mapping):
            _refuse(where, f"must be an object, not {type(item).__name__}")
        kind = item.get("type", "message" if "role" in item else None)
        if kind == "message":
            self._add_message(where, item)
        elif kind in ("function_call", "custom_tool_call"):
            self._add_call(where, item, kind)
        elif kind in ("function_call_output", "custom_tool_call_output"):
            self._add_output(where, item)
        else:
            raise UnsupportedFeatureError(
                f"{where}.type={str(kind)[:60]!r} is not supported: use message, function_call, "
                "function_call_output, custom_tool_call or custom_tool_call_output.",
                "input",
            )

    def _add_message(self, where: str, item: Mapping[str, Any]) -> None:
        role, content = item.get("role"), item.get("content")
        if role == "assistant":
            if item.get("phase") not in _PHASES:
                _refuse(f"{where}.phase", "must be commentary or final_answer")
            self.chat.add_text("".join(_read_said(f"{where}.content", content)))
            return
        if role != "user" and role not in _PLAIN_ROLES:
            _refuse(
                f"{where}.role", f"is {str(role)[:60]!r}: use user, developer, system, assistant"
            )
        texts = read_parts(f"{where}.content", content, may_hold_json=role == "user")
        self.chat.add_message(str(role), texts)
        for i, part in enumerate(content if isinstance(content, list) else ()):
            mark, place = part.get("prompt_cache_breakpoint"), f"{where}.content[{i}]"
            if mark is not None:
                ttl_s = read_breakpoint_ttl(mark, f"{place}.prompt_cache_breakpoint", "input")
                self.marks.append(Breakpoint(self.chat.last_index, i, ttl_s))

    def _add_call(self, where: str, item: Mapping[str, Any], kind: str) -> None:
        call_id, name = (_text(where, item, field_name) for field_name in ("call_id", "name"))
        space = item.get("namespace")
        if space is not None:
            name = flat_name(_text(where, item, "namespace"), name)
        if kind == "custom_tool_call":
            arguments = msgspec.json.encode({"input": _text(where, item, "input")}).decode()
        else:
            arguments = read_arguments(_text(where, item, "arguments")) or "{}"
        self.call_ids.add(call_id)
        self.chat.add_call(call_id, name, arguments)

    def _add_output(self, where: str, item: Mapping[str, Any]) -> None:
        call_id = _text(where, item, "call_id")
        if call_id not in self.call_ids:
            _refuse(f"{where}.call_id", f"{call_id[:60]!r} names no call before it")
        texts = read_parts(f"{where}.output", item.get("output"), may_hold_json=False)
        self.chat.add_tool_result(call_id, texts)


def append_question(
    messages: Sequence[Mapping[str, Any]], lead: str, between: str
) -> list[Mapping[str, Any]]:
    """Return the messages with a question at their end.

    It goes into the last message where that is the user's, else into one of its own.

    Args:
        messages: What it is about, in the chat dialect.
        lead: The question's text.
        between: What stands between a text and the question behind it.
    """
    last = messages[-1]
    if last["role"] != "user":
        return [*messages, {"role": "user", "content": lead}]
    content = last["content"]
    texts = [content] if isinstance(content, str) else [part["text"] for part in content]
    joined = as_content([*texts[:-1], f"{texts[-1]}{between}{lead}"])
    return [*messages[:-1], {**last, "content": joined}]


def _read_said(where: str, content: Any) -> list[str]:
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        _refuse(where, "must be a string or a list of output_text and refusal parts")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in ("output_text", "refusal"):
            _refuse(f"{where}[{i}].type", f"is {str(kind)[:60]!r}: use output_text or refusal")
        texts.append(_text(f"{where}[{i}]", part, "text" if kind == "output_text" else "refusal"))
    return texts


def _read_part(where: str, part: Any, *, may_hold_json: bool) -> str:
    if not isinstance(part, Mapping):
        _refuse(where, "must be an object with a type")
    kind = part.get("type")
    if kind == "input_text":
        return _text(where, part, "text")
    if kind == "input_json" and may_hold_json:
        data = part.get("data")
        rows = data if isinstance(data, list) else [data]
        if not all(isinstance(row, dict) for row in rows):
            _refuse(f"{where}.data", "must be an object, or a list of objects")
        return read_json(f"{where}.data", data)
    known = "input_text, input_json" if may_hold_json else "input_text"
    raise UnsupportedFeatureError(
        f"{where}.type={str(kind)[:60]!r} is not supported here: only texts are served ({known}).",
        _param(where),
    )


def _text(where: str, item: Mapping[str, Any], name: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        _refuse(f"{where}.{name}", "must be a string")
    return check_text(f"{where}.{name}", value)


def check_text(where: str, text: str) -> str:
    """Return a text that can be carried on.

    Raises:
        UserInputError: It holds a lone surrogate.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        _refuse(where, "holds a lone surrogate, which is no valid Unicode")
    return text


def _param(where: str) -> str:
    """The field of a request that a place lies in."""
    return where.partition("[")[0].partition(".")[0]


def _refuse(where: str, why: str) -> NoReturn:
    raise UserInputError(f"{where} {why}.", _param(where))
