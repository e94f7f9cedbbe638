"""Running parsers over texts cut at will."""

import itertools
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from vllm.parser.interface import ParseOptions, ToolUse
from vllm.parser.pieces import (
    AnswerBuilder,
    ParsedAnswer,
    Piece,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from vllm.parser.registry import ParserChoice
from vllm.tokenizers.chat_tools import parse_tools

D = "｜DSML｜"
TOOLS = parse_tools(
    [
        {
            "type": "function",
            "function": {
                "name": "find",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "text": {"type": "string"},
                        "limit": {"type": "integer"},
                        "size": {"type": ["number", "null"]},
                        "tags": {"anyOf": [{"type": "array"}, {"type": "object"}]},
                        "any": {},
                    },
                },
            },
        },
        {"type": "function", "function": {"name": "now"}},
    ]
)


def options(**fields: Any) -> ParseOptions:
    """Options with tools, and ids that count."""
    ids = (f"call_{i}" for i in itertools.count())
    defaults = {"tools": TOOLS, "tool_use": ToolUse.PARSE, "new_call_id": lambda: next(ids)}
    return ParseOptions(**{**defaults, **fields})


def pieces_of(
    choice: ParserChoice, parts: Sequence[str], reason: str = "stop", **fields: Any
) -> list[Piece]:
    """All pieces of an answer that came in parts."""
    parser = choice.make_parser(options(**fields))
    pieces = [piece for part in parts for piece in parser.feed(part, [])]
    return pieces + parser.finish(reason)


def read(choice: ParserChoice, text: str, reason: str = "stop", **fields: Any) -> ParsedAnswer:
    """The answer that came in one part."""
    builder = AnswerBuilder()
    builder.add(pieces_of(choice, [text], reason, **fields))
    return builder.answer


def calls_of(answer: ParsedAnswer) -> list[tuple[str, str]]:
    """Names and arguments of the calls."""
    return [(call.name, call.arguments) for call in answer.tool_calls]


def told_calls(pieces: Sequence[Piece]) -> list[tuple[str, str, bool]]:
    """Each call that a stream tells: its name, its arguments joined, and whether it is whole.

    Also checks the order: calls are counted from 0, and each starts, grows and ends before the
    next piece of another kind.
    """
    calls: list[tuple[str, str, bool]] = []
    name, arguments = None, ""
    for piece in pieces:
        if isinstance(piece, ToolCallStart):
            assert name is None
            assert piece.index == len(calls)
            name, arguments = piece.name, ""
        elif isinstance(piece, ToolCallArguments | ToolCallEnd):
            assert name is not None
            assert piece.index == len(calls)
            if isinstance(piece, ToolCallArguments):
                assert piece.text
                arguments += piece.text
            else:
                calls.append((name, arguments, piece.is_whole))
                name = None
        else:
            assert name is None
    assert name is None, "a call does not end"
    return calls


@st.composite
def cut_texts(draw: st.DrawFn, fragments: Sequence[str]) -> list[str]:
    """A text of marks, beginnings of marks and other text, in parts cut anywhere."""
    fragment = st.sampled_from(fragments)
    beginning = st.tuples(fragment, st.integers(1, 12)).map(lambda pair: pair[0][: pair[1]])
    noise = st.text(alphabet='a <>{}"\\\n｜é漢🦊:,1', max_size=6)
    text = "".join(draw(st.lists(fragment | fragment | beginning | noise, max_size=14)))
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
