"""Calls in Python's spelling, as the whole answer: ``[find(text="x", limit=5), now()]``."""

import re

from vllm.parser.dialect import CallBlockDelta, CallCut, CallDelta, CallFailed
from vllm.parser.json_call import JsonCallReader
from vllm.parser.near_misses import read_calls
from vllm.parser.offered import Offered
from vllm.parser.python_call import read_call

_START, _STOP = "<|python_start|>", "<|python_end|>"
_NAME = re.compile(r"[A-Za-z_][\w.-]{0,255}\s{0,64}")
_SEPARATORS = re.compile(r"[\s,]*")
_TOKENS = re.compile(r"[^\\\"'()\[\]{}]+|[\\\"'()\[\]{}]")


class PythonicDialect:
    """See ToolDialect."""

    marks: tuple[str, ...] = (_START, _STOP)
    leads: tuple[str, ...] = ("[",)
    quotes: tuple[str, ...] = ()
    telltales: tuple[str, ...] = (_START[:8],)
    ends_reasoning = False
    is_special = False

    def read_block(self, opened_by: str, offered: Offered) -> "_PythonicReader":
        """Return the reader of what follows a mark or lead."""
        return _PythonicReader(opened_by, offered)


PYTHONIC = PythonicDialect()


class _BracketsEnd:
    """Follows an expression from its first bracket to the one that closes it."""

    def __init__(self) -> None:
        self._depth = 0
        self._quote = ""
        self._is_escaped = False

    def find_end(self, text: str) -> int | None:
        """Read on; return how much of ``text`` belongs to the expression if it ends there."""
        for match in _TOKENS.finditer(text):
            run = match[0]
            if self._is_escaped:
                self._is_escaped = False
                run = run[1:]
            if self._quote:
                self._is_escaped = run == "\\"
                self._quote = "" if run == self._quote else self._quote
            elif run in ('"', "'"):
                self._quote = run
            elif run in ("(", "[", "{"):
                self._depth += 1
            elif run in (")", "]", "}"):
                self._depth -= 1
                if self._depth <= 0:
                    return match.end()
        return None


class _PythonicReader:
    """Reads calls one after another; each is told when its last bracket closes.

    Owns: the text that is not yet sure, and that of the call that is read.
    """

    def __init__(self, opened_by: str, offered: Offered) -> None:
        self._offered = offered
        self._is_end = opened_by == _STOP
        self._is_open = opened_by == "["
        # Behind a mark, or a call, nothing is text.
        self._may_be_text = self._is_open
        self._raw = [opened_by]
        self._text = ""
        self._call: list[str] = []
        self._brackets: _BracketsEnd | None = None
        self._object: JsonCallReader | None = None
        self._num_whole = 0

    def push(self, text: str) -> CallBlockDelta:
        """Take in more of the block."""
        if self._is_end:
            return CallBlockDelta(ended=True, rest=text)
        self._text += text
        delta = CallBlockDelta()
        while self._text and not delta.ended and self._step(delta):
            pass
        return delta

    def close(self, finish_reason: str | None) -> CallBlockDelta:
        """A call that is not closed is none."""
        delta = CallBlockDelta(ended=True)
        reader = self._object
        if reader is not None:
            delta.calls += reader.close()
            if reader.is_over:
                return delta
        self._take(len(self._text))
        raw = "".join(self._raw)
        if self._may_be_text and (finish_reason == "stop" or "(" not in raw):
            delta.text = raw
        elif finish_reason == "stop":
            delta.calls += self._failed("the list of calls is not closed")
        elif reader is None or not reader.has_told:
            delta.calls += [CallCut(raw)] if raw.strip("[], \n") else []
        return delta

    def _step(self, delta: CallBlockDelta) -> bool:
        if self._object is not None:
            return self._read_object(self._object, delta)
        if self._brackets is not None:
            return self._read_call(self._brackets, delta)
        separators = _SEPARATORS.match(self._text)
        self._take(0 if separators is None else separators.end())
        if not self._text:
            return False
        char = self._text[0]
        if not self._is_open:
            if char != "[":
                return self._end(delta, "no list of calls stands in its place")
            self._take(1)
            self._is_open = True
            return True
        if char == "]":
            return self._end_list(delta)
        if char == "{":
            self._object = JsonCallReader(self._offered)
            return True
        return self._begin_call(delta)

    def _begin_call(self, delta: CallBlockDelta) -> bool:
        name = _NAME.match(self._text)
        if name is not None and name.end() == len(self._text):
            word = name[0].rstrip()
            if self._offered.has(word) or (word == name[0] and self._offered.may_begin(word)):
                return False
        is_call = name is not None and self._text[name.end() : name.end() + 1] == "("
        if name is None or not is_call or not self._offered.has(name[0].rstrip()):
            return self._end(delta, "what stands in the list is no call of a tool")
        self._brackets = _BracketsEnd()
        self._add(name.end())
        return True

    def _read_call(self, brackets: _BracketsEnd, delta: CallBlockDelta) -> bool:
        end = brackets.find_end(self._text)
        self._add(len(self._text) if end is None else end)
        if end is None:
            return False
        text = "".join(self._call)
        self._call, self._brackets = [], None
        call = read_call(text)
        calls = [call] if call is not None else read_calls(text, self._offered)
        if not calls:
            return self._end(delta, "its arguments are no values")
        self._may_be_text = False
        self._num_whole += 1
        self._raw.clear()
        delta.calls += [item for each in calls for item in each.delta()]
        return True

    def _read_object(self, reader: JsonCallReader, delta: CallBlockDelta) -> bool:
        told, rest = reader.push(self._text)
        delta.calls += told
        self._take(len(self._text) - len(rest))
        self._may_be_text &= not reader.has_told
        if reader.fault:
            self._object = None
            return self._end(delta, reader.fault)
        if reader.is_over:
            self._object = None
            self._may_be_text = False
            self._num_whole += 1
            self._raw.clear()
        return bool(rest)

    def _end_list(self, delta: CallBlockDelta) -> bool:
        if not self._num_whole:
            self._take(1)
            return self._end(delta, "the list of calls is empty")
        delta.ended, delta.rest = True, self._text[1:]
        return False

    def _end(self, delta: CallBlockDelta, reason: str) -> bool:
        """End the block: what is no whole call in it is text."""
        delta.ended, delta.rest = True, self._text
        if self._may_be_text:
            delta.text = "".join(self._raw)
        else:
            delta.calls += self._failed(reason)
        return False

    def _failed(self, reason: str) -> list[CallDelta]:
        text = "".join(self._raw)
        self._raw.clear()
        said = text.replace(_START, "").replace(_STOP, "").strip("[], \n")
        return [CallFailed(text, reason)] if said else []

    def _add(self, num_chars: int) -> None:
        self._call.append(self._text[:num_chars])
        self._take(num_chars)

    def _take(self, num_chars: int) -> None:
        self._raw.append(self._text[:num_chars])
        self._text = self._text[num_chars:]
