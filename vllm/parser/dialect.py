"""How a family spells tool calls, as the machine that reads answers sees it."""

from dataclasses import dataclass
from typing import Protocol

from vllm.parser.interface import ParseOptions


@dataclass(frozen=True, slots=True)
class RawCall:
    """A complete call; ``arguments`` is the text of a JSON object."""

    name: str
    arguments: str


@dataclass(slots=True)
class BlockNews:
    """What more of a block brings.

    Attributes:
        calls: Complete now.
        text: Of what turned out not to be a block.
        ended: Whether the block is over; ``rest`` follows it.
    """

    calls: list[RawCall]
    text: str = ""
    ended: bool = False
    rest: str = ""


class BlockReader(Protocol):
    """Reads one block of calls."""

    def push(self, text: str) -> BlockNews:
        """Take in more of the block."""

    def close(self, finish_reason: str | None) -> BlockNews:
        """The answer has ended inside the block: tell what is complete all the same."""


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
