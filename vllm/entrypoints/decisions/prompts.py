"""Questions as prompts that end where the model says its first word."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.entrypoints.decisions.input_items import Conversation, append_question
from vllm.entrypoints.decisions.question_format import Prompt, QuestionFormat
from vllm.entrypoints.decisions.questions import Question, rotations
from vllm.entrypoints.decisions.wording import BETWEEN, LEAD
from vllm.parser.call_ids import with_own_ids
from vllm.tokenizers import ChatPrompt
from vllm.tokenizers.breakpoints import find_breakpoints
from vllm.tokenizers.chat_messages import PromptCut

# Where none of the texts holds it, it stands for the place where a question's own text begins.
_MARKS = (*range(0xFDD0, 0xFDF0), *range(0xE000, 0xF900))


@dataclass(frozen=True, slots=True)
class PromptSet:
    """The prompts of one request.

    Attributes:
        prompts: Those of each question follow each other; at least one.
        junctions: Where they part, in tokens: behind the input, and behind all that they share.
        marks: Places that the client marked, in tokens, and for how many seconds to keep what lies
            before each at least; None: as long as others.
    """

    prompts: Sequence[Prompt]
    junctions: Sequence[int]
    marks: Mapping[int, float | None]

    @property
    def num_shared(self) -> int:
        """Tokens that all prompts begin with."""
        return self.junctions[-1] if self.junctions else 0


class PromptMaker:
    """Renders questions about one input.

    Args:
        conversation: The input.
        asks: How the model is asked.
    """

    def __init__(self, conversation: Conversation, asks: QuestionFormat) -> None:
        self._messages = with_own_ids(asks.parsers.tools, conversation.messages)
        self._breakpoints = conversation.breakpoints
        self._asks = asks

    def make(
        self, questions: Sequence[Question], num_orders: int, is_wanted: Callable[[], bool]
    ) -> PromptSet:
        """Return the prompts of questions, as long as somebody waits for them.

        Args:
            questions: At least one.
            num_orders: In how many orders to ask each.
            is_wanted: Whether somebody waits.

        Raises:
            UserInputError: The chat format does not take the input.
            ContextLengthError: A question does not fit; the message names it.
            UnsupportedFeatureError: The vocabulary has no labels.
        """
        mark = _find_mark(_texts(self._messages, questions))
        cut = PromptCut(mark)
        prompts: list[Prompt] = []
        for index, question in enumerate(questions):
            for turn in rotations(question, num_orders):
                if not is_wanted():
                    break
                turned = question.rotated(turn)
                prompts.append(self._asks.ask(self._messages, (index, turn), turned, cut))
        if not prompts:
            return PromptSet((), (), {})
        shared = _num_shared([prompt.token_ids for prompt in prompts])
        heads = {cut.num_head_tokens, shared} if len(prompts) > 1 else {cut.num_head_tokens}
        junctions = sorted(place for place in heads if 0 < place < len(prompts[0].token_ids))
        return PromptSet(prompts, junctions, self._find_marks(prompts[0], mark))

    def _find_marks(self, prompt: Prompt, mark: str) -> Mapping[int, float | None]:
        if not self._breakpoints:
            return {}
        messages = append_question(self._messages, LEAD + mark, BETWEEN)
        whole = ChatPrompt("", prompt.token_ids, in_reasoning=False)
        return find_breakpoints(
            self._asks.encoder, messages, self._asks.options, whole, self._breakpoints
        )


def _texts(messages: Sequence[Mapping[str, Any]], questions: Sequence[Question]) -> Iterable[str]:
    for message in messages:
        content = message.get("content") or ""
        yield from [content] if isinstance(content, str) else (part["text"] for part in content)
        for call in message.get("tool_calls", ()):
            yield call["function"]["name"]
            yield call["function"]["arguments"]
    for question in questions:
        yield question.instructions
        for option in question.options:
            yield str(option.value)
            yield option.description or ""


def _find_mark(texts: Iterable[str]) -> str:
    """A character that stands in none of the texts."""
    used: set[str] = set()
    for text in texts:
        if not text.isascii():
            used.update(text)
    return next(chr(code) for code in _MARKS if chr(code) not in used)


def _num_shared(prompts: Sequence[Sequence[int]]) -> int:
    """How many tokens all prompts begin with."""
    first, *others = prompts
    shared = len(first)
    for other in others:
        pairs = zip(itertools.islice(first, shared), other, strict=False)
        shared = next((i for i, (a, b) in enumerate(pairs) if a != b), min(shared, len(other)))
    return shared
