"""What an answer is made of, piece by piece, and the whole that pieces join to."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """More of the reasoning; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentText:
    """More of the answer itself; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call begins.

    Attributes:
        index: Counts the calls of one answer, from 0.
        id: Unique; the tool's result names it.
        name: Of the function.
    """

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of a call's arguments; those of a whole call join to a JSON object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """A call is over. Every call that starts ends.

    Attributes:
        is_whole: Whether its arguments are complete; else it was cut off, or is malformed.
    """

    index: int
    is_whole: bool = True


@dataclass(frozen=True, slots=True)
class ThoughtClosed:
    """A tag closed a thought that none had opened: it was told as content.

    Attributes:
        num_chars: Of the content's end that were the thought.
    """

    num_chars: int


Piece = (
    ReasoningText | ContentText | ThoughtClosed | ToolCallStart | ToolCallArguments | ToolCallEnd
)


def settle_thoughts(pieces: Sequence[Piece]) -> list[Piece]:
    """Return pieces in which content that a lone closing tag ended is reasoning.

    Of an answer that is told whole all is: where it is told in parts, content that an earlier part
    told stays content.
    """
    settled: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, ThoughtClosed):
            settled = _with_thought(settled, piece.num_chars)
        else:
            settled.append(piece)
    return settled


def _with_thought(pieces: Sequence[Piece], num_chars: int) -> list[Piece]:
    """Pieces whose last content of so many characters is reasoning, if they hold all of it."""
    changed: list[Piece] = []
    left = num_chars
    for at in range(len(pieces) - 1, -1, -1):
        piece = pieces[at]
        if not left or not isinstance(piece, ContentText):
            break
        begin = max(0, len(piece.text) - left)
        left -= len(piece.text) - begin
        changed.insert(0, ReasoningText(piece.text[begin:]))
        if begin:
            changed.insert(0, ContentText(piece.text[:begin]))
        if not left:
            return [*pieces[:at], *changed]
    return list(pieces)


@dataclass(slots=True)
class ToolCall:
    """One complete call; ``arguments`` is the text of a JSON object."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class ParsedAnswer:
    """A whole answer; texts are empty where the model said nothing of the kind."""

    reasoning: str = ""
    content: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)


class AnswerBuilder:
    """Joins pieces. Calls that are not whole are left out.

    Owns: the texts and calls so far.
    """

    def __init__(self) -> None:
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._tool_calls: list[ToolCall] = []
        self._call = ToolCall("", "")
        self._arguments: list[str] = []

    def add(self, pieces: Iterable[Piece]) -> None:
        """Append pieces, in their order."""
        for piece in pieces:
            match piece:
                case ReasoningText(text):
                    self._reasoning.append(text)
                case ContentText(text):
                    self._content.append(text)
                case ThoughtClosed(num_chars):
                    self._close_thought(num_chars)
                case ToolCallStart(_, call_id, name):
                    self._call = ToolCall(call_id, name)
                    self._arguments = []
                case ToolCallArguments(_, text):
                    self._arguments.append(text)
                case ToolCallEnd(_, is_whole):
                    self._call.arguments = "".join(self._arguments)
                    self._tool_calls += [self._call] if is_whole else []

    def _close_thought(self, num_chars: int) -> None:
        content = "".join(self._content)
        begin = len(content) - num_chars
        self._content = [content[:begin]]
        self._reasoning.append(content[begin:])

    @property
    def answer(self) -> ParsedAnswer:
        """The whole so far."""
        return ParsedAnswer(
            "".join(self._reasoning), "".join(self._content), list(self._tool_calls)
        )
