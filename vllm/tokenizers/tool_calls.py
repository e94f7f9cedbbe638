"""Tool calls of earlier turns, as clients send them back."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.exceptions import UnsupportedFeatureError, UserInputError

_decoder = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class MessageCall:
    """A call in an assistant's message.

    Attributes:
        id: What its result names; None where the client gave none.
        name: Of the function.
        arguments: As they were sent, for an answer that comes back must give the tokens it was
            made of: the text of a JSON object, or of what a limit cut off.
    """

    id: str | None
    name: str
    arguments: str


# Of a call without any.
NO_ARGUMENTS = "{}"
# A text that says "no arguments" is short, and quoted a few times at most.
_MAX_NOTHING_CHARS, _MAX_QUOTINGS = 64, 4
# The one field that holds arguments which are no JSON object, in formats of a field each.
RAW_ARGUMENTS = "arguments"


@dataclass(frozen=True, slots=True)
class Member:
    """One member of a JSON object: its key, its value, and the value's own spelling."""

    key: str
    value: Any
    raw: str


def parse_calls(where: str, calls: Any) -> tuple[MessageCall, ...]:
    """Check a message's ``tool_calls``.

    Raises:
        UserInputError: One is malformed.
        UnsupportedFeatureError: One calls something else than a function.
    """
    if calls is None:
        return ()
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise UserInputError(f"{where} must be a list of calls.", "messages")
    return tuple(_parse_call(f"{where}[{i}]", call) for i, call in enumerate(calls))


def _parse_call(where: str, call: Any) -> MessageCall:
    if not isinstance(call, Mapping):
        raise UserInputError(f"{where} must be an object with id and function.", "messages")
    if call.get("type", "function") != "function":
        raise UnsupportedFeatureError(
            f"{where}.type={str(call['type'])[:60]!r} is not supported: only 'function' is.",
            "messages",
        )
    call_id, function = call.get("id"), call.get("function")
    if call_id is not None and not isinstance(call_id, str):
        raise UserInputError(f"{where}.id must be a string.", "messages")
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
        raise UserInputError(f"{where}.function must be an object with a name.", "messages")
    text = read_arguments(function.get("arguments"))
    if text is None:
        kind = type(function["arguments"]).__name__
        raise UserInputError(
            f"{where}.function.arguments must be a text, or an object, not {kind}.", "messages"
        )
    return MessageCall(call_id, name, text)


def read_arguments(value: Any) -> str | None:
    """Return a call's arguments as text, whatever its client writes for none; None: they are wrong.

    Null, an empty text, an empty list (PHP's empty object) and each of them as JSON in a text are
    no arguments: ``{}``.

    Raises:
        UserInputError: They are nested too deeply.
    """
    if isinstance(value, str):
        return NO_ARGUMENTS if _says_nothing(value) else value
    if isinstance(value, Mapping):
        try:
            return json.dumps(value, ensure_ascii=False)
        except RecursionError as error:
            raise UserInputError("A call's arguments are nested too deeply.", "messages") from error
    return NO_ARGUMENTS if value is None or value == [] else None


def _says_nothing(text: str) -> bool:
    """Whether a text is blank, or JSON of null, of an empty list, or of a text that is such."""
    for _ in range(_MAX_QUOTINGS):
        text = text.strip()
        if len(text) > _MAX_NOTHING_CHARS:
            return False
        if text in ("", "null", "undefined"):
            return True
        try:
            value = json.loads(text)
        except ValueError:
            return False
        if not isinstance(value, str):
            return bool(value == [] and isinstance(value, list))
        text = value
        if text.strip() == "{}":
            return True
    return False


def read_members(arguments: str) -> list[Member]:
    """Return a call's arguments one by one; what is no JSON object is one field of raw text."""
    members = split_object(arguments)
    return [Member(RAW_ARGUMENTS, arguments, arguments)] if members is None else members


def split_object(text: str) -> list[Member] | None:
    """Return the members of a JSON object in their order and spelling; None: it is no object."""
    try:
        if not isinstance(json.loads(text), dict):
            return None
    except (ValueError, RecursionError):
        return None
    members: list[Member] = []
    at = _skip_space(text, _skip_space(text, 0) + 1)
    while text[at] != "}":
        key, at = _decoder.raw_decode(text, at)
        begin = _skip_space(text, _skip_space(text, at) + 1)
        value, at = _decoder.raw_decode(text, begin)
        members.append(Member(key, value, text[begin:at]))
        at = _skip_space(text, at)
        if text[at] == ",":
            at = _skip_space(text, at + 1)
    return members


def _skip_space(text: str, at: int) -> int:
    while text[at] in " \t\n\r":
        at += 1
    return at
