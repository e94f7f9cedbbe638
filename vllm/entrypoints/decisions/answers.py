"""OpenAI's shape of the answers."""

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from vllm.entrypoints.decisions.questions import Question, QuestionKind
from vllm.entrypoints.decisions.scoring import Distribution


class _Answer(msgspec.Struct, tag_field="type", kw_only=True):
    """Base of all; the fields beyond ``name`` are there when they are asked for."""

    name: str | None
    prompt_token_ids: list[int] | UnsetType = UNSET
    label_token_ids: list[list[int]] | UnsetType = UNSET
    label_logprobs: list[float] | UnsetType = UNSET
    label_mass: float | UnsetType = UNSET


class PredicateAnswer(_Answer, tag="predicate", kw_only=True):
    """How likely it is that a statement holds."""

    probability: float


class ChoiceProbability(msgspec.Struct):
    """One choice's."""

    value: str | bool
    probability: float


class ChoiceAnswer(_Answer, tag="choice", kw_only=True):
    """The most likely choice, and all of them in the question's order."""

    choice: str | bool
    confidence: float
    probabilities: list[ChoiceProbability]


class ScoreProbability(msgspec.Struct):
    """One level's; levels count from 0."""

    value: int
    label: str
    probability: float


class ScoreAnswer(_Answer, tag="score", kw_only=True):
    """The mean level, and all of them in order."""

    score: float
    confidence: float
    probabilities: list[ScoreProbability]


class RefusalAnswer(_Answer, tag="refusal", kw_only=True):
    """The model would say something else than any of the options."""


Answer = PredicateAnswer | ChoiceAnswer | ScoreAnswer | RefusalAnswer


class CacheTokens(msgspec.Struct):
    """Of the prompts' tokens, those that were read from the prefix cache, and are in it now."""

    cached_tokens: int
    cache_write_tokens: int


class NoReasoning(msgspec.Struct):
    """Nothing is generated."""

    reasoning_tokens: int = 0


class DecisionUsage(msgspec.Struct):
    """Tokens of all questions' prompts."""

    input_tokens: int
    input_tokens_details: CacheTokens
    total_tokens: int
    output_tokens: int = 0
    output_tokens_details: NoReasoning = msgspec.field(default_factory=NoReasoning)


class DecisionBody(msgspec.Struct):
    """The response."""

    model: str
    answers: list[Answer]
    usage: DecisionUsage
    prompt_format_version: int


def make_answer(question: Question, found: Distribution, refusal_mass: float) -> Answer:
    """Return the answer to a question.

    Args:
        question: The question.
        found: How likely each option is.
        refusal_mass: Below this mass of the labels the question is refused.
    """
    if found.label_mass < refusal_mass:
        return RefusalAnswer(name=question.name)
    return _MAKERS[question.kind](question, found)


def _predicate(question: Question, found: Distribution) -> Answer:
    return PredicateAnswer(name=question.name, probability=found.probabilities[0])


def _choice(question: Question, found: Distribution) -> Answer:
    pairs: Sequence[tuple[str | bool, float]] = [
        (option.value, probability)
        for option, probability in zip(question.options, found.probabilities, strict=True)
    ]
    return ChoiceAnswer(
        name=question.name,
        choice=pairs[found.best][0],
        confidence=found.confidence,
        probabilities=[ChoiceProbability(*pair) for pair in pairs],
    )


def _score(question: Question, found: Distribution) -> Answer:
    pairs = zip(question.options, found.probabilities, strict=True)
    return ScoreAnswer(
        name=question.name,
        score=found.mean_index,
        confidence=found.confidence,
        probabilities=[
            ScoreProbability(i, str(option.value), probability)
            for i, (option, probability) in enumerate(pairs)
        ],
    )


_MAKERS = {
    QuestionKind.PREDICATE: _predicate,
    QuestionKind.CHOICE: _choice,
    QuestionKind.SCORE: _score,
}
