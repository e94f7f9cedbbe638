"""How a family spells tool calls, as the machine that reads answers sees it."""

from dataclasses import dataclass
from typing import Protocol, TypeAlias

from vllm.parser.interface import ParseOptions


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call begins; its name is known.

    Attributes:
        name: Of the function.
        id: That the model gave it; empty: it gives none.
    """

    name: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class CallText:
    """More of the arguments of the call that has begun."""

    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """The call that has begun is over.

    Attributes:
        is_whole: Whether its texts join to a JSON object; else it was cut off, or is malformed.
    """

    is_whole: bool


CallDelta: TypeAlias = CallBegun | CallText | CallEnded


@dataclass(frozen=True, slots=True)
class RawCall:
    """A complete call; ``arguments`` is the text of a JSON object."""

    name: str
    arguments: str
    id: str = ""

    def delta(self) -> list[CallDelta]:
        """Return all of it at once; nothing if no response can carry it."""
        if not is_unicode(self.name + self.arguments):
            return []
        return [CallBegun(self.name, self.id), CallText(self.arguments), CallEnded(True)]


def is_unicode(text: str) -> bool:
    """Whether a response can carry a text: JSON spells lone surrogates, UTF-8 does not."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@dataclass(slots=True)
class CallBlockDelta:
    """What more of a block brings.

    Attributes:
        calls: What is new of its calls, one after another.
        text: Of what turned out not to be a block.
        ended: Whether the block is over; ``rest`` follows it.
    """

    calls: list[CallDelta]
    text: str = ""
    ended: bool = False
    rest: str = ""


class BlockReader(Protocol):
    """Reads one block of calls."""

    def push(self, text: str) -> CallBlockDelta:
        """Take in more of the block."""

    def close(self, finish_reason: str | None) -> CallBlockDelta:
        """The answer has ended inside the block: end the call that is open."""


class ToolDialect(Protocol):
    """A family's calls.

    Attributes:
        marks: Texts that open a block, wherever they stand.
        leads: Texts that open one only where nothing has been said before.
        telltales: Where an answer ends inside a mark: what tells that no text was meant.
        ends_reasoning: Whether a mark inside the reasoning ends it.
        is_special: Whether marks are tokens that no text holds: they open a block although the
            request knows no tools, and it is swallowed.
    """

    marks: tuple[str, ...]
    leads: tuple[str, ...]
    telltales: tuple[str, ...]
    ends_reasoning: bool
    is_special: bool

    def read_block(self, opened_by: str, options: ParseOptions) -> BlockReader:
        """Return the reader of what follows a mark or lead."""
