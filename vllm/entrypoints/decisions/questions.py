"""Checked questions, whatever body they came in."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

MAX_QUESTIONS = 400
MAX_CHOICES = 255
MAX_LEVELS = 10


class QuestionKind(Enum):
    """What is asked, and so what the answer holds."""

    PREDICATE = "predicate"
    CHOICE = "choice"
    SCORE = "score"


@dataclass(frozen=True, slots=True)
class Option:
    """One of the answers to choose from.

    Attributes:
        value: What the answer calls it.
        description: What it means, in more words; None: its value says it.
    """

    value: str | bool
    description: str | None = None


@dataclass(frozen=True, slots=True)
class Question:
    """One question about the input.

    Attributes:
        where: Its place in the request, for errors.
        kind: What is asked.
        instructions: The question's text.
        options: In the request's order: of a predicate yes and no, of a score its levels.
        name: The caller's name for it; None: it has none.
    """

    where: str
    kind: QuestionKind
    instructions: str
    options: tuple[Option, ...]
    name: str | None = None

    def rotated(self, count: int) -> "Question":
        """Return the same with its options begun at another one."""
        return replace(self, options=(*self.options[count:], *self.options[:count]))


def rotations(question: Question, wanted: int) -> Sequence[int]:
    """Return by how many places to rotate the options, so that each stands at several.

    Args:
        question: Whose options they are.
        wanted: How many orders to ask in; never more than there are options.
    """
    num_options = len(question.options)
    count = max(1, min(wanted, num_options))
    return [turn * num_options // count for turn in range(count)]


def predicate_options(true: str | None = None, false: str | None = None) -> tuple[Option, ...]:
    """Return the options of a predicate: that it holds, and that it does not."""
    return Option("Yes", true), Option("No", false)


def shown_value(value: Any, options: Sequence[Option]) -> str:
    """Return how a prompt spells an option's value; a text that a boolean equals is quoted."""
    if isinstance(value, bool):
        return "true" if value else "false"
    has_booleans = any(isinstance(option.value, bool) for option in options)
    return f'"{value}"' if has_booleans and value in ("true", "false") else str(value)
