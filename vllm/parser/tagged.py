"""The machine for families that tag their reasoning and their calls.

          <think>                </think>                <think>
START ------------> REASONING --------------> START  <----------+
  | a lead              | a mark                | text          |
  v                     v                       v               |
BLOCK <-------------------------------------- CONTENT ----> REASONING
  | end                            a mark
  v
START

An opening tag opens a thought wherever it stands; a closing one that stands alone ends the thought
that the text before it was.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from vllm.parser.calls import CallCounter
from vllm.parser.dialect import BlockReader, CallBlockDelta, ToolDialect
from vllm.parser.interface import ParseOptions, ToolUse
from vllm.parser.marks import Marks, parts_of
from vllm.parser.offered import Offered
from vllm.parser.pieces import ContentText, Piece, ReasoningText, ThoughtClosed


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """How a family tags its reasoning.

    Attributes:
        start: Opens it.
        end: Closes it.
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
        self._offered = Offered(options.tools)
        self._calls = CallCounter(options)
        self._state = _State.START
        if options.in_reasoning and tags is not None:
            self._state = _State.REASONING
        self._text = ""
        # White space before the content: whether it is said depends on what follows.
        self._space: list[str] = []
        self._block: BlockReader | None = None
        self._opened_by = ""
        # Whether the next mark that quotes ends a quotation. Before any call each of them quotes:
        # who explains first shows an example.
        self._is_quoting = False
        # Line breaks at the end of the reasoning so far, where they may belong to the tag.
        self._breaks: list[str] = []
        self._is_thought_begun = False
        self._drops_breaks = False
        # Content since the last thought or call: a lone closing tag would make it a thought.
        self._num_unclosed = 0
        self._num_failed = 0
        self._has_answered = False
        # What the request forbids, told only where nothing else is.
        self._swallowed: list[str] = []
        self._forbidden: list[str] = []
        own = (tags.start, tags.end) if tags is not None else ()
        blocks = dialect.marks if dialect is not None else ()
        self._leads = dialect.leads if dialect is not None else ()
        self._quotes = dialect.quotes if dialect is not None else ()
        # Texts that may go on to what counts only where the content begins.
        self._beginnings = frozenset(
            mark[:length] for mark in (*self._leads, *own) for length in range(1, len(mark) + 1)
        ).difference(self._leads)
        self._longest_beginning = max(map(len, self._beginnings), default=0)
        self._telltales = dialect.telltales if dialect is not None else ()
        self._marks = Marks((*own, *blocks))
        ends = dialect is not None and dialect.ends_reasoning and options.may_call_in_thought
        self._reasoning_marks = Marks((*own, *(blocks if ends else ())))

    def feed(self, text: str, token_ids: Sequence[int]) -> list[Piece]:
        """Take in what the model said next; return what is now sure."""
        pieces: list[Piece] = []
        for part in parts_of(text):
            self._text += part
            self._read(pieces)
        return pieces

    def finish(self, finish_reason: str | None) -> list[Piece]:
        """Return what was held back; a call that is not complete ends."""
        pieces: list[Piece] = []
        while self._block is not None:
            block, self._block = self._block, None
            delta = block.close(finish_reason)
            if self._calls.num_calls and delta.text.strip() in self._quotes:
                # A quotation of nothing behind calls: of a fence the model wrote only the end.
                delta.text = ""
            self._swallow("", delta)
            self._take_status(delta, pieces)
            self._read(pieces)
        rest, self._text = self._text, ""
        if any(telltale in rest for telltale in self._telltales):
            rest = ""  # what was held back is the beginning of a mark
        if self._state is _State.REASONING:
            self._say_reasoning(rest, pieces)
        else:
            drops = self._state is _State.START and self._drops_breaks
            rest = "".join(self._space) + rest
            self._say_content(rest.strip() if drops else rest, pieces)
        if not self._has_answered:
            # An answer that says something is not told as nothing.
            self._say_content("".join(self._swallowed) + self._calls.cut, pieces)
        return pieces

    def _read(self, pieces: list[Piece]) -> None:
        while self._text and self._step(pieces):
            pass

    def _step(self, pieces: list[Piece]) -> bool:
        """Make one transition; return whether another may follow."""
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
            self._is_thought_begun = False
            return True
        self._breaks.clear()
        self._begin_content(drops_breaks=self._tags is not None and self._tags.trims)
        if self._tags is None or mark != self._tags.end:
            self._open_block(mark)
        return True

    def _begin_content(self, *, drops_breaks: bool) -> None:
        self._state = _State.START
        self._drops_breaks = drops_breaks
        self._num_unclosed = 0

    def _step_start(self) -> bool:
        """Decide what the content begins with; its white space waits for that."""
        stripped = self._text.lstrip()
        self._space.append(self._text[: len(self._text) - len(stripped)])
        self._text = stripped
        if not stripped:
            return False
        if stripped.startswith(self._leads):
            lead = next(lead for lead in self._leads if stripped.startswith(lead))
            self._text = stripped.removeprefix(lead)
            self._open_block(lead)
            return True
        if len(stripped) <= self._longest_beginning and stripped in self._beginnings:
            return False
        if self._tags is not None and stripped.startswith((self._tags.start, self._tags.end)):
            opens = stripped.startswith(self._tags.start)
            self._space.clear()
            self._text = stripped.removeprefix(self._tags.start if opens else self._tags.end)
            if opens:
                self._begin_reasoning()
            return True
        space = "".join(self._space)
        self._space.clear()
        self._text = (space.lstrip("\n") if self._drops_breaks else space) + stripped
        self._state = _State.CONTENT
        return True

    def _begin_reasoning(self) -> None:
        self._state = _State.REASONING
        self._is_thought_begun = False

    def _step_content(self, pieces: list[Piece]) -> bool:
        before, mark, self._text = self._marks.split(self._text)
        self._say_content(before, pieces)
        if mark is None:
            return False
        if self._tags is not None and mark == self._tags.start:
            self._begin_reasoning()
        elif self._tags is not None and mark == self._tags.end:
            if self._num_unclosed:
                pieces.append(ThoughtClosed(self._num_unclosed))
            self._begin_content(drops_breaks=self._tags.trims)
        elif mark in self._quotes and (self._is_quoting or not self._calls.num_calls):
            self._is_quoting = not self._is_quoting
            self._say_content(mark, pieces)
        else:
            self._open_block(mark)
        return True

    def _step_block(self, pieces: list[Piece]) -> bool:
        if self._block is None:
            return False
        text, self._text = self._text, ""
        delta = self._block.push(text)
        self._swallow(text, delta)
        if delta.ended:
            self._block = None
        self._take_status(delta, pieces)
        return self._block is None

    def _open_block(self, opened_by: str) -> None:
        if self._dialect is not None:
            self._space.clear()
            self._opened_by = opened_by
            self._block = self._dialect.read_block(opened_by, self._offered)
            self._state = _State.BLOCK
            self._forbidden = [opened_by]
            self._num_failed = 0

    def _swallow(self, text: str, delta: CallBlockDelta) -> None:
        """Keep the text of a block that the request forbids."""
        if self._options.tool_use is ToolUse.PARSE:
            return
        self._forbidden.append(text)
        if delta.ended:
            block = "".join(self._forbidden)
            self._swallowed.append(block[: len(block) - len(delta.text) - len(delta.rest)])
            self._forbidden = []

    def _take_status(self, delta: CallBlockDelta, pieces: list[Piece]) -> None:
        told = self._calls.pieces(delta.calls)
        pieces += told
        self._has_answered |= bool(told)
        if told:
            # How much of the block's end was no call.
            last = told[-1]
            self._num_failed = len(last.text) if isinstance(last, ContentText) else 0
        if delta.ended:
            text, self._is_quoting = delta.text, delta.is_quoting
            if text and self._opened_by in self._quotes:
                # Read anew, it would open the same block.
                self._say_content(self._opened_by, pieces)
                text = text.removeprefix(self._opened_by)
            self._text = text + delta.rest
            num_said = self._num_unclosed if delta.text else 0
            # Line breaks between blocks are theirs; what was no block is text from its beginning.
            self._begin_content(drops_breaks=not delta.text)
            self._num_unclosed = num_said + self._num_failed
            if delta.text or self._num_unclosed or self._is_quoting:
                self._state = _State.CONTENT

    def _say_reasoning(self, text: str, pieces: list[Piece]) -> None:
        if self._tags is not None and self._tags.trims:
            if not self._is_thought_begun:
                text = text.lstrip("\n")
            kept = text.rstrip("\n")
            breaks = text[len(kept) :]
            if kept:
                text = "".join(self._breaks) + kept
                self._breaks.clear()
            else:
                text = ""
            self._breaks += [breaks] if breaks else []
        if text:
            self._is_thought_begun = True
            pieces.append(ReasoningText(text))

    def _say_content(self, text: str, pieces: list[Piece]) -> None:
        if text:
            self._num_unclosed += len(text)
            self._has_answered |= not text.isspace()
            pieces.append(ContentText(text))
