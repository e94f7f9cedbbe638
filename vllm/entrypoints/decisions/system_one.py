"""System One's shape of the same: a state, and questions by id."""

from collections.abc import Mapping
from typing import Any, NoReturn

import msgspec

from vllm.entrypoints.decisions.input_items import Conversation, check_text, read_json
from vllm.entrypoints.decisions.openai_body import read_instructions, read_text
from vllm.entrypoints.decisions.questions import (
    MAX_CHOICES,
    MAX_LEVELS,
    MAX_QUESTIONS,
    Option,
    Question,
    QuestionKind,
    predicate_options,
)
from vllm.entrypoints.decisions.scoring import Distribution
from vllm.exceptions import UserInputError

_KINDS = {
    "noul": QuestionKind.PREDICATE,
    "choice": QuestionKind.CHOICE,
    "score": QuestionKind.SCORE,
}
_FIELDS = ("type", "instructions", "criteria")


class SystemOneUsage(msgspec.Struct):
    """Tokens of all questions' prompts."""

    input_tokens: int
    output_tokens: int = 0


class SystemOneBody(msgspec.Struct):
    """The response."""

    model: str
    answers: dict[str, dict[str, Any]]
    usage: SystemOneUsage
    prompt_format_version: int


def read_state(state: Any) -> Conversation:
    """Return what the questions are about: a text as it is, anything else as JSON.

    Raises:
        UserInputError: It is too large.
    """
    text = check_text("state", state) if isinstance(state, str) else read_json("state", state)
    return Conversation([{"role": "user", "content": text}])


def read_questions(value: Any) -> tuple[list[Question], list[str]]:
    """Check questions by id; see ``openai_body.read_questions``.

    Raises:
        UserInputError: One is malformed.
    """
    if not isinstance(value, Mapping):
        _refuse("questions", "must be an object: questions by their ids")
    if not 1 <= len(value) <= MAX_QUESTIONS:
        _refuse("questions", f"holds {len(value)} questions: give 1 to {MAX_QUESTIONS}")
    ignored: list[str] = []
    questions = []
    for name, item in value.items():
        where = f"questions.{name[:60]}"
        check_text("questions", name)
        if not isinstance(item, Mapping):
            _refuse(where, "must be an object with type and instructions")
        kind = item.get("type")
        if not isinstance(kind, str) or kind not in _KINDS:
            _refuse(f"{where}.type", f"is {str(kind)[:60]!r}: use {', '.join(_KINDS)}")
        ignored += [f"{where}.{field}" for field in item if field not in _FIELDS]
        instructions = read_instructions(where, item.get("instructions"))
        options = _READERS[kind](f"{where}.criteria", item.get("criteria"))
        questions.append(Question(where, _KINDS[kind], instructions, options, name))
    return questions, ignored


def make_answer(question: Question, found: Distribution, refusal_mass: float) -> dict[str, Any]:
    """Return the answer to a question; see ``answers.make_answer``."""
    if found.label_mass < refusal_mass:
        return {"type": "refusal"}
    probabilities = found.probabilities
    if question.kind is QuestionKind.PREDICATE:
        return {"type": "noul", "noul": probabilities[0]}
    names = [str(option.value) for option in question.options]
    if question.kind is QuestionKind.CHOICE:
        return {
            "type": "choice",
            "choice": names[found.best],
            "probabilities": dict(zip(names, probabilities, strict=True)),
            "confidence": found.confidence,
        }
    return {
        "type": "score",
        "score": found.mean_index,
        "legend": {str(i): name for i, name in enumerate(names)},
        "probabilities": {str(i): value for i, value in enumerate(probabilities)},
        "confidence": found.confidence,
    }


def _read_noul(where: str, criteria: Any) -> tuple[Option, ...]:
    if criteria is None:
        return predicate_options()
    if not isinstance(criteria, Mapping) or criteria.keys() - {"true", "false"}:
        _refuse(where, "must be an object with true and false, or be left out")
    return predicate_options(*(_optional(where, criteria, name) for name in ("true", "false")))


def _read_choice(where: str, criteria: Any) -> tuple[Option, ...]:
    if not isinstance(criteria, Mapping) or not 1 <= len(criteria) <= MAX_CHOICES:
        _refuse(where, f"must be an object of 1 to {MAX_CHOICES} names and descriptions")
    return tuple(
        Option(check_text(where, name), _optional(where, criteria, name)) for name in criteria
    )


def _read_score(where: str, criteria: Any) -> tuple[Option, ...]:
    if not isinstance(criteria, list) or not 1 <= len(criteria) <= MAX_LEVELS:
        _refuse(where, f"must be a list of 1 to {MAX_LEVELS} levels, the lowest first")
    return tuple(Option(read_text(f"{where}[{i}]", level)) for i, level in enumerate(criteria))


_READERS = {"noul": _read_noul, "choice": _read_choice, "score": _read_score}


def _optional(where: str, criteria: Mapping[str, Any], name: str) -> str | None:
    given = criteria.get(name)
    return None if given is None else read_text(f"{where}.{name[:60]}", given)


def _refuse(where: str, why: str) -> NoReturn:
    raise UserInputError(f"{where} {why}.", "questions")
