"""From what is new of calls to pieces, as the request allows them."""

from collections.abc import Iterable

from vllm.parser.dialect import CallBegun, CallDelta, CallEnded, CallText, is_unicode
from vllm.parser.interface import ParseOptions, ToolUse
from vllm.parser.pieces import Piece, ToolCallArguments, ToolCallEnd, ToolCallStart


class CallCounter:
    """Gives calls their indices and ids.

    Owns: how many calls the answer has, and whether the last one is open.
    """

    def __init__(self, options: ParseOptions) -> None:
        self._options = options
        self._num_calls = 0
        self._is_open = False

    def pieces(self, delta: Iterable[CallDelta]) -> list[Piece]:
        """Return the pieces of the calls that the request allows; neighbouring texts are joined."""
        pieces: list[Piece] = []
        texts: list[str] = []
        for item in delta:
            if isinstance(item, CallText):
                texts.append(item.text)
                continue
            pieces += self._add("".join(texts))
            texts.clear()
            pieces += self._begin(item) if isinstance(item, CallBegun) else self._end(item)
        return pieces + self._add("".join(texts))

    def _begin(self, begun: CallBegun) -> list[Piece]:
        too_many = self._options.one_call and self._num_calls > 0
        may_call = self._options.tool_use is ToolUse.PARSE and not too_many
        self._is_open = may_call and is_unicode(begun.name)
        if not self._is_open:
            return []
        self._num_calls += 1
        call_id = begun.id if begun.id and is_unicode(begun.id) else self._options.new_call_id()
        return [ToolCallStart(self._index, call_id, begun.name)]

    def _add(self, text: str) -> list[Piece]:
        if not text or not self._is_open:
            return []
        return [ToolCallArguments(self._index, text)]

    def _end(self, ended: CallEnded) -> list[Piece]:
        if not self._is_open:
            return []
        self._is_open = False
        return [ToolCallEnd(self._index, ended.is_whole)]

    @property
    def _index(self) -> int:
        return self._num_calls - 1
