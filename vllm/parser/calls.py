"""From what is new of calls to pieces, as the request allows them."""

from collections.abc import Iterable

from vllm.parser.dialect import (
    CallBegun,
    CallCut,
    CallDelta,
    CallEnded,
    CallFailed,
    CallText,
    is_unicode,
)
from vllm.parser.interface import MalformedCall, ParseOptions, ToolUse
from vllm.parser.pieces import ContentText, Piece, ToolCallArguments, ToolCallEnd, ToolCallStart


class CallCounter:
    """Gives calls their indices and ids.

    Owns: how many calls the answer has, their ids, and whether the last one is open.
    """

    def __init__(self, options: ParseOptions) -> None:
        self._options = options
        self._num_calls = 0
        self._ids: set[str] = set()
        self._is_open = False
        self._cut: list[str] = []

    @property
    def num_calls(self) -> int:
        """Calls that were told to begin."""
        return self._num_calls

    @property
    def cut(self) -> str:
        """Text of what a limit cut off and nobody was told of."""
        return "".join(self._cut)

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
            match item:
                case CallBegun():
                    pieces += self._begin(item)
                case CallEnded():
                    pieces += self._end(item)
                case CallFailed():
                    pieces += self._fail(item)
                case CallCut():
                    self._cut.append(item.text)
        return pieces + self._add("".join(texts))

    def _begin(self, begun: CallBegun) -> list[Piece]:
        too_many = self._options.one_call and self._num_calls > 0
        may_call = self._options.tool_use is ToolUse.PARSE and not too_many
        self._is_open = may_call and is_unicode(begun.name)
        if not self._is_open:
            return []
        call_id = self._new_id(begun)
        self._ids.add(call_id)
        self._num_calls += 1
        return [ToolCallStart(self._index, call_id, begun.name)]

    def _new_id(self, begun: CallBegun) -> str:
        """The model's own id where it is of the right form, and no other call's."""
        options = self._options
        if self._is_free(begun.id):
            return begun.id
        if options.spell_id is not None:
            numbers = range(self._num_calls, 2 * self._num_calls + 1)
            spelled = (options.spell_id(begun.name, number) for number in numbers)
            own = next((call_id for call_id in spelled if self._is_free(call_id)), "")
            if own:
                return own
        return options.new_call_id()

    def _is_free(self, call_id: str) -> bool:
        return call_id not in self._ids and self._options.accepts_id(call_id)

    def _add(self, text: str) -> list[Piece]:
        if not text or not self._is_open:
            return []
        return [ToolCallArguments(self._index, text)]

    def _end(self, ended: CallEnded) -> list[Piece]:
        if not self._is_open:
            return []
        self._is_open = False
        return [ToolCallEnd(self._index, ended.is_whole)]

    def _fail(self, failed: CallFailed) -> list[Piece]:
        """What is no call is the answer's text: nothing that was said is lost."""
        if self._options.tool_use is not ToolUse.PARSE or not failed.text:
            return []
        self._options.on_malformed(MalformedCall(failed.text, failed.reason))
        return [ContentText(failed.text)]

    @property
    def _index(self) -> int:
        return self._num_calls - 1
