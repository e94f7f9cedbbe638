"""DeepSeek-V4's calls: blocks of DSML; ``vllm.tokenizers.deepseek_v4_tools`` shows one.

A call is whole when its ``invoke`` is closed: by its own tag, by the next one, or by the block's.
Nothing behind the first block is text any more.
"""

from collections.abc import Mapping
from typing import Any

from vllm.parser.dialect import CallBlockDelta, CallDelta
from vllm.parser.interface import ParseOptions
from vllm.parser.marks import Marks
from vllm.parser.tag_call import InvokeReader
from vllm.tokenizers.deepseek_v4_tools import BLOCK_GAP, DSML

# Models misspell the outer tag, and leave it out: any tag opens a block.
_TAG, _END_TAG = f"<{DSML}", f"</{DSML}"
_OUTER = ("tool_calls", "toolcalls", "tool")
_INVOKE = f"<{DSML}invoke"
_INVOKE_END = f"</{DSML}invoke>"
_PARAMETER = f"<{DSML}parameter"
_PARAMETER_END = f"</{DSML}parameter>"
_BLOCK_MARKS = Marks(
    (
        *(_INVOKE, _INVOKE_END, _PARAMETER, _PARAMETER_END),
        *(f"</{DSML}{name}>" for name in _OUTER),
    )
)


class DsmlDialect:
    """See ToolDialect."""

    # The blank line before a block is a part of it.
    marks: tuple[str, ...] = (BLOCK_GAP + _TAG, _TAG, _END_TAG)
    leads: tuple[str, ...] = ()
    telltales: tuple[str, ...] = (DSML[0], BLOCK_GAP + "<")
    ends_reasoning = True
    is_special = True

    def read_block(self, opened_by: str, options: ParseOptions) -> "_DsmlReader":
        """Return the reader of what follows a mark."""
        schemas = {tool.name: tool.parameters for tool in options.tools}
        return _DsmlReader(opened_by.removeprefix(BLOCK_GAP), schemas)


class _DsmlReader:
    """Reads everything from the first block on.

    Owns: the text that is not yet sure, and the ``invoke`` that is open; None: none is.
    """

    def __init__(self, begun: str, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        self._schemas = schemas
        self._text = begun
        self._invoke: InvokeReader | None = None

    def push(self, text: str) -> CallBlockDelta:
        """Take in more of the block."""
        delta = CallBlockDelta([])
        self._text += text
        while True:
            before, mark, self._text = _BLOCK_MARKS.split(self._text)
            if self._invoke is not None and before:
                delta.calls += self._invoke.add_text(before)
            if mark is None:
                return delta
            delta.calls += self._read_mark(mark)

    def close(self, finish_reason: str | None) -> CallBlockDelta:
        """End a call that is open: it may lack arguments."""
        return CallBlockDelta([] if self._invoke is None else self._invoke.cut_off())

    def _read_mark(self, mark: str) -> list[CallDelta]:
        if mark in (_PARAMETER, _PARAMETER_END):
            if self._invoke is None:
                return []
            begins = mark == _PARAMETER
            return self._invoke.begin_parameter() if begins else self._invoke.end_parameter()
        delta = [] if self._invoke is None else self._invoke.end()
        self._invoke = InvokeReader(self._schemas) if mark == _INVOKE else None
        return delta
