"""Files of questions whose answers are known, one JSON object a line.

{"logprobs": [-0.3, -1.4], "label": 0}                    as an answer's label_logprobs told them
{"input": ..., "questions": [...], "expected": [...]}     a request, which a server is asked
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from vllm.entrypoints.decisions.calibration import Labelled
from vllm.entrypoints.decisions.openai_body import read_questions
from vllm.entrypoints.decisions.questions import Question, QuestionKind
from vllm.exceptions import ConfigError, UserInputError

# Answers a request; returns the response.
Ask = Callable[[Mapping[str, Any]], Mapping[str, Any]]


def read_labelled(path: Path, ask: Ask) -> Iterator[Labelled]:
    """Yield the questions of a file, those of requests as a server answers them.

    Raises:
        ConfigError: A line is wrong; the message says which.
        VllmError: The server does not answer.
    """
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if raw.strip():
                yield from _read_line(f"{path}, line {number}", raw, ask)


def _read_line(where: str, raw: bytes, ask: Ask) -> Iterator[Labelled]:
    try:
        line = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON: {error}.") from error
    if not isinstance(line, dict):
        raise ConfigError(f"{where}: must be an object.")
    if "logprobs" in line:
        yield _read_logprobs(where, line)
        return
    expected = line.pop("expected", None)
    try:
        questions, _ = read_questions(line.get("questions"))
    except UserInputError as error:
        raise ConfigError(f"{where}: {error}") from error
    if not isinstance(expected, list) or len(expected) != len(questions):
        raise ConfigError(f"{where}: expected must be a list with one answer for each question.")
    right = [_find_right(where, *pair) for pair in zip(questions, expected, strict=True)]
    told = ask({**line, "return_label_logprobs": True})
    for answer, place in zip(told["answers"], right, strict=True):
        yield Labelled(answer["label_logprobs"], place)


def _read_logprobs(where: str, line: Mapping[str, Any]) -> Labelled:
    logprobs, label = line["logprobs"], line.get("label")
    numbers = isinstance(logprobs, list) and len(logprobs) > 1
    if not numbers or not all(type(value) in (int, float) for value in logprobs):
        raise ConfigError(f"{where}: logprobs must be a list of at least two numbers.")
    if type(label) is not int or not 0 <= label < len(logprobs):
        raise ConfigError(
            f"{where}: label={label!r} must be a place in logprobs, 0 to {len(logprobs) - 1}."
        )
    return Labelled([float(value) for value in logprobs], label)


def _find_right(where: str, question: Question, expected: Any) -> int:
    """Return which option an expected answer is."""
    if question.kind is QuestionKind.PREDICATE:
        values: Sequence[Any] = (True, False)
    else:
        values = [option.value for option in question.options]
    if question.kind is QuestionKind.SCORE and type(expected) is int:
        values = range(len(values))
    for place, value in enumerate(values):
        if type(value) is type(expected) and value == expected:
            return place
    raise ConfigError(
        f"{where}: {expected!r} is no answer to {question.where}: use one of "
        f"{', '.join(map(repr, values))}."
    )
