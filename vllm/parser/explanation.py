"""How an answer is read, for people: what each part of its text is, and why a call is malformed."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from vllm.parser.interface import MalformedCall, ParseOptions
from vllm.parser.pieces import (
    AnswerBuilder,
    ContentText,
    ParsedAnswer,
    Piece,
    ReasoningText,
    ToolCallEnd,
    ToolCallStart,
)
from vllm.parser.registry import ParserChoice


@dataclass(frozen=True, slots=True)
class Part:
    """A part of an answer's text.

    Attributes:
        kind: "reasoning", "content", "call", "broken call" or "markup".
        text: As the model wrote it.
    """

    kind: str
    text: str


@dataclass(slots=True)
class Reading:
    """An answer as it is read.

    Attributes:
        answer: What clients are told.
        parts: All of its text, in order.
        malformed: Calls that are told as text, and why.
    """

    answer: ParsedAnswer
    parts: list[Part] = field(default_factory=list)
    malformed: list[MalformedCall] = field(default_factory=list)


def explain_answer(
    choice: ParserChoice, text: str, options: ParseOptions, finish_reason: str = "stop"
) -> Reading:
    """Return how an answer is read.

    Args:
        choice: The formats.
        text: All that the model said.
        options: Of the request.
        finish_reason: The engine's: "stop", "length", ...
    """
    malformed: list[MalformedCall] = []
    parser = choice.make_parser(replace(options, on_malformed=malformed.append))
    pieces = [*parser.feed(text, []), *parser.finish(finish_reason)]
    builder = AnswerBuilder()
    builder.add(pieces)
    return Reading(builder.answer, _parts_of(text, pieces), malformed)


def _parts_of(text: str, pieces: Sequence[Piece]) -> list[Part]:
    """The text cut where pieces that repeat it begin and end; what is between is not told."""
    parts: list[Part] = []
    at = 0
    between = "markup"
    for piece in pieces:
        match piece:
            case ToolCallStart():
                between = "call"
            case ToolCallEnd(_, is_whole):
                between = "call" if is_whole else "broken call"
            case ReasoningText(told) | ContentText(told):
                begin = text.find(told, at)
                if begin < 0:
                    continue  # told of several places at once
                _append(parts, between, text[at:begin])
                kind = "reasoning" if isinstance(piece, ReasoningText) else "content"
                _append(parts, kind, told)
                at, between = begin + len(told), "markup"
    _append(parts, between, text[at:])
    return parts


def _append(parts: list[Part], kind: str, text: str) -> None:
    if not text:
        return
    if parts and parts[-1].kind == kind:
        text = parts.pop().text + text
    parts.append(Part(kind, text))
