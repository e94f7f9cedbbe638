"""From complete calls to pieces, as the request allows them."""

from vllm.parser.dialect import RawCall
from vllm.parser.interface import ParseOptions, ToolUse
from vllm.parser.pieces import Piece, ToolCallArguments, ToolCallEnd, ToolCallStart


class CallCounter:
    """Gives calls their indices and ids.

    Owns: how many calls the answer has.
    """

    def __init__(self, options: ParseOptions) -> None:
        self._options = options
        self._num_calls = 0

    def pieces(self, calls: list[RawCall]) -> list[Piece]:
        """Return the pieces of the calls that the request allows."""
        pieces: list[Piece] = []
        for call in calls:
            too_many = self._options.one_call and self._num_calls > 0
            if self._options.tool_use is not ToolUse.PARSE or too_many or not _is_unicode(call):
                continue
            index = self._num_calls
            self._num_calls += 1
            pieces += [
                ToolCallStart(index, self._options.new_call_id(), call.name),
                ToolCallArguments(index, call.arguments),
                ToolCallEnd(index),
            ]
        return pieces


def _is_unicode(call: RawCall) -> bool:
    """Whether a response can carry it: JSON spells lone surrogates, UTF-8 does not."""
    try:
        (call.name + call.arguments).encode()
    except UnicodeEncodeError:
        return False
    return True
