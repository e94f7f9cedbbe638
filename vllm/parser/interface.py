"""What a parser is told of a request, and what it does."""

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from vllm.parser.pieces import Piece
from vllm.tokenizers.chat_tools import ToolSpec


class ToolUse(Enum):
    """What becomes of tool calls in the model's text."""

    OFF = "off"  # the request knows no tools: what looks like a call is text
    DROP = "drop"  # the request forbids calls: they are swallowed
    PARSE = "parse"


def new_call_id() -> str:
    """Return an id that no other call has."""
    return "call_" + uuid.uuid4().hex[:24]


@dataclass(frozen=True, slots=True)
class ParseOptions:
    """What a parser is told of one request.

    Attributes:
        in_reasoning: Whether the prompt ends inside the reasoning.
        tools: The request's; their schemas type arguments that the model wrote as text.
        tool_use: What becomes of calls.
        one_call: Whether calls after the first are swallowed (``parallel_tool_calls=false``).
        new_call_id: Makes the ids of calls.
    """

    in_reasoning: bool = False
    tools: Sequence[ToolSpec] = ()
    tool_use: ToolUse = ToolUse.OFF
    one_call: bool = False
    new_call_id: Callable[[], str] = new_call_id


class ResponseParser(Protocol):
    """Reads one answer from its beginning to its end.

    The pieces of all calls join to the same answer however the text is split.
    """

    def feed(self, text: str, token_ids: Sequence[int]) -> list[Piece]:
        """Take in what the model said next; return what is now sure."""

    def finish(self, finish_reason: str | None) -> list[Piece]:
        """Return what was held back. A call that is not complete ends, and never becomes text.

        Args:
            finish_reason: The engine's: "stop", "length", "abort", ...
        """
