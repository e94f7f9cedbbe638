"""The machine for families that tag their reasoning and their calls.

          <think>                </think>
START ------------> REASONING --------------> START
  | a lead              | a mark                | text
  v                     v                       v
BLOCK <-------------------------------------- CONTENT
  | end                            a mark
  v
START
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from vllm.parser.calls import CallCounter
from vllm.parser.dialect import BlockReader, CallBlockDelta, ToolDialect
from vllm.parser.interface import ParseOptions, ToolUse
from vllm.parser.marks import Marks
from vllm.parser.pieces import ContentText, Piece, ReasoningText


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """How a family tags its reasoning.

    Attributes:
        start: Opens it, at the beginning of an answer; elsewhere it is dropped.
        end: Closes it; elsewhere it is dropped.
        trims: Whether line breaks around the reasoning and before the content belong to the tags.
    """

    start: str = "<think>"
    end: str = "</think>"
    trims: bool = False


class _State(Enum):
    START = "start"  # of the content: nothing but white space has been said of it
    REASONING = "reasoning"
    CONTENT = "content"
    BLOCK = "block"


class TaggedParser:
    """Reads one answer; see ResponseParser.

    Owns: the state, the text that is not yet sure, the block that is being read.

    Args:
        tags: Of the reasoning; None: there is none.
        dialect: Of the calls; None: there are none.
        options: Of the request.
    """

    def __init__(
        self, tags: ReasoningTags | None, dialect: ToolDialect | None, options: ParseOptions
    ) -> None:
        if dialect is not None and options.tool_use is ToolUse.OFF and not dialect.is_special:
            dialect = None
        self._tags = tags
        self._dialect = dialect
        self._options = options
        self._calls = CallCounter(options)
        self._state = _State.START
        if options.in_reasoning and tags is not None:
            self._state = _State.REASONING
        self._text = ""
        self._block: BlockReader | None = None
        # Line breaks at the end of the reasoning so far, where they may belong to the tag.
        self._breaks = ""
        self._has_reasoned = False
        self._drops_breaks = False
        own = (tags.start, tags.end) if tags is not None else ()
        blocks = dialect.marks if dialect is not None else ()
        self._leads = dialect.leads if dialect is not None else ()
        self._telltales = dialect.telltales if dialect is not None else ()
        self._marks = Marks((*own, *blocks))
        in_reasoning = blocks if dialect is not None and dialect.ends_reasoning else ()
        self._reasoning_marks = Marks((*own, *in_reasoning))

    def feed(self, text: str, token_ids: Sequence[int]) -> list[Piece]:
        """Take in what the model said next; return what is now sure."""
        self._text += text
        pieces: list[Piece] = []
        while self._step(pieces):
            pass
        return pieces

    def finish(self, finish_reason: str | None) -> list[Piece]:
        """Return what was held back; a call that is not complete ends."""
        pieces: list[Piece] = []
        if self._block is not None:
            self._take_status(self._block.close(finish_reason), pieces)
            pieces += self.feed("", ())
        rest, self._text = self._text, ""
        if any(telltale in rest for telltale in self._telltales):
            rest = ""  # what was held back is the beginning of a mark
        if self._state is _State.REASONING:
            self._say_reasoning(rest, pieces)
        else:
            drops = self._state is _State.START and self._drops_breaks
            self._say_content(rest.strip() if drops else rest, pieces)
        return pieces

    def _step(self, pieces: list[Piece]) -> bool:
        """Make one transition; return whether another may follow."""
        if not self._text:
            return False
        if self._state is _State.REASONING:
            return self._step_reasoning(pieces)
        if self._state is _State.BLOCK:
            return self._step_block(pieces)
        if self._state is _State.START:
            return self._step_start()
        return self._step_content(pieces)

    def _step_reasoning(self, pieces: list[Piece]) -> bool:
        before, mark, self._text = self._reasoning_marks.split(self._text)
        self._say_reasoning(before, pieces)
        if mark is None:
            return False
        if self._tags is not None and mark == self._tags.start:
            return True
        self._breaks = ""
        self._state = _State.START
        self._drops_breaks = self._tags is not None and self._tags.trims
        if self._tags is None or mark != self._tags.end:
            self._open_block(mark)
        return True

    def _step_start(self) -> bool:
        """Decide what the content begins with; its white space waits for that."""
        stripped = self._text.lstrip()
        if not stripped:
            return False
        lead = next((lead for lead in self._leads if stripped.startswith(lead)), None)
        if lead is not None:
            self._text = stripped.removeprefix(lead)
            self._open_block(lead)
            return True
        if any(lead.startswith(stripped) for lead in self._leads):
            return False
        start = self._tags.start if self._tags is not None else ""
        if start and stripped.startswith(start) and not self._has_reasoned:
            self._text = stripped.removeprefix(start)
            self._state = _State.REASONING
            return True
        if start and start.startswith(stripped) and not self._has_reasoned:
            return False
        if self._drops_breaks:
            self._text = self._text.lstrip("\n")
        self._state = _State.CONTENT
        return True

    def _step_content(self, pieces: list[Piece]) -> bool:
        before, mark, self._text = self._marks.split(self._text)
        self._say_content(before, pieces)
        if mark is None:
            return False
        if self._tags is None or mark not in (self._tags.start, self._tags.end):
            self._open_block(mark)
        return True

    def _step_block(self, pieces: list[Piece]) -> bool:
        if self._block is None:
            return False
        text, self._text = self._text, ""
        self._take_status(self._block.push(text), pieces)
        return self._block is None

    def _open_block(self, opened_by: str) -> None:
        if self._dialect is not None:
            self._block = self._dialect.read_block(opened_by, self._options)
            self._state = _State.BLOCK

    def _take_status(self, delta: CallBlockDelta, pieces: list[Piece]) -> None:
        pieces += self._calls.pieces(delta.calls)
        if delta.ended:
            self._block = None
            self._text = delta.text + delta.rest
            # Line breaks between blocks are theirs; what was no block is text from its beginning.
            self._state = _State.CONTENT if delta.text else _State.START
            self._drops_breaks = not delta.text

    def _say_reasoning(self, text: str, pieces: list[Piece]) -> None:
        if self._tags is not None and self._tags.trims:
            text = self._breaks + text
            if not self._has_reasoned:
                text = text.lstrip("\n")
            kept = text.rstrip("\n")
            self._breaks = text[len(kept) :]
            text = kept
        if text:
            self._has_reasoned = True
            pieces.append(ReasoningText(text))

    def _say_content(self, text: str, pieces: list[Piece]) -> None:
        if text:
            pieces.append(ContentText(text))
