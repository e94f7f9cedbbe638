"""Calls in a code fence, as models without a token for calls write them (Qwen 2.5 Coder).

    ```json
    {"name": "find", "arguments": {"text": "x"}}
    ```

       the first brace          no more objects          the fence
HEAD ------------------> CALLS -----------------> TAIL -----------> over
  | anything else
  v
 text
"""

import re
from dataclasses import replace

from vllm.parser.bare import BareCallReader
from vllm.parser.dialect import CallBlockDelta, CallCut, CallFailed
from vllm.parser.offered import Offered

FENCE = "```"
_WORDS = ("json", "tool_call", "tool")
_MAX_HEAD_CHARS = 64
# Objects may stand one below the other or in a list.
_HEAD = re.compile(rf"\n?{FENCE}[ \t]*(?:{'|'.join(_WORDS)})?[ \t]*\r?\n\s*(?:\[\s*)?(?=\{{)")
_BEGUN_WORDS = "|".join(word[:n] for word in _WORDS for n in range(len(word), 0, -1))
_BEGUN_HEAD = re.compile(rf"\n?{FENCE}[ \t]*(?:{_BEGUN_WORDS})?[ \t]*(?:\r|\r?\n\s*(?:\[\s*)?)?")
_TAIL = re.compile(rf"\s*(?:\]\s*)?{FENCE}")
_BEGUN_TAIL = re.compile(r"\s*(?:\]\s*)?`{0,2}")


class FencedCallReader:
    """Reads a fence of calls; see BlockReader. Any other fence is text.

    Owns: the text before the first object, their reader, and the text behind the last.

    Args:
        opened_by: The fence, as it was written.
        offered: Functions that may be called.
    """

    def __init__(self, opened_by: str, offered: Offered) -> None:
        self._offered = offered
        self._head = opened_by
        self._calls: BareCallReader | None = None
        self._tail: str | None = None

    def push(self, text: str) -> CallBlockDelta:
        """Take in more of the block."""
        if self._tail is not None:
            return self._end(self._tail + text)
        if self._calls is None:
            self._head += text
            head = _HEAD.match(self._head, 0, _MAX_HEAD_CHARS)
            if head is None:
                is_open = len(self._head) < _MAX_HEAD_CHARS and _BEGUN_HEAD.fullmatch(self._head)
                return CallBlockDelta() if is_open else self._as_text(self._head)
            text, self._head = self._head[head.end() + 1 :], head[0]
            self._calls = BareCallReader("{", self._offered)
        delta = self._with_head(self._calls.push(text))
        if not delta.ended:
            return delta
        if delta.text or (delta.calls and isinstance(delta.calls[-1], CallFailed)):
            return replace(delta, is_quoting=True)
        ended = self._end(delta.rest)
        return replace(ended, calls=delta.calls)

    def close(self, finish_reason: str | None) -> CallBlockDelta:
        """The answer has ended inside the fence: calls that are whole are calls."""
        if self._tail is not None:
            return CallBlockDelta(ended=True)
        if self._calls is None:
            return self._as_text(self._head)
        return self._with_head(self._calls.close(finish_reason))

    def _end(self, tail: str) -> CallBlockDelta:
        """Take the fence that closes; what else stands there follows the block."""
        closed = _TAIL.match(tail)
        if closed is None and _BEGUN_TAIL.fullmatch(tail):
            self._tail = tail
            return CallBlockDelta()
        if closed is None:
            return CallBlockDelta(ended=True, rest=tail, is_quoting=True)
        return CallBlockDelta(ended=True, rest=tail[closed.end() :])

    def _as_text(self, text: str) -> CallBlockDelta:
        """A fence of something else, or the end of one."""
        return CallBlockDelta(text=text, ended=True, is_quoting=True)

    def _with_head(self, delta: CallBlockDelta) -> CallBlockDelta:
        """What turns out to be no call is told from the fence on."""
        if not delta.calls and not delta.text:
            return delta
        head, self._head = self._head, ""
        if delta.text:
            return replace(delta, text=head + delta.text)
        first, *others = delta.calls
        if isinstance(first, CallCut | CallFailed):
            first = replace(first, text=head + first.text)
        return replace(delta, calls=[first, *others])
