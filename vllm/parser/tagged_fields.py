"""Calls that write their arguments field by field between tags: Qwen 3 Coder's, GLM's.

    <tool_call>                              <tool_call>find
    <function=find>                          <arg_key>text</arg_key>
    <parameter=text>                         <arg_value>as it is</arg_value>
    as it is                                 </tool_call>
    </parameter>
    </function>
    </tool_call>

Nothing says whether a value is text or JSON: the schema does.
"""

import re
from collections.abc import Mapping
from typing import Any

from vllm.parser.dialect import CallBlockDelta, CallDelta
from vllm.parser.interface import ParseOptions
from vllm.parser.marks import Marks
from vllm.parser.object_writer import ObjectWriter
from vllm.parser.tag_call import InvokeReader, TagHeads

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_XML_MARKS = Marks((_OPEN, _CLOSE, _FUNCTION, _FUNCTION_END, _PARAMETER, _PARAMETER_END))
_IN_VALUE = Marks((_PARAMETER, _PARAMETER_END, _FUNCTION_END))
_NAME = re.compile(r"\s*(?P<name>[^>\n]+?)\s*>")
_XML_HEADS = TagHeads(_NAME, _NAME, trims=True)

_KEY, _KEY_END, _VALUE, _VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_OUTSIDE_VALUE = Marks((_KEY, _KEY_END, _VALUE, _CLOSE))
_INSIDE_VALUE = Marks((_VALUE_END,))


def _schemas(options: ParseOptions) -> Mapping[str, Mapping[str, Any]]:
    return {tool.name: tool.parameters for tool in options.tools}


class Qwen3CoderDialect:
    """See ToolDialect."""

    # Models leave the outer tag out.
    marks: tuple[str, ...] = ("\n" + _OPEN, _OPEN, _FUNCTION)
    leads: tuple[str, ...] = ()
    telltales: tuple[str, ...] = ("<tool_", "<function")
    ends_reasoning = True
    is_special = False

    def read_block(self, opened_by: str, options: ParseOptions) -> "_XmlReader":
        """Return the reader of what follows a mark."""
        return _XmlReader(opened_by.lstrip("\n"), _schemas(options))


class _XmlReader:
    """Reads one block.

    Owns: the text that is not yet sure, the call that is open, and whether one has ended.
    """

    def __init__(self, begun: str, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        self._schemas = schemas
        self._text = begun
        self._call: InvokeReader | None = None
        self._in_value = False
        self._has_called = False

    def push(self, text: str) -> CallBlockDelta:
        """Take in more of the block."""
        delta = CallBlockDelta([])
        self._text += text
        while True:
            marks = _IN_VALUE if self._in_value else _XML_MARKS
            before, mark, self._text = marks.split(self._text)
            if self._call is not None and before:
                delta.calls += self._call.add_text(before)
            elif self._has_called and before.strip():
                # The outer tag was left out at the end, too.
                delta.ended, delta.rest = True, before.lstrip() + (mark or "") + self._text
                return delta
            if mark is None:
                return delta
            delta.calls += self._read_mark(mark)
            if mark == _CLOSE:
                delta.ended, delta.rest = True, self._text
                return delta

    def _read_mark(self, mark: str) -> list[CallDelta]:
        self._in_value = mark == _PARAMETER and self._call is not None
        if mark == _PARAMETER:
            return self._call.begin_parameter() if self._call is not None else []
        if mark == _PARAMETER_END:
            return self._call.end_parameter() if self._call is not None else []
        if mark == _OPEN:
            return []
        delta = [] if self._call is None else self._call.end()
        self._has_called |= self._call is not None
        self._call = InvokeReader(self._schemas, _XML_HEADS) if mark == _FUNCTION else None
        return delta

    def close(self, finish_reason: str | None) -> CallBlockDelta:
        """End a call that is open: it may lack arguments."""
        calls = [] if self._call is None else self._call.cut_off()
        return CallBlockDelta(calls, ended=True)


class GlmDialect:
    """See ToolDialect."""

    marks: tuple[str, ...] = ("\n" + _OPEN, _OPEN)
    leads: tuple[str, ...] = ()
    telltales: tuple[str, ...] = ("<tool_",)
    ends_reasoning = True
    is_special = False

    def read_block(self, opened_by: str, options: ParseOptions) -> "_GlmReader":
        """Return the reader of what follows a mark."""
        return _GlmReader(_schemas(options))


class _GlmReader:
    """Reads one call. Owns: its name, the key that is open, and its writer."""

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        self._schemas = schemas
        self._text = ""
        self._said = ""  # between two marks, outside of values
        self._key = ""
        self._in_value = False
        self._writer: ObjectWriter | None = None

    def push(self, text: str) -> CallBlockDelta:
        """Take in more of the block."""
        delta = CallBlockDelta([])
        self._text += text
        while True:
            marks = _INSIDE_VALUE if self._in_value else _OUTSIDE_VALUE
            before, mark, self._text = marks.split(self._text)
            if self._in_value and self._writer is not None:
                delta.calls += self._writer.add(before)
            else:
                self._said += before
            if mark is None:
                return delta
            delta.calls += self._read_mark(mark)
            if mark == _CLOSE:
                delta.ended, delta.rest = True, self._text
                return delta

    def _read_mark(self, mark: str) -> list[CallDelta]:
        said, self._said = self._said.strip(), ""
        delta: list[CallDelta] = []
        if self._writer is None and said:
            self._writer = ObjectWriter(said, self._schemas)
            delta = self._writer.begin()
        if self._writer is None:
            return []
        if mark == _KEY_END:
            self._key = said
        elif mark == _VALUE:
            self._in_value = True
            delta += self._writer.open(self._key)
        elif mark == _VALUE_END:
            self._in_value = False
            delta += self._writer.close()
        elif mark == _CLOSE:
            delta += self._writer.end()
        return delta

    def close(self, finish_reason: str | None) -> CallBlockDelta:
        """End a call that is open: it may lack arguments."""
        return CallBlockDelta([] if self._writer is None else self._writer.cut_off(), ended=True)
