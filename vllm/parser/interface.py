"""What a parser is told of a request, and what it does."""

import re
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
class MalformedCall:
    """Text that looked like a call and is none.

    Attributes:
        text: As the model wrote it, marks included; the answer's content shows it.
        reason: Why it is no call, for people.
    """

    text: str
    reason: str


def _ignore(call: MalformedCall) -> None:
    """Nobody asked to be told."""


# What the APIs take for an id, a family's own included.
_CALL_ID = re.compile(r"[a-zA-Z0-9_.:-]{1,128}")


def accepts_any_id(call_id: str) -> bool:
    """Whether an id has the form of those that clients get and send back."""
    return _CALL_ID.fullmatch(call_id) is not None


@dataclass(frozen=True, slots=True)
class ParseOptions:
    """What a parser is told of one request.

    Attributes:
        in_reasoning: Whether the prompt ends inside the reasoning.
        tools: The request's; their schemas type arguments that the model wrote as text.
        tool_use: What becomes of calls.
        one_call: Whether calls after the first are swallowed (``parallel_tool_calls=false``).
        new_call_id: Makes the ids of calls.
        accepts_id: Whether an id that the model gave a call may be told.
        spell_id: Makes an id of the family's own form of a function's name and a number; None:
            ``new_call_id`` makes all.
        on_malformed: Is told of each malformed call.
        may_call_in_thought: Whether a call may end a thought; not where a grammar waits for the
            thought's own end.
    """

    in_reasoning: bool = False
    tools: Sequence[ToolSpec] = ()
    tool_use: ToolUse = ToolUse.OFF
    one_call: bool = False
    new_call_id: Callable[[], str] = new_call_id
    accepts_id: Callable[[str], bool] = accepts_any_id
    spell_id: Callable[[str, int], str] | None = None
    on_malformed: Callable[[MalformedCall], None] = _ignore
    may_call_in_thought: bool = True


class ResponseParser(Protocol):
    """Reads one answer from its beginning to its end.

    The pieces of all calls join to the same answer however the text is split.
    """

    def feed(self, text: str, token_ids: Sequence[int]) -> list[Piece]:
        """Take in what the model said next; return what is now sure."""

    def finish(self, finish_reason: str | None) -> list[Piece]:
        """Return what was held back. A call that is not complete ends.

        Where a limit cut it off, it is left out; where the model stopped inside it, its text is
        content.

        Args:
            finish_reason: The engine's: "stop", "length", "abort", ...
        """
