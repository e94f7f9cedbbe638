"""Calls in JSON, told while they are read."""

import json
import re

from vllm.parser.dialect import CallBegun, CallDelta, CallEnded, CallText
from vllm.parser.marks import JsonEnd
from vllm.tokenizers.tool_calls import split_object

_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_MAX_HEAD_CHARS = 1024


class ArgumentsReader:
    """Tells the text of a JSON object as it comes; with its last character the call is over.

    Owns: the text so far, and how deep that is nested.
    """

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._end = JsonEnd()
        self._is_over = False

    def push(self, text: str) -> list[CallDelta]:
        """Take in more; the first character is the object's. What follows it is nobody's."""
        if self._is_over or not text:
            return []
        end = self._end.find_end(text)
        self._texts.append(text if end is None else text[:end])
        delta: list[CallDelta] = [CallText(self._texts[-1])]
        if end is not None:
            self._is_over = True
            delta.append(CallEnded(split_object("".join(self._texts)) is not None))
        return delta

    def close(self) -> list[CallDelta]:
        """Nothing follows: end the call, if its object has not."""
        was_over, self._is_over = self._is_over, True
        return [] if was_over else [CallEnded(False)]


class CallObjectReader:
    """Tells a call spelled as ``{"name": ..., "arguments": {...}}`` in this order.

    Other objects are told nothing of: they have to be read whole.

    Owns: the text until the arguments begin, then their reader.
    """

    def __init__(self) -> None:
        self._head = ""
        self._may_begin = True
        self._arguments: ArgumentsReader | None = None

    @property
    def has_begun(self) -> bool:
        """Whether something of the call was told."""
        return self._arguments is not None

    def push(self, text: str) -> list[CallDelta]:
        """Take in more of the object."""
        if self._arguments is not None:
            return self._arguments.push(text)
        if not self._may_begin:
            return []
        self._head += text
        # A fixed length: what is told may not depend on how the text came.
        head = _HEAD.match(self._head, 0, _MAX_HEAD_CHARS)
        if head is None:
            self._may_begin = len(self._head) < _MAX_HEAD_CHARS
            return []
        name, rest = _read_name(head[1]), self._head[head.end() :]
        self._head = ""
        self._may_begin = bool(name)
        if not name:
            return []
        self._arguments = ArgumentsReader()
        return [CallBegun(name), *self._arguments.push(rest)]

    def close(self) -> list[CallDelta]:
        """Nothing follows: end the call, if one is open."""
        return [] if self._arguments is None else self._arguments.close()


def _read_name(text: str) -> str:
    try:
        return str(json.loads(text))
    except ValueError:
        return ""
