"""One call of DeepSeek-V4's, told while it is read."""

import json
import re
from collections.abc import Mapping
from typing import Any

from vllm.parser.arguments import means_json, takes_text
from vllm.parser.dialect import CallBegun, CallDelta, CallEnded, CallText, RawCall
from vllm.tokenizers.tool_calls import split_object

_HEAD = re.compile(r'\s+name\s*=\s*"([^"]+)"\s*>')
_PARAMETER_HEAD = re.compile(r'\s+name\s*=\s*"([^"]*)"(?:\s+string\s*=\s*"(true|false)")?\s*>')
_MAX_HEAD_CHARS = 4096
# Models wrap all arguments in one parameter of these names.
_WRAPPERS = ("arguments", "input")


class InvokeReader:
    """Reads what stands between ``<｜DSML｜invoke`` and its end, its tags told apart before.

         name read       a parameter      its name read      its end
    HEAD ---------> BODY -----------> PARAMETER ------> VALUE -----> BODY

    Text is told letter by letter; JSON, and what the schema has to type, when its parameter ends.

    Owns: the head that is being read, the value that is open, and what waits to be told.

    Args:
        schemas: Of the tools' arguments, by name; they type what the model left open.
    """

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        self._schemas = schemas
        self._properties: Mapping[str, Any] = {}
        self._pattern: re.Pattern[str] | None = _HEAD
        self._head = ""
        self._name: str | None = None
        self._value: _Value | None = None
        self._num_members = 0
        self._is_broken = False
        # The first argument where it may be a wrapper: its name and its JSON.
        self._waiting: tuple[str, str] | None = None

    def add_text(self, text: str) -> list[CallDelta]:
        """Take in text without tags."""
        if self._is_broken:
            return []
        if self._pattern is None:
            return _texts(self._value.add(text)) if self._value is not None else []
        self._head += text
        # A fixed length: what is told may not depend on how the text came.
        head = self._pattern.match(self._head, 0, _MAX_HEAD_CHARS)
        if head is None:
            self._is_broken = len(self._head) >= _MAX_HEAD_CHARS
            return []
        rest = self._head[head.end() :]
        self._pattern, self._head = None, ""
        return self._begin(head[1]) if self._name is None else self._open(head, rest)

    def begin_parameter(self) -> list[CallDelta]:
        """Take in the beginning of a parameter; one that is open ends."""
        self._is_broken |= self._pattern is not None
        if self._is_broken:
            return []
        delta = self._close_value(is_tagged=False)
        if self._waiting is not None:
            delta += _texts(self._member(*self._waiting))
            self._waiting = None
        self._pattern = _PARAMETER_HEAD
        return delta

    def end_parameter(self) -> list[CallDelta]:
        """Take in a parameter's end."""
        self._is_broken |= self._pattern is not None
        return [] if self._is_broken else self._close_value(is_tagged=True)

    def end(self) -> list[CallDelta]:
        """Take in the end of the call."""
        if self._name is None:
            return []
        if self._is_broken or self._pattern is not None:
            return [CallEnded(False)]
        delta = self._close_value(is_tagged=False)
        if self._waiting is not None:
            unwrapped = _unwrap(self._waiting[1])
            if unwrapped is not None:
                return [*delta, CallText(unwrapped.removeprefix("{")), CallEnded(True)]
            delta += _texts(self._member(*self._waiting))
        return [*delta, CallText("}"), CallEnded(True)]

    def cut_off(self) -> list[CallDelta]:
        """Nothing follows: the call may lack arguments."""
        return [] if self._name is None else [CallEnded(False)]

    def _begin(self, name: str) -> list[CallDelta]:
        self._name = name
        properties = self._schemas.get(name, {}).get("properties")
        self._properties = properties if isinstance(properties, Mapping) else {}
        # At once: no text at all might be taken for a call without arguments.
        return [CallBegun(name), CallText("{")]

    def _open(self, head: re.Match[str], rest: str) -> list[CallDelta]:
        """Begin a value."""
        name = head[1]
        is_text = None if head[2] is None else head[2] == "true"
        schema = self._properties.get(name)
        may_wrap = not self._num_members and name in _WRAPPERS and name not in self._properties
        if is_text and not may_wrap and takes_text(schema):
            self._value = _TextValue()
            return _texts(self._member(name, '"'), self._value.add(rest))
        self._value = _HeldValue(name, schema, is_text, may_wrap)
        self._value.add(rest)
        return []

    def _close_value(self, *, is_tagged: bool) -> list[CallDelta]:
        value, self._value = self._value, None
        if value is None:
            return []
        last = value.close(is_tagged)
        if isinstance(value, _TextValue):
            return _texts(last)
        if value.may_wrap:
            self._waiting = (value.name, last)
            return []
        return _texts(self._member(value.name, last))

    def _member(self, name: str, value: str) -> str:
        self._num_members += 1
        separator = "" if self._num_members == 1 else ", "
        return f"{separator}{json.dumps(name, ensure_ascii=False)}: {value}"


class _TextValue:
    """A text, spelled as JSON while it comes."""

    def __init__(self) -> None:
        # A line break before a tag that follows a value without an end belongs to the tag.
        self._held = ""

    def add(self, text: str) -> str:
        text = self._held + text
        self._held = "\n" if text.endswith("\n") else ""
        return _escape(text.removesuffix("\n"))

    def close(self, is_tagged: bool) -> str:
        return (_escape(self._held) if is_tagged else "") + '"'


class _HeldValue:
    """A value that is typed when it is whole."""

    def __init__(self, name: str, schema: Any, is_text: bool | None, may_wrap: bool) -> None:
        self.name = name
        self.may_wrap = may_wrap
        self._schema = schema
        self._is_text = is_text
        self._texts: list[str] = []

    def add(self, text: str) -> str:
        self._texts.append(text)
        return ""

    def close(self, is_tagged: bool) -> str:
        text = "".join(self._texts)
        text = text if is_tagged else text.removesuffix("\n")
        as_json = means_json(text, self._schema, self._is_text)
        return json.dumps(text, ensure_ascii=False) if as_json is None else as_json


_Value = _TextValue | _HeldValue


def _escape(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _texts(*texts: str) -> list[CallDelta]:
    return [CallText(text) for text in texts if text]


def _unwrap(value: str) -> str | None:
    """Return the object that a wrapper holds; None: it holds none."""
    inner = json.loads(value)
    text = inner if isinstance(inner, str) else value
    is_call = split_object(text) is not None and bool(RawCall("", text).delta())
    return text.strip() if is_call else None
