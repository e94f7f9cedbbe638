"""Calls in Python's spelling, as the whole answer: ``[find(text="x", limit=5), now()]``."""

import ast
import json
import re
from typing import Any

from vllm.parser.dialect import CallBlockDelta, RawCall
from vllm.parser.interface import ParseOptions
from vllm.tokenizers.tool_calls import split_object

_START, _STOP = "<|python_start|>", "<|python_end|>"
# What a list of calls begins with; anything else is text.
_MAY_BEGIN = re.compile(r"\s*(?:$|[A-Za-z_][\w.]*\s*(?:$|\())")
_CONSTANTS = {"true": True, "false": False, "null": None}


class PythonicDialect:
    """See ToolDialect."""

    marks: tuple[str, ...] = (_START,)
    leads: tuple[str, ...] = ("[",)
    telltales: tuple[str, ...] = (_START[:8],)
    ends_reasoning = False
    is_special = False

    def read_block(self, opened_by: str, options: ParseOptions) -> "_PythonicReader":
        """Return the reader of what follows a mark or lead."""
        return _PythonicReader(is_open=opened_by == "[")


class _PythonicReader:
    """Reads calls one after another; each is told when its last bracket closes.

    Owns: the text of the call that is read, how deep it is nested and in which quotes it stands.
    """

    def __init__(self, *, is_open: bool) -> None:
        self._is_open = is_open
        # Behind a mark, or a call, nothing is text.
        self._may_be_text = is_open
        self._all = "[" if is_open else ""
        self._call = ""
        self._depth = 0
        self._quote = ""
        self._is_escaped = False

    def push(self, text: str) -> CallBlockDelta:
        """Take in more of the block."""
        delta = CallBlockDelta([])
        for i, char in enumerate(text):
            self._all += char if self._may_be_text else ""
            if not self._is_open:
                self._is_open = char == "["
                continue
            if not self._depth and not self._quote and char in ",]":
                if char == "]" and not self._call.strip():
                    if self._may_be_text:
                        return self._as_text(text[i + 1 :])
                    rest = text[i + 1 :].removeprefix(_STOP)
                    delta.ended, delta.rest = True, rest
                    return delta
                if char == "]":
                    return self._broken(delta, text[i + 1 :])
                continue
            self._add(char)
            if self._may_be_text and not _MAY_BEGIN.match(self._call) and not self._depth:
                return self._as_text(text[i + 1 :])
            if not self._depth and char == ")" and not self._quote:
                call = read_call(self._call.strip())
                self._call = ""
                if call is None and self._may_be_text:
                    return self._as_text(text[i + 1 :])
                self._may_be_text, self._all = False, ""
                delta.calls += call.delta() if call is not None else []
        return delta

    def close(self, finish_reason: str | None) -> CallBlockDelta:
        """A call that is not closed is none."""
        is_text = self._may_be_text and "(" not in self._all
        return CallBlockDelta([], text=self._all if is_text else "", ended=True)

    def _add(self, char: str) -> None:
        self._call += char
        if self._is_escaped:
            self._is_escaped = False
        elif self._quote:
            self._is_escaped = char == "\\"
            self._quote = "" if char == self._quote else self._quote
        elif char in "\"'":
            self._quote = char
        elif char in "([{":
            self._depth += 1
        elif char in ")]}":
            self._depth -= 1

    def _as_text(self, rest: str) -> CallBlockDelta:
        return CallBlockDelta([], text=self._all, ended=True, rest=rest)

    def _broken(self, delta: CallBlockDelta, rest: str) -> CallBlockDelta:
        """A list whose last entry is no call."""
        if self._may_be_text:
            return self._as_text(rest)
        delta.ended, delta.rest = True, rest
        return delta


def read_call(text: str) -> RawCall | None:
    """Return the call that an expression is; None: it is none whose arguments are values."""
    try:
        node: Any = ast.parse(text, mode="eval").body
        if not isinstance(node, ast.Call) or node.args:
            return None
        arguments: dict[str, Any] = {}
        for keyword in node.keywords:
            value = _value(keyword.value)
            arguments |= {keyword.arg: value} if keyword.arg is not None else value
        dumped = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    name = ast.unparse(node.func)
    return RawCall(name, dumped) if split_object(dumped) is not None else None


def _value(node: ast.expr) -> Any:
    """The value of a literal; JSON's own constants count as such."""
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [_value(key) for key in node.keys if key is not None]
        return dict(zip(keys, map(_value, node.values), strict=True))
    return ast.literal_eval(node)
