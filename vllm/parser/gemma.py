"""Gemma's calls, between special tokens: ``<|tool_call>call:find{text:<|"|>x<|"|>,n:42}``."""

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
from vllm.parser.literals import LiteralStream
from vllm.parser.marks import Marks
from vllm.parser.near_misses import may_begin, read_calls
from vllm.parser.offered import Offered

_HEAD = re.compile(r"(?:call:)?\s*(?P<name>[^\s{}()\[\]<>\"',=:]+)\s*(?=\{)")
_MAX_HEAD_CHARS = 1024


class GemmaDialect:
    """See ToolDialect.

    Args:
        opening: Token before a call.
        closing: Token behind it.
        quote: Token around a text.
        results: Token that opens the results, which are not the model's to say.
    """

    leads: tuple[str, ...] = ()
    quotes: tuple[str, ...] = ()
    ends_reasoning = True
    is_special = True

    def __init__(
        self,
        opening: str = "<|tool_call>",
        closing: str = "<tool_call|>",
        quote: str = '<|"|>',
        results: str = "<|tool_response>",
    ) -> None:
        self.marks: tuple[str, ...] = (opening, results)
        self.telltales: tuple[str, ...] = (opening[:6],)
        self._opening = opening
        self._closing = closing
        self._quote = quote
        self._marks = Marks((closing, quote, opening))

    def read_block(self, opened_by: str, offered: Offered) -> "_GemmaReader | _Unsaid":
        """Return the reader of what follows a mark."""
        if opened_by != self._opening:
            return _Unsaid()
        return _GemmaReader(opened_by, self._closing, self._quote, self._marks, offered)


GEMMA4 = GemmaDialect()
FUNCTION_GEMMA = GemmaDialect(
    "<start_function_call>", "<end_function_call>", "<escape>", "<start_function_response>"
)


class _Unsaid:
    """What is not the model's to say: results that it made up."""

    def push(self, text: str) -> CallBlockDelta:
        """Take in more of it."""
        return CallBlockDelta()

    def close(self, finish_reason: str | None) -> CallBlockDelta:
        """It ends with the answer."""
        return CallBlockDelta(ended=True)


class _GemmaReader:
    """Reads one block: a call, or several.

    Owns: the text that is not yet sure, the call that is open and its text so far.
    """

    def __init__(
        self, opened_by: str, closing: str, quote: str, marks: Marks, offered: Offered
    ) -> None:
        self._offered = offered
        self._opening = opened_by
        self._closing = closing
        self._quote = quote
        self._marks = marks
        self._raw = [opened_by]
        self._text = ""  # not yet split
        self._head = ""
        self._arguments: ArgumentsReader | None = None
        self._object: JsonCallReader | None = None
        self._loose: list[str] | None = None
        self._fault = ""
        self._num_whole = 0

    def push(self, text: str) -> CallBlockDelta:
        """Take in more of the block."""
        delta = CallBlockDelta()
        self._text += text
        while not delta.ended:
            before, mark, self._text = self._marks.split(self._text)
            if before:
                self._add(before, delta)
            if mark is None:
                return delta
            if mark == self._quote:
                self._add_quote(delta)
            else:
                self._end_block(mark, delta)
        return delta

    def close(self, finish_reason: str | None) -> CallBlockDelta:
        """End a call that is open: it may lack arguments."""
        delta = CallBlockDelta(ended=True)
        has_told = self._arguments is not None or (
            self._object is not None and self._object.has_told
        )
        is_over = self._arguments is not None and self._arguments.is_over
        if finish_reason == "stop" or is_over:
            self._end_call(delta)
            delta.calls += self._failed(self._fault or "the call is not closed")
            return delta
        if self._arguments is not None:
            delta.calls.append(CallEnded(False))
        elif self._object is not None:
            delta.calls += self._object.close()
        raw = "".join((*self._raw, self._head, *(self._loose or ()), self._text))
        if not has_told and raw != self._opening:
            delta.calls.append(CallCut(raw))
        return delta

    # ---- text between marks ------------------------------------------------------------------

    def _add(self, text: str, delta: CallBlockDelta) -> None:
        while text:
            if self._loose is not None:
                self._loose.append(text)
                return
            if self._fault:
                self._raw.append(text)
                return
            if self._object is not None:
                text = self._add_to_object(self._object, text, delta)
            elif self._arguments is not None:
                text = self._add_to_arguments(self._arguments, text, delta)
            else:
                text = self._add_to_head(text, delta)

    def _add_to_head(self, text: str, delta: CallBlockDelta) -> str:
        head = self._head + text
        begun = head.lstrip()
        self._head = ""
        self._raw.append(head[: len(head) - len(begun)])
        if not begun:
            return ""
        if begun[0] == "{":
            self._object = JsonCallReader(self._offered)
            return begun
        if self._num_whole and begun[0] in "},;":
            self._raw.append(begun[0])
            return begun[1:]
        found = _HEAD.match(begun, 0, _MAX_HEAD_CHARS)
        if found is not None and self._offered.has(found["name"]):
            self._raw.append(begun[: found.end()])
            schema = self._offered.schema(found["name"])
            self._arguments = ArgumentsReader(LiteralStream(loose=True, schema=schema))
            delta.calls.append(CallBegun(found["name"]))
            return begun[found.end() :]
        near = may_begin(begun, self._offered)
        if near is None:
            self._head = begun  # more must be seen
            return ""
        if near:
            self._loose = []
        elif found is not None:
            self._fault = self._offered.refusal(found["name"])
        else:
            self._fault = "no call stands in its place"
        return begun

    def _add_to_object(self, reader: JsonCallReader, text: str, delta: CallBlockDelta) -> str:
        told, rest = reader.push(text)
        delta.calls += told
        self._raw.append(text[: len(text) - len(rest)])
        if reader.fault or reader.is_over:
            self._fault, self._object = reader.fault, None
            if not self._fault:
                self._num_whole += 1
                self._raw.clear()
        return rest

    def _add_to_arguments(self, reader: ArgumentsReader, text: str, delta: CallBlockDelta) -> str:
        told, rest = reader.push(text)
        delta.calls += told
        self._raw.append(text[: len(text) - len(rest)])
        if reader.fault or reader.is_over:
            self._end_arguments(reader, delta)
        return rest

    def _end_arguments(self, reader: ArgumentsReader, delta: CallBlockDelta) -> None:
        self._arguments = None
        delta.calls.append(CallEnded(reader.is_whole))
        if reader.is_whole:
            self._num_whole += 1
            self._raw.clear()
        else:
            self._fault = reader.fault or "its arguments cannot be read"

    # ---- marks -------------------------------------------------------------------------------

    def _add_quote(self, delta: CallBlockDelta) -> None:
        if self._loose is not None:
            self._loose.append(self._quote)
            return
        if self._head:
            self._raw.append(self._head)
            self._head = ""
        self._raw.append(self._quote)
        if self._arguments is not None and not self._fault:
            delta.calls += self._arguments.toggle_quote(self._quote)
            if self._arguments.fault:
                self._end_arguments(self._arguments, delta)
        elif not self._fault:
            self._fault = "a text stands outside of a call"

    def _end_block(self, mark: str, delta: CallBlockDelta) -> None:
        self._end_call(delta)
        delta.ended, delta.rest = True, self._text
        if mark == self._opening:
            # The end of this block was left out.
            delta.rest = mark + self._text
        elif self._raw:
            self._raw.append(mark)
        delta.calls += self._failed(self._fault or "the call is not closed")

    def _end_call(self, delta: CallBlockDelta) -> None:
        """End what is open."""
        if self._arguments is not None:
            self._fault = self._fault or "its arguments are not closed"
            delta.calls.append(CallEnded(False))
            self._arguments = None
        if self._object is not None:
            delta.calls += self._object.close()
            self._fault = self._fault or self._object.fault
            if self._object.is_over:
                self._raw.clear()
            self._object = None
        text = self._head + "".join(self._loose or ())
        if not text:
            self._loose = None
            return
        self._head, self._loose = "", None
        if text.strip() and not self._fault:
            calls = read_calls(text, self._offered, self._quote)
            delta.calls += [item for call in calls for item in call.delta()]
            text = "" if calls else text
            if calls:
                self._raw.clear()
        if text:
            self._raw.append(text)

    def _failed(self, reason: str) -> list[CallDelta]:
        text = "".join(self._raw)
        self._raw.clear()
        if text == self._opening:
            return []
        said = text.replace(self._opening, "").replace(self._closing, "").replace(self._quote, "")
        return [CallFailed(text, reason)] if said.strip("},; \n") else []
