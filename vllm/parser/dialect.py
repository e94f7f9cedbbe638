"""How a family spells tool calls, as the machine that reads answers sees it."""

from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from vllm.parser.literals import spell_text
from vllm.parser.offered import Offered


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call begins; its name is known, and one that was offered.

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


@dataclass(frozen=True, slots=True)
class CallFailed:
    """What looked like a call is none: its text is content.

    Attributes:
        text: All of it as the model wrote it, marks included.
        reason: Why it is no call, for people.
    """

    text: str
    reason: str


@dataclass(frozen=True, slots=True)
class CallCut:
    """A call that a limit cut off before anything of it could be told.

    Attributes:
        text: All of it as the model wrote it, marks included.
    """

    text: str


CallDelta: TypeAlias = CallBegun | CallText | CallEnded | CallFailed | CallCut


@dataclass(frozen=True, slots=True)
class RawCall:
    """A complete call; ``arguments`` is the text of a JSON object."""

    name: str
    arguments: str
    id: str = ""

    def delta(self) -> list[CallDelta]:
        """Return all of it at once."""
        # What UTF-8 cannot carry, JSON still spells.
        carried = self.arguments if is_unicode(self.arguments) else _respell(self.arguments)
        return [CallBegun(self.name, self.id), CallText(carried), CallEnded(True)]


def is_unicode(text: str) -> bool:
    """Whether a response can carry a text: JSON spells lone surrogates, UTF-8 does not."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _respell(arguments: str) -> str:
    """JSON in which lone surrogates, which stand in texts only, are escapes."""
    return "".join(char if is_unicode(char) else spell_text(char)[1:-1] for char in arguments)


@dataclass(slots=True)
class CallBlockDelta:
    """What more of a block brings.

    Attributes:
        calls: What is new of its calls, one after another.
        text: Of what turned out not to be a block.
        ended: Whether the block is over; ``rest`` follows it.
        is_quoting: Whether what follows stands in a quotation that the block's mark opened: up to
            the next mark that could, none opens a block.
    """

    calls: list[CallDelta] = field(default_factory=list)
    text: str = ""
    ended: bool = False
    rest: str = ""
    is_quoting: bool = False


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
        quotes: Those marks that open a quotation, and close it, until the answer has called; from
            then on they open a block, or a quotation if it turns out to be none.
        telltales: Where an answer ends inside a mark: what tells that no text was meant.
        ends_reasoning: Whether a mark inside the reasoning ends it.
        is_special: Whether marks are tokens that no text holds: they open a block although the
            request knows no tools, and it is swallowed.
    """

    marks: tuple[str, ...]
    leads: tuple[str, ...]
    quotes: tuple[str, ...]
    telltales: tuple[str, ...]
    ends_reasoning: bool
    is_special: bool

    def read_block(self, opened_by: str, offered: Offered) -> BlockReader:
        """Return the reader of what follows a mark or lead."""
