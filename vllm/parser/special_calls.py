"""Calls between special tokens: Kimi's, Mistral's, Gemma's.

<|tool_calls_section_begin|><|tool_call_begin|>functions.find:0<|tool_call_argument_begin|>
    {"text": "x"}<|tool_call_end|><|tool_calls_section_end|>
[TOOL_CALLS][{"name": "find", "arguments": {"text": "x"}}]               v3, v7
[TOOL_CALLS]find[CALL_ID]a1b2c3d4e[ARGS]{"text": "x"}                    v11; without id: v13
<|tool_call>call:find{text:<|"|>x<|"|>,n:42}<tool_call|>
"""

import json
import re

from vllm.parser.call_object import ArgumentsReader, CallObjectReader
from vllm.parser.dialect import CallBegun, CallBlockDelta, CallDelta, CallEnded, CallText
from vllm.parser.interface import ParseOptions
from vllm.parser.json_calls import call_of_json
from vllm.parser.marks import JsonEnd, Marks
from vllm.tokenizers.tool_calls import split_object

_SECTIONS = ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>")
_SECTION_ENDS = ("<|tool_calls_section_end|>", "<|tool_call_section_end|>")
_BEGIN, _ARGUMENTS, _END = (
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
_KIMI_MARKS = Marks((*_SECTION_ENDS, _BEGIN, _ARGUMENTS, _END))
_KIMI_NAME = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?", re.DOTALL)


class KimiDialect:
    """See ToolDialect. The model numbers its calls, and its prompts show these ids again."""

    marks: tuple[str, ...] = _SECTIONS
    leads: tuple[str, ...] = ()
    telltales: tuple[str, ...] = ("<|tool_",)
    ends_reasoning = True
    is_special = True

    def read_block(self, opened_by: str, options: ParseOptions) -> "_KimiReader":
        """Return the reader of what follows a mark."""
        return _KimiReader()


class _KimiReader:
    """Reads one section. Owns: the head of the call that is open, then its arguments."""

    def __init__(self) -> None:
        self._text = ""
        self._head: str | None = None
        self._arguments: ArgumentsReader | None = None
        self._is_empty = True

    def push(self, text: str) -> CallBlockDelta:
        """Take in more of the block."""
        delta = CallBlockDelta([])
        self._text += text
        while True:
            before, mark, self._text = _KIMI_MARKS.split(self._text)
            delta.calls += self._add(before)
            if mark is None:
                return delta
            if mark == _ARGUMENTS:
                delta.calls += self._begin()
                continue
            delta.calls += self._end()
            self._head = "" if mark == _BEGIN else None
            if mark in _SECTION_ENDS:
                delta.ended, delta.rest = True, self._text
                return delta

    def _add(self, text: str) -> list[CallDelta]:
        if self._arguments is None:
            self._head = None if self._head is None else self._head + text
            return []
        if self._is_empty:
            text = text.lstrip()
            self._is_empty = not text
        return self._arguments.push(text)

    def _begin(self) -> list[CallDelta]:
        call_id = (self._head or "").strip()
        name = _KIMI_NAME.fullmatch(call_id)
        self._head = None
        if name is None or self._arguments is not None:
            return []
        self._arguments, self._is_empty = ArgumentsReader(), True
        return [CallBegun(name[1], call_id if ":" in call_id else "")]

    def _end(self) -> list[CallDelta]:
        arguments, self._arguments = self._arguments, None
        if arguments is None:
            return []
        if self._is_empty:
            return [CallText("{}"), CallEnded(True)]
        return arguments.close()

    def close(self, finish_reason: str | None) -> CallBlockDelta:
        """End a call that is open: it may lack arguments."""
        calls = [] if self._arguments is None else self._arguments.close()
        return CallBlockDelta(calls, ended=True)


_TOOL_CALLS, _CALL_ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_MISTRAL_HEAD = re.compile(r"\s*([^\[\]{}\s]+)\s*(?:\[CALL_ID\]\s*(\w+)\s*)?(?:\[ARGS\])?\s*(?=\{)")
_MAX_HEAD_CHARS = 1024


class MistralDialect:
    """See ToolDialect."""

    marks: tuple[str, ...] = (_TOOL_CALLS,)
    leads: tuple[str, ...] = ()
    telltales: tuple[str, ...] = (_TOOL_CALLS[:6],)
    ends_reasoning = True
    is_special = True

    def read_block(self, opened_by: str, options: ParseOptions) -> "_MistralReader":
        """Return the reader of what follows a mark."""
        return _MistralReader()


class _MistralReader:
    """Reads an array of objects, or one call with its name before its arguments.

    Owns: the text before the first object, the object that is read, and what of it is told.
    """

    def __init__(self) -> None:
        self._head = ""
        self._in_array: bool | None = None
        self._arguments: ArgumentsReader | None = None
        self._has_ended = False
        self._body: list[str] = []
        self._json = JsonEnd()
        self._object = CallObjectReader()
        self._is_broken = False

    def push(self, text: str) -> CallBlockDelta:
        """Take in more of the block."""
        if self._in_array is None:
            self._head += text
            text = self._head.lstrip()
            if not text:
                return CallBlockDelta([])
            self._in_array = text[0] in "[{"
            self._head = "" if self._in_array else self._head
            text = text if self._in_array else ""
            if not self._in_array:
                return self._push_named("")
            if text[0] == "[":
                text = text[1:]
        return self._push_array(text) if self._in_array else self._push_named(text)

    def _push_named(self, text: str) -> CallBlockDelta:
        delta = CallBlockDelta([])
        if self._arguments is None:
            self._head += text
            # A fixed length: what is told may not depend on how the text came.
            head = _MISTRAL_HEAD.match(self._head, 0, _MAX_HEAD_CHARS)
            if head is None:
                # Neither a name nor a mark: nothing more is told of it.
                self._is_broken |= len(self._head) >= _MAX_HEAD_CHARS
                self._head = "" if self._is_broken else self._head
                return delta
            delta.calls.append(CallBegun(head[1], head[2] or ""))
            self._arguments = ArgumentsReader()
            text = self._head[head.end() :]
        if self._has_ended:
            return CallBlockDelta([], ended=True, rest=text)
        end = self._json.find_end(text)
        delta.calls += self._arguments.push(text if end is None else text[:end])
        if end is not None:
            self._has_ended = True
            delta.ended, delta.rest = True, text[end:]
        return delta

    def _push_array(self, text: str) -> CallBlockDelta:
        delta = CallBlockDelta([])
        while text:
            if not self._body:
                at = re.search(r"[{\]]", text)
                if at is None:
                    return delta
                if at[0] == "]":
                    delta.ended, delta.rest = True, text[at.end() :]
                    return delta
                text = text[at.start() :]
            end = self._json.find_end(text)
            self._body.append(text if end is None else text[:end])
            delta.calls += self._object.push(self._body[-1])
            text = "" if end is None else text[end:]
            if end is not None:
                delta.calls += self._end_object()
        return delta

    def _end_object(self) -> list[CallDelta]:
        told, body = self._object, "".join(self._body)
        self._body, self._json, self._object = [], JsonEnd(), CallObjectReader()
        if told.has_begun:
            return told.close()
        call = call_of_json(body)
        return call.delta() if call is not None else []

    def close(self, finish_reason: str | None) -> CallBlockDelta:
        """End a call that is open: it may lack arguments."""
        reader = self._arguments if self._arguments is not None else self._object
        return CallBlockDelta(reader.close(), ended=True)


class GemmaDialect:
    """See ToolDialect.

    Args:
        opening: Token before a call.
        closing: Token behind it.
        quote: Token around a text.
        results: Token that opens the results, which are not the model's to say.
    """

    leads: tuple[str, ...] = ()
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

    def read_block(self, opened_by: str, options: ParseOptions) -> "_GemmaReader":
        """Return the reader of what follows a mark."""
        return _GemmaReader(self._closing, self._quote, is_call=opened_by == self._opening)


class _GemmaReader:
    """Reads one call. Owns: its head, then the state of its arguments."""

    def __init__(self, closing: str, quote: str, *, is_call: bool) -> None:
        self._marks = Marks((closing, quote) if is_call else ())
        self._closing = closing
        self._is_call = is_call
        self._text = ""
        self._head = ""
        self._object: _GemmaObject | None = None

    def push(self, text: str) -> CallBlockDelta:
        """Take in more of the block."""
        delta = CallBlockDelta([])
        self._text += text
        while True:
            before, mark, self._text = self._marks.split(self._text)
            delta.calls += self._add(before)
            if mark is None:
                return delta
            if mark == self._closing:
                delta.calls += [] if self._object is None else self._object.end()
                delta.ended, delta.rest = True, self._text
                return delta
            if self._object is not None:
                delta.calls += self._object.quote()

    def _add(self, text: str) -> list[CallDelta]:
        if self._object is not None:
            return self._object.add(text)
        self._head += text if self._is_call else ""
        at = self._head.find("{")
        name = self._head[:at].strip().removeprefix("call:").strip() if at >= 0 else ""
        if not name:
            return []
        rest, self._head = self._head[at:], ""
        self._object = _GemmaObject()
        return [CallBegun(name), *self._object.add(rest)]

    def close(self, finish_reason: str | None) -> CallBlockDelta:
        """End a call that is open: it may lack arguments."""
        return CallBlockDelta([] if self._object is None else [CallEnded(False)], ended=True)


_LITERALS = {"None": "null", "True": "true", "False": "false"}


class _GemmaObject:
    """Tells ``{key:value}`` with bare keys as JSON.

    Owns: the word that is not over yet, how deep the text is nested, and all that was told.
    """

    def __init__(self) -> None:
        self._word = ""
        self._depth = 0
        self._in_text = False
        self._is_over = False
        self._told: list[str] = []

    def add(self, text: str) -> list[CallDelta]:
        """Take in text without quotes."""
        if self._is_over:
            return []
        if self._in_text:
            return self._tell(json.dumps(text, ensure_ascii=False)[1:-1])
        out: list[str] = []
        for char in text:
            if self._is_over:
                break
            if char in "{[":
                self._depth += 1
                out.append(char)
            elif char in "}],":
                out.append(self._literal() + (", " if char == "," else char))
                self._depth -= char != ","
                self._is_over = not self._depth
            elif char == ":":
                key, self._word = self._word.strip(), ""
                out.append((json.dumps(key, ensure_ascii=False) if key else "") + ": ")
            else:
                self._word += char
        return self._tell("".join(out))

    def quote(self) -> list[CallDelta]:
        """Take in what begins or ends a text."""
        if self._is_over:
            return []
        self._in_text = not self._in_text
        self._word = ""
        return self._tell('"')

    def end(self) -> list[CallDelta]:
        """Take in the end of the call."""
        is_whole = self._is_over and split_object("".join(self._told)) is not None
        return [CallEnded(is_whole)]

    def _literal(self) -> str:
        word, self._word = self._word.strip(), ""
        if not word:
            return ""
        word = _LITERALS.get(word, word)
        try:
            json.loads(word, parse_constant=_refuse)
        except ValueError:
            return json.dumps(word, ensure_ascii=False)
        return word

    def _tell(self, text: str) -> list[CallDelta]:
        self._told.append(text)
        return [CallText(text)] if text else []


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is no JSON")
