"""Arguments that a model writes field by field, told as one JSON object while they are read."""

import json

from vllm.parser.dialect import CallBegun, CallDelta, CallEnded, CallText, is_unicode
from vllm.parser.literals import spell_text
from vllm.parser.schemas import Schema
from vllm.tokenizers.tool_calls import RAW_ARGUMENTS, split_object

# Models wrap all arguments in one field of these names.
_WRAPPERS = (RAW_ARGUMENTS, "input")


class ObjectWriter:
    """Tells one call: its name, then its fields.

    Texts are told letter by letter; JSON, and what may still be something else than its text, when
    its field ends.

    Owns: the value that is open, and what waits to be told.

    Args:
        name: Of the function.
        schema: Of its arguments; types what the model left open.
        trims: Whether a line break before and behind a value belongs to the format.
    """

    def __init__(self, name: str, schema: Schema, *, trims: bool = False) -> None:
        self._name = name
        self._schema = schema
        self._trims = trims
        self._value: _Value | None = None
        self._num_members = 0
        self._has_begun = False
        self._fault = ""
        # The first field where it may be a wrapper: its name and its JSON.
        self._waiting: tuple[str, str] | None = None

    @property
    def has_begun(self) -> bool:
        """Whether something of the call was told."""
        return self._has_begun

    @property
    def fault(self) -> str:
        """Why the call cannot be whole; empty: it can."""
        return self._fault

    def open(self, key: str, is_text: bool | None = None) -> list[CallDelta]:
        """Begin a field; one that is open ends.

        Args:
            key: Of the field.
            is_text: What the model said of its value; None: nothing.
        """
        delta = self._begin() + self.close(is_tagged=False) + self._flush()
        is_known = key in self._schema.field_names
        may_wrap = not self._num_members and key in _WRAPPERS and not is_known
        self._value = _Value(key, self._schema.field(key), is_text, may_wrap, self._trims)
        return delta + self._tell_value("")

    def add(self, text: str) -> list[CallDelta]:
        """Take in more of the value that is open."""
        return self._tell_value(text)

    def close(self, *, is_tagged: bool = True) -> list[CallDelta]:
        """End the value that is open.

        Args:
            is_tagged: Whether its own mark ends it, and not the next field's.
        """
        value, self._value = self._value, None
        if value is None:
            return []
        last = value.close(is_tagged)
        if last is None:
            self._fault = self._fault or f"the value of {value.name[:64]!r} is none of its schema"
            return []
        if value.is_told:
            return _texts(last)
        if value.may_wrap:
            self._waiting = (value.name, last)
            return []
        return _texts(self._member(value.name) + last)

    def end(self) -> list[CallDelta]:
        """End the call; it is whole if nothing is at fault."""
        delta = self._begin() + self.close(is_tagged=False)
        if self._fault:
            return [*delta, CallEnded(False)]
        if self._waiting is not None:
            unwrapped = _unwrap(self._waiting[1])
            if unwrapped is not None:
                return [*delta, CallText(unwrapped.removeprefix("{")), CallEnded(True)]
        return [*delta, *self._flush(), CallText("}"), CallEnded(True)]

    def cut_off(self) -> list[CallDelta]:
        """Nothing follows: the call may lack arguments."""
        return [CallEnded(False)] if self._has_begun else []

    def _begin(self) -> list[CallDelta]:
        if self._has_begun:
            return []
        self._has_begun = True
        return [CallBegun(self._name), CallText("{")]

    def _tell_value(self, text: str) -> list[CallDelta]:
        value = self._value
        if value is None:
            return []
        was_told = value.is_told
        told = value.add(text)
        head = self._member(value.name) if value.is_told and not was_told else ""
        return _texts(head + told)

    def _flush(self) -> list[CallDelta]:
        """Tell what waited to be the only field: another one follows."""
        waiting, self._waiting = self._waiting, None
        return [] if waiting is None else _texts(self._member(waiting[0]) + waiting[1])

    def _member(self, name: str) -> str:
        self._num_members += 1
        separator = "" if self._num_members == 1 else ", "
        return f"{separator}{spell_text(name)}: "


class _Value:
    """One value: held while it may mean something else than its text, then told as it comes.

    Owns: what is held, and the line break that may belong to what follows the value.
    """

    def __init__(
        self, name: str, schema: Schema, is_text: bool | None, may_wrap: bool, trims: bool
    ) -> None:
        self.name = name
        self.may_wrap = may_wrap
        self.is_told = False
        self._schema = schema
        self._is_text = is_text
        self._trims = trims
        self._held: list[str] = []
        # The beginning that decides whether it is text: more of it decides nothing else.
        self._begun = ""
        self._break = ""
        takes_text = "string" in schema.kinds
        self._may_be_told = takes_text and is_text is not False and not may_wrap

    def add(self, text: str) -> str:
        if self.is_told:
            return self._tell(text)
        self._held.append(text)
        if not self._may_be_told or self._may_mean_more(text):
            return ""
        self.is_told = True
        whole = "".join(self._held)
        self._held.clear()
        return '"' + self._tell(whole.removeprefix("\n") if self._trims else whole)

    def _may_mean_more(self, text: str) -> bool:
        if self._is_text:
            # Only the line break before it, which may be the format's, is waited for.
            return self._trims and not text and len(self._held) == 1
        if not self._begun.strip() or len(self._begun) < _MAX_BEGUN_CHARS:
            self._begun = (self._begun + text).lstrip()
            return self._schema.may_mean_more(self._begun)
        # An object or an array, of whatever length.
        return True

    def _tell(self, text: str) -> str:
        text = self._break + text
        self._break = "\n" if text.endswith("\n") else ""
        return _escape(text.removesuffix("\n"))

    def close(self, is_tagged: bool) -> str | None:
        """Return the rest of the value's JSON, all of it where none is told; None: it is none."""
        if self.is_told:
            return (_escape(self._break) if is_tagged and not self._trims else "") + '"'
        text = "".join(self._held)
        text = text.removeprefix("\n") if self._trims else text
        text = text if is_tagged and not self._trims else text.removesuffix("\n")
        return self._schema.read(text, self._is_text)


# More than any word or number that is waited for has.
_MAX_BEGUN_CHARS = 1024


def _escape(text: str) -> str:
    return spell_text(text)[1:-1]


def _texts(text: str) -> list[CallDelta]:
    return [CallText(text)] if text else []


def _unwrap(value: str) -> str | None:
    """Return the object that a wrapper holds; None: it holds none."""
    inner = json.loads(value)
    text = inner if isinstance(inner, str) else value
    return text.strip() if split_object(text) is not None and is_unicode(text) else None
