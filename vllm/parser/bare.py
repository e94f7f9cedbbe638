"""Calls one after another, each an object of its own, with nothing around them."""

import re

from vllm.parser.dialect import CallBlockDelta, CallCut, CallDelta, CallFailed
from vllm.parser.json_call import JsonCallReader
from vllm.parser.offered import Offered

PYTHON_TAG = "<|python_tag|>"
# A call's object begins with one of these keys; another first key makes it an answer in JSON.
_FIRST_KEY = re.compile(r'\{\s*"((?:[^"\\]|\\.)*)"')
_HEAD_CHARS = 256
_CALL_KEYS = ("name", "type", "function", "id", "tool", "tool_name", "arguments", "parameters")
_SEPARATORS = re.compile(r"[\s;,]*")


class BareCallReader:
    """Reads calls one after another; what is none ends the block. See BlockReader.

    Owns: the object that is being read, its text, and the text that is not yet sure.

    Args:
        opened_by: A brace, which begins a call or an answer in JSON, or a mark.
        offered: Functions that may be called.
    """

    def __init__(self, opened_by: str, offered: Offered) -> None:
        self._offered = offered
        self._may_be_text = opened_by == "{"
        self._text = opened_by if self._may_be_text else ""
        self._raw = [] if self._may_be_text else [opened_by]
        self._head = ""
        self._object: JsonCallReader | None = None
        self._num_whole = 0

    def push(self, text: str) -> CallBlockDelta:
        """Take in more of the block."""
        self._text += text
        delta = CallBlockDelta()
        while not delta.ended and self._text:
            if self._object is None and not self._begin(delta):
                return delta
            if self._object is not None:
                self._read(self._object, delta)
        return delta

    def close(self, finish_reason: str | None) -> CallBlockDelta:
        """An object that is not closed is no whole call."""
        delta = CallBlockDelta(ended=True)
        reader = self._object
        if reader is not None:
            delta.calls += reader.close()
        if reader is not None and reader.is_over:
            return delta
        raw = "".join(self._raw) + self._text
        if finish_reason == "stop" and (reader is not None or self._num_whole == 0):
            return self._as_text(delta, raw, "the object is not closed")
        if raw.strip("; ,\n") and (reader is None or not reader.has_told):
            delta.calls.append(CallCut(raw))
        return delta

    def _begin(self, delta: CallBlockDelta) -> bool:
        """Begin the next object; False: there is none yet."""
        separators = _SEPARATORS.match(self._text)
        at = 0 if separators is None else separators.end()
        if at == len(self._text):
            self._take(at if not self._num_whole else 0)
            return False
        if self._text[at] == "{":
            self._take(at)
            delta.calls += self._failed("a program cannot be run")
        elif self._num_whole:
            delta.ended, delta.rest = True, self._text
            return True
        else:
            # Behind a python tag may stand a program, and a call behind that.
            at = self._text.find("{")
            self._take(len(self._text) if at < 0 else at)
            if at < 0:
                return False
            delta.calls += self._failed("a program cannot be run")
        self._object = JsonCallReader(self._offered)
        self._head = ""
        return True

    def _read(self, reader: JsonCallReader, delta: CallBlockDelta) -> None:
        told, rest = reader.push(self._text)
        delta.calls += told
        taken = len(self._text) - len(rest)
        self._head += self._text[: min(taken, _HEAD_CHARS - len(self._head))]
        self._take(taken)
        if reader.is_over:
            self._object = None
            self._raw.clear()
            self._num_whole += 1
            self._may_be_text = False
        elif reader.fault or (self._may_be_text and self._is_answer and not reader.has_told):
            self._may_be_text &= not reader.has_told
            self._as_text(delta, "".join(self._raw), reader.fault)
            delta.rest = self._text

    @property
    def _is_answer(self) -> bool:
        key = _FIRST_KEY.match(self._head)
        return key is not None and key[1] not in _CALL_KEYS

    def _as_text(self, delta: CallBlockDelta, raw: str, reason: str) -> CallBlockDelta:
        """End the block: an answer in JSON, or a call that is none."""
        delta.ended = True
        if self._may_be_text:
            delta.text = raw
        elif raw.strip():
            delta.calls.append(CallFailed(raw, reason))
        return delta

    def _failed(self, reason: str) -> list[CallDelta]:
        """What stands before an object; a tag alone says nothing."""
        text = "".join(self._raw)
        if not text.replace(PYTHON_TAG, "").strip("; ,\n"):
            return []
        self._raw.clear()
        return [CallFailed(text, reason)]

    def _take(self, num_chars: int) -> None:
        self._raw.append(self._text[:num_chars])
        self._text = self._text[num_chars:]
