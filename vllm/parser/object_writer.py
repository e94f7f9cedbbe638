"""Arguments that a model writes field by field, told as one JSON object while they are read."""

import json
from collections.abc import Mapping
from typing import Any

from vllm.parser.arguments import asks_for_text, means_json, takes_text
from vllm.parser.dialect import CallBegun, CallDelta, CallEnded, CallText, RawCall
from vllm.tokenizers.tool_calls import RAW_ARGUMENTS, split_object

# Models wrap all arguments in one field of these names.
_WRAPPERS = (RAW_ARGUMENTS, "input")


class ObjectWriter:
    """Tells one call: its name, then its fields.

    Texts are told letter by letter; JSON, and what the schema has to type, when its field ends.

    Owns: the value that is open, and what waits to be told.

    Args:
        name: Of the function.
        schemas: Of the tools' arguments, by name; they type what the model left open.
        trims: Whether a line break before and behind a value belongs to the format.
    """

    def __init__(
        self, name: str, schemas: Mapping[str, Mapping[str, Any]], *, trims: bool = False
    ) -> None:
        self._name = name
        properties = schemas.get(name, {}).get("properties")
        self._properties: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}
        self._trims = trims
        self._value: _Value | None = None
        self._num_members = 0
        # The first field where it may be a wrapper: its name and its JSON.
        self._waiting: tuple[str, str] | None = None

    def begin(self, call_id: str = "") -> list[CallDelta]:
        """Begin the call. At once: no text at all might be taken for one without arguments."""
        return [CallBegun(self._name, call_id), CallText("{")]

    def open(self, key: str, is_text: bool | None = None) -> list[CallDelta]:
        """Begin a field; one that is open ends.

        Args:
            key: Of the field.
            is_text: What the model said of its value; None: nothing.
        """
        delta = self.close(is_tagged=False) + self.flush()
        schema = self._properties.get(key)
        may_wrap = not self._num_members and key in _WRAPPERS and key not in self._properties
        is_sure = (is_text and takes_text(schema)) or (is_text is None and asks_for_text(schema))
        if is_sure and not may_wrap:
            self._value = _TextValue(self._trims)
            return delta + _texts(self._member(key, '"'))
        self._value = _HeldValue(key, schema, is_text, may_wrap, self._trims)
        return delta

    def add(self, text: str) -> list[CallDelta]:
        """Take in more of the value that is open; outside of one it is nobody's."""
        return _texts(self._value.add(text)) if self._value is not None else []

    def close(self, *, is_tagged: bool = True) -> list[CallDelta]:
        """End the value that is open.

        Args:
            is_tagged: Whether its own mark ends it, and not the next field's.
        """
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

    def flush(self) -> list[CallDelta]:
        """Tell what waited to be the only field: another one follows."""
        waiting, self._waiting = self._waiting, None
        return [] if waiting is None else _texts(self._member(*waiting))

    def end(self) -> list[CallDelta]:
        """End the call."""
        delta = self.close(is_tagged=False)
        if self._waiting is not None:
            unwrapped = _unwrap(self._waiting[1])
            if unwrapped is not None:
                return [*delta, CallText(unwrapped.removeprefix("{")), CallEnded(True)]
        return [*delta, *self.flush(), CallText("}"), CallEnded(True)]

    def cut_off(self) -> list[CallDelta]:
        """Nothing follows: the call may lack arguments."""
        return [CallEnded(False)]

    def _member(self, name: str, value: str) -> str:
        self._num_members += 1
        separator = "" if self._num_members == 1 else ", "
        return f"{separator}{json.dumps(name, ensure_ascii=False)}: {value}"


class _TextValue:
    """A text, spelled as JSON while it comes."""

    def __init__(self, trims: bool) -> None:
        self._trims = trims
        self._is_empty = True
        # A line break before what follows a value may belong to that.
        self._held = ""

    def add(self, text: str) -> str:
        if self._is_empty and text:
            self._is_empty = False
            text = text.removeprefix("\n") if self._trims else text
        text = self._held + text
        self._held = "\n" if text.endswith("\n") else ""
        return _escape(text.removesuffix("\n"))

    def close(self, is_tagged: bool) -> str:
        return (_escape(self._held) if is_tagged and not self._trims else "") + '"'


class _HeldValue:
    """A value that is typed when it is whole."""

    def __init__(
        self, name: str, schema: Any, is_text: bool | None, may_wrap: bool, trims: bool
    ) -> None:
        self.name = name
        self.may_wrap = may_wrap
        self._schema = schema
        self._is_text = is_text
        self._trims = trims
        self._texts: list[str] = []

    def add(self, text: str) -> str:
        self._texts.append(text)
        return ""

    def close(self, is_tagged: bool) -> str:
        text = "".join(self._texts)
        text = text.removeprefix("\n") if self._trims else text
        text = text if is_tagged and not self._trims else text.removesuffix("\n")
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
