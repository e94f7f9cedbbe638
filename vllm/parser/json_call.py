"""One call as an object, told while it is read: ``{"name": ..., "arguments": {...}}``.

    name read      object ends        brace
HEAD ---------> ARGUMENTS -------> TAIL ---> OVER
"""

import json
import re
from typing import Any

from vllm.parser.dialect import CallBegun, CallDelta, CallEnded, CallText, RawCall
from vllm.parser.literals import LiteralStream
from vllm.parser.offered import Offered
from vllm.tokenizers.tool_calls import Member, split_object

ARGUMENT_KEYS = ("arguments", "parameters")
_OTHER_ARGUMENT_KEYS = ("args", "input")
_NAME_KEYS = ("name", "tool_name", "tool", "function")
# What an object of a call may hold beside the name and the arguments.
_NOTES = frozenset({"id", "type", "index"})
_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_NAMED = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")')
_MAX_HEAD_CHARS = 1024
_TAIL = re.compile(r'\s*(?:,\s*"(?:id|type|index)"\s*:\s*(?:"[^"\\{}]*"|\d+)\s*)*\}')
_MAX_TAIL_CHARS = 256
_MARK_BEGINS = "<["


def call_of_object(text: str) -> RawCall | None:
    """Return the call that a JSON object with a name and arguments is; None: it is none."""
    listed = split_object(text) or ()
    members = {member.key: member for member in listed}
    if len(members) < len(listed):
        return None  # one of two would be lost
    function = members.get("function")
    if function is not None and isinstance(function.value, dict) and "name" not in members:
        inner = call_of_object(function.raw)
        is_all = set(members) - _NOTES == {"function"}
        return inner if is_all else None
    name_key = next((key for key in _NAME_KEYS if _is_name(members.get(key))), None)
    if name_key is None:
        return None
    keys = [key for key in (*ARGUMENT_KEYS, *_OTHER_ARGUMENT_KEYS) if key in members]
    if set(members) - _NOTES - {name_key} != set(keys[:1]):
        return None  # what stands beside them would be lost
    given = members.get("id")
    call_id = given.value if given is not None and isinstance(given.value, str) else ""
    name: str = members[name_key].value
    arguments = _object_of(members[keys[0]]) if keys else "{}"
    return None if arguments is None else RawCall(name, arguments, call_id)


def _is_name(member: Member | None) -> bool:
    return member is not None and isinstance(member.value, str) and bool(member.value)


def _object_of(member: Member) -> str | None:
    """The arguments' object; some models put it into a string, and some write null for none."""
    value: Any = member.value
    if value is None:
        return "{}"
    if isinstance(value, str):
        return value if split_object(value) is not None else None
    return member.raw if isinstance(value, dict) else None


class ArgumentsReader:
    """Tells an object as it comes, in JSON.

    Owns: its text so far, and whether it is over or at fault.

    Args:
        stream: Reads it.
    """

    def __init__(self, stream: LiteralStream | None = None) -> None:
        self._stream = LiteralStream() if stream is None else stream
        self._told: list[str] = []

    @property
    def is_over(self) -> bool:
        """Whether the object is closed."""
        return self._stream.is_over

    @property
    def fault(self) -> str:
        """Why it is no object; empty: it may be one."""
        return self._stream.fault

    @property
    def in_text(self) -> bool:
        """Whether what was read so far ends inside a text."""
        return self._stream.in_text

    @property
    def is_whole(self) -> bool:
        """Whether what was told is an object."""
        return self.is_over and split_object("".join(self._told)) is not None

    def push(self, text: str) -> tuple[list[CallDelta], str]:
        """Take in more; return what is new, and what of ``text`` is not the object's."""
        told, end = self._stream.add(text)
        return self._tell(told), text[end:]

    def toggle_quote(self, mark: str) -> list[CallDelta]:
        """Take in a quote of the format's own."""
        return self._tell(self._stream.toggle_quote(mark))

    def _tell(self, told: str) -> list[CallDelta]:
        if told:
            self._told.append(told)
        return [CallText(told)] if told else []


class JsonCallReader:
    """Reads one call from its brace to its brace.

    Owns: the object before its arguments, their reader, and what stands behind them.

    Args:
        offered: Functions that may be called.
    """

    def __init__(self, offered: Offered) -> None:
        self._offered = offered
        self._object = LiteralStream()
        self._told: list[str] = []
        self._head = ""
        self._may_begin = True
        self._arguments: ArgumentsReader | None = None
        self._tail = ""
        self._has_ended = False
        self.is_over = False
        self.fault = ""

    @property
    def has_begun(self) -> bool:
        """Whether a call was told to begin, and not to end."""
        return self._arguments is not None and not self._has_ended

    @property
    def has_told(self) -> bool:
        """Whether anything of the call was told."""
        return self._arguments is not None

    def push(self, text: str) -> tuple[list[CallDelta], str]:
        """Take in more; return what is new, and what of ``text`` follows the call or its fault."""
        if self._arguments is not None:
            return self._push_arguments(text)
        if self._may_begin:
            self._head += text
            # A fixed length: what is told may not depend on how the text came.
            named = _NAMED.match(self._head, 0, _MAX_HEAD_CHARS)
            if named is not None and not self._offered.has(name := _read_name(named[1])):
                # At once: nobody need wait for the end of an object that is none of a call.
                self.fault = self._offered.refusal(name)
                return [], self._head[named.end() :]
            head = _HEAD.match(self._head, 0, _MAX_HEAD_CHARS)
            if head is not None:
                before = len(self._head) - len(text)
                _, end = self._object.add(text[: head.end() - before])
                self.fault = self._object.fault
                if self.fault:
                    return [], text[end:]
                return self._begin(_read_name(head[1]), self._head[head.end() :])
            self._may_begin = len(self._head) < _MAX_HEAD_CHARS
        told, end = self._object.add(text)
        self._told.append(told)
        self.fault = self._object.fault
        return (self._end_object() if self._object.is_over else []), text[end:]

    def close(self) -> list[CallDelta]:
        """Nothing follows: end the call if its arguments are whole, else say why it is none."""
        if self.is_over or self.fault:
            return []
        if self._arguments is None or not self._arguments.is_over:
            self.fault = "it is not closed"
            return self._break_off()
        if self._tail.strip():
            self.fault = f"{self._tail.strip()[:40]!r} stands behind its arguments"
            return self._break_off()
        return self._end()

    def _begin(self, name: str, rest: str) -> tuple[list[CallDelta], str]:
        self._head = ""
        self._arguments = ArgumentsReader()
        delta, rest = self._push_arguments(rest)
        return [CallBegun(name), *delta], rest

    def _push_arguments(self, text: str) -> tuple[list[CallDelta], str]:
        assert self._arguments is not None
        delta: list[CallDelta] = []
        if not self._arguments.is_over:
            delta, text = self._arguments.push(text)
            if self._arguments.fault:
                self.fault = self._arguments.fault
                return delta + self._break_off(), text
        if not self._arguments.is_over or not text:
            return delta, ""
        self._tail += text
        tail = _TAIL.match(self._tail, 0, _MAX_TAIL_CHARS)
        if tail is not None:
            return delta + self._end(), self._tail[tail.end() :]
        begun = self._tail.lstrip()
        if begun and begun[0] in _MARK_BEGINS:
            # A brace too few: the format goes on.
            return delta + self._end(), begun
        is_odd = bool(begun) and begun[0] not in ",}"
        if is_odd or len(self._tail) >= _MAX_TAIL_CHARS:
            self.fault = f"{begun[:40]!r} stands behind its arguments"
            end = len(self._tail) - len(begun) if is_odd else _MAX_TAIL_CHARS
            return delta + self._break_off(), self._tail[end:]
        return delta, ""

    def _end(self) -> list[CallDelta]:
        assert self._arguments is not None
        if not self._arguments.is_whole:
            self.fault = "its arguments are no JSON"
            return self._break_off()
        self.is_over = self._has_ended = True
        return [CallEnded(True)]

    def _break_off(self) -> list[CallDelta]:
        """End what was told to begin."""
        was_open = self.has_begun
        self._has_ended = True
        return [CallEnded(False)] if was_open else []

    def _end_object(self) -> list[CallDelta]:
        """Tell a call whose object had to be read whole."""
        call = call_of_object("".join(self._told))
        if call is None:
            self.fault = "the object is no call"
            return []
        if not self._offered.has(call.name):
            self.fault = self._offered.refusal(call.name)
            return []
        self.is_over = True
        return call.delta()


def _read_name(text: str) -> str:
    try:
        return str(json.loads(text))
    except ValueError:
        return ""
