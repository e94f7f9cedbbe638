"""Mistral's calls, behind a special token.

[TOOL_CALLS][{"name": "find", "arguments": {"text": "x"}}]               v3, v7
[TOOL_CALLS]find[CALL_ID]a1b2c3d4e[ARGS]{"text": "x"}                    v11; without id: v13
"""

import re

from vllm.parser.dialect import (
    CallBegun,
    CallBlockDelta,
    CallCut,
    CallDelta,
    CallEnded,
    CallFailed,
)
from vllm.parser.json_call import ArgumentsReader, JsonCallReader
from vllm.parser.marks import Marks
from vllm.parser.near_misses import may_begin, read_calls
from vllm.parser.offered import Offered

_TOOL_CALLS = "[TOOL_CALLS]"
_HEAD = re.compile(r"\s*([^\[\]{}()\s]+)\s*(?:\[CALL_ID\]\s*(\w+)\s*)?(?:\[ARGS\])?\s*(?=\{)")
# What such a head begins with, as far as it is there.
_MARKS_OF_HEAD = ("[CALL_ID]", "[ARGS]")
_MARKS_BEGIN = frozenset(mark[:2] for mark in (*_MARKS_OF_HEAD, _TOOL_CALLS))
_NAME = re.compile(r"[^\[\]{}\s(]{1,256}")
_BEHIND_NAME = re.compile(r"\s*(?:\[CALL_ID\]\s*\w*\s*)?(?:\[ARGS\])?\s*")
_MAX_HEAD_CHARS = 1024
_END = Marks((_TOOL_CALLS,))


class MistralDialect:
    """See ToolDialect."""

    marks: tuple[str, ...] = (_TOOL_CALLS,)
    leads: tuple[str, ...] = ()
    quotes: tuple[str, ...] = ()
    telltales: tuple[str, ...] = (_TOOL_CALLS[:6],)
    ends_reasoning = True
    is_special = True

    def read_block(self, opened_by: str, offered: Offered) -> "_MistralReader":
        """Return the reader of what follows a mark."""
        return _MistralReader(opened_by, offered)


MISTRAL = MistralDialect()


class _MistralReader:
    """Reads an array of objects, or one call with its name before its arguments.

    Owns: the text that is not yet sure, the call that is open and its text so far.
    """

    def __init__(self, opened_by: str, offered: Offered) -> None:
        self._offered = offered
        self._raw = [opened_by]
        self._text = ""
        self._in_array = False
        self._num_whole = 0
        self._object: JsonCallReader | None = None
        self._arguments: ArgumentsReader | None = None
        self._loose: list[str] | None = None

    def push(self, text: str) -> CallBlockDelta:
        """Take in more of the block."""
        self._text += text
        delta = CallBlockDelta()
        while self._text and not delta.ended and self._step(delta):
            pass
        return delta

    def close(self, finish_reason: str | None) -> CallBlockDelta:
        """End a call that is open: it may lack arguments."""
        delta = CallBlockDelta(ended=True)
        has_told = self._arguments is not None
        if self._object is not None:
            delta.calls += self._object.close()
            has_told = self._object.has_told
            if self._object.is_over:
                return delta
        if self._loose is not None and finish_reason == "stop":
            self._loose.append(self._text)
            self._text = ""
            delta.calls += self._end_loose()
        if self._arguments is not None:
            delta.calls.append(CallEnded(False))
        self._raw += [*(self._loose or ()), self._text]
        failed = self._failed("the call is not closed")
        if finish_reason == "stop":
            delta.calls += failed
        elif not has_told:
            delta.calls += [CallCut(item.text) for item in failed if isinstance(item, CallFailed)]
        return delta

    def _step(self, delta: CallBlockDelta) -> bool:
        if self._object is not None:
            return self._read_object(self._object, delta)
        if self._arguments is not None:
            return self._read_arguments(self._arguments, delta)
        if self._loose is not None:
            return self._read_loose(delta)
        num_spaces = len(self._text) - len(self._text.lstrip())
        if num_spaces:
            self._take(num_spaces)
        if not self._text:
            return False
        char = self._text[0]
        if char == "{":
            self._object = JsonCallReader(self._offered)
            return True
        if self._in_array:
            return self._step_array(char, delta)
        if char == "[":
            if self._text[:2] in _MARKS_BEGIN:
                return self._end(delta, "its tags stand in another order")
            if len(self._text) == 1:
                return False
            self._take(1)
            self._in_array = True
            return True
        return self._end(delta, "") if self._num_whole else self._step_name(delta)

    def _step_array(self, char: str, delta: CallBlockDelta) -> bool:
        if char == ",":
            self._take(1)
            return True
        if char == "]":
            self._take(1)
            return self._end(delta, "the list of calls is empty")
        if not self._num_whole and char.isalpha():
            # Python's list of calls, perhaps.
            near = may_begin(self._text, self._offered)
            if near is None:
                return False
            if near:
                raw = "".join(self._raw)
                begin = raw.rindex("[")
                self._raw, self._loose = [raw[:begin]], [raw[begin:]]
                return True
        return self._end(delta, "what stands in the list is no call", says_nothing=False)

    def _step_name(self, delta: CallBlockDelta) -> bool:
        head = _HEAD.match(self._text, 0, _MAX_HEAD_CHARS)
        if head is not None and self._offered.has(head[1]):
            self._take(head.end())
            self._arguments = ArgumentsReader()
            delta.calls.append(CallBegun(head[1], head[2] or ""))
            return True
        if self._may_be_head:
            return False
        near = may_begin(self._text, self._offered)
        if near:
            self._loose = []
            return True
        if near is None:
            return False
        reason = "no call stands in its place" if head is None else self._offered.refusal(head[1])
        return self._end(delta, reason, says_nothing=False)

    @property
    def _may_be_head(self) -> bool:
        """Whether what is there of a head may go on to one."""
        name = _NAME.match(self._text)
        if name is None or len(self._text) >= _MAX_HEAD_CHARS:
            return False
        if name.end() == len(self._text):
            return self._offered.may_begin(name[0])
        if not self._offered.has(name[0]):
            return False
        behind = _BEHIND_NAME.match(self._text, name.end())
        rest = self._text[name.end() if behind is None else behind.end() :]
        return any(mark.startswith(rest) for mark in _MARKS_OF_HEAD)

    def _read_object(self, reader: JsonCallReader, delta: CallBlockDelta) -> bool:
        told, rest = reader.push(self._text)
        delta.calls += told
        self._take(len(self._text) - len(rest))
        if reader.fault:
            self._object = None
            return self._end(delta, reader.fault)
        if reader.is_over:
            self._object = None
            self._num_whole += 1
            self._raw.clear()
        return bool(rest)

    def _read_arguments(self, reader: ArgumentsReader, delta: CallBlockDelta) -> bool:
        told, rest = reader.push(self._text)
        delta.calls += told
        self._take(len(self._text) - len(rest))
        if reader.fault or (reader.is_over and not reader.is_whole):
            self._arguments = None
            delta.calls.append(CallEnded(False))
            return self._end(delta, reader.fault or "its arguments are no JSON")
        if reader.is_over:
            self._arguments = None
            delta.calls.append(CallEnded(True))
            self._raw.clear()
            return self._end(delta, "")
        return False

    def _read_loose(self, delta: CallBlockDelta) -> bool:
        assert self._loose is not None
        before, mark, self._text = _END.split(self._text)
        self._loose.append(before)
        if mark is None:
            return False
        self._text = mark + self._text
        delta.calls += self._end_loose()
        return self._end(delta, "no call can be read in it")

    def _end_loose(self) -> list[CallDelta]:
        text = "".join(self._loose or ())
        self._loose = None
        calls = read_calls(text, self._offered)
        if calls:
            self._raw.clear()
        else:
            self._raw.append(text)
        return [item for call in calls for item in call.delta()]

    def _end(self, delta: CallBlockDelta, reason: str, *, says_nothing: bool = True) -> bool:
        """End the block: what is no whole call in it is text, and what follows is read anew."""
        delta.calls += self._failed(reason, says_nothing=says_nothing)
        delta.ended, delta.rest = True, self._text
        return False

    def _failed(self, reason: str, *, says_nothing: bool = True) -> list[CallDelta]:
        """All that is no call; marks alone say nothing, unless something stands behind them."""
        text = "".join(self._raw)
        self._raw.clear()
        said = text.replace(_TOOL_CALLS, "").strip("[], \n") if says_nothing else text
        return [CallFailed(text, reason)] if said else []

    def _take(self, num_chars: int) -> None:
        self._raw.append(self._text[:num_chars])
        self._text = self._text[num_chars:]
