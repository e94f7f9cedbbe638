"""OpenAI's shape of a decision: its questions, checked, and its answers."""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from vllm.entrypoints.decisions.input_items import check_text, read_parts
from vllm.entrypoints.decisions.questions import (
    MAX_CHOICES,
    MAX_LEVELS,
    MAX_QUESTIONS,
    Option,
    Question,
    QuestionKind,
    predicate_options,
)
from vllm.exceptions import UserInputError

_FIELDS: Mapping[QuestionKind, frozenset[str]] = {
    QuestionKind.PREDICATE: frozenset(),
    QuestionKind.CHOICE: frozenset({"choices"}),
    QuestionKind.SCORE: frozenset({"levels"}),
}
_SHARED_FIELDS = frozenset({"type", "name", "instructions"})
# Several parts of a question's text are paragraphs.
_BETWEEN_PARTS = "\n"


def read_questions(value: Any) -> tuple[list[Question], list[str]]:
    """Check a ``questions`` field.

    Returns:
        The questions, and the names of fields that have no effect.

    Raises:
        UserInputError: One is malformed; the message says which.
    """
    if not isinstance(value, list):
        _refuse("questions", "must be a list of 1 to 400 questions")
    if not 1 <= len(value) <= MAX_QUESTIONS:
        _refuse("questions", f"holds {len(value)} questions: give 1 to {MAX_QUESTIONS}")
    ignored: list[str] = []
    return [_read(f"questions[{i}]", item, ignored) for i, item in enumerate(value)], ignored


def _read(where: str, item: Any, ignored: list[str]) -> Question:
    if not isinstance(item, Mapping):
        _refuse(where, f"must be an object with type and instructions, not {type(item).__name__}")
    kind = _read_kind(where, item.get("type"))
    known = _SHARED_FIELDS | _FIELDS[kind]
    ignored += [f"{where}.{name}" for name in item if name not in known]
    name = item.get("name")
    if name is not None:
        name = read_text(f"{where}.name", name)
    return Question(
        where,
        kind,
        read_instructions(where, item.get("instructions")),
        _OPTIONS[kind](where, item),
        name,
    )


def _read_kind(where: str, kind: Any) -> QuestionKind:
    found = next((known for known in QuestionKind if known.value == kind), None)
    if found is None:
        names = ", ".join(known.value for known in QuestionKind)
        _refuse(f"{where}.type", f"is {str(kind)[:60]!r}: use {names}")
    return found


def read_instructions(where: str, value: Any) -> str:
    """Return a question's text.

    Raises:
        UserInputError: It is malformed or empty.
    """
    if value is None:
        _refuse(f"{where}.instructions", "is required")
    texts = read_parts(f"{where}.instructions", value)
    text = check_text(f"{where}.instructions", _BETWEEN_PARTS.join(texts))
    if not text.strip():
        _refuse(f"{where}.instructions", "is empty: say what is asked")
    return text


def read_text(where: str, value: Any) -> str:
    """Return a text.

    Raises:
        UserInputError: It is none.
    """
    if not isinstance(value, str):
        _refuse(where, "must be a string")
    return check_text(where, value)


def _description(where: str, item: Mapping[str, Any]) -> str | None:
    given = item.get("description")
    return None if given is None else read_text(f"{where}.description", given)


def _read_choices(where: str, item: Mapping[str, Any]) -> tuple[Option, ...]:
    given = _entries(f"{where}.choices", item.get("choices"), 2, MAX_CHOICES)
    options: dict[tuple[type, Any], Option] = {}
    for i, entry in enumerate(given):
        place = f"{where}.choices[{i}]"
        value = entry.get("value")
        if not isinstance(value, str | bool):
            _refuse(f"{place}.value", "must be a string or a boolean")
        if isinstance(value, str):
            check_text(f"{place}.value", value)
        # By type and value: true and "true" are two.
        if (key := (type(value), value)) in options:
            _refuse(f"{place}.value", f"{str(value)[:60]!r} stands there twice: choices differ")
        options[key] = Option(value, _description(place, entry))
    return tuple(options.values())


def _read_levels(where: str, item: Mapping[str, Any]) -> tuple[Option, ...]:
    given = _entries(f"{where}.levels", item.get("levels"), 2, MAX_LEVELS)
    return tuple(
        Option(
            read_text(f"{where}.levels[{i}].label", entry.get("label")),
            _description(f"{where}.levels[{i}]", entry),
        )
        for i, entry in enumerate(given)
    )


def _entries(where: str, value: Any, least: int, most: int) -> Sequence[Mapping[str, Any]]:
    if not isinstance(value, list):
        _refuse(where, f"must be a list of {least} to {most} objects")
    if not least <= len(value) <= most:
        _refuse(where, f"holds {len(value)} entries: give {least} to {most}")
    for i, entry in enumerate(value):
        if not isinstance(entry, Mapping):
            _refuse(f"{where}[{i}]", "must be an object")
    return value


_OPTIONS = {
    QuestionKind.PREDICATE: lambda _where, _item: predicate_options(),
    QuestionKind.CHOICE: _read_choices,
    QuestionKind.SCORE: _read_levels,
}


def _refuse(where: str, why: str) -> NoReturn:
    raise UserInputError(f"{where} {why}.", "questions")
