"""Questions as prompts that end where the model says its first word."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm.entrypoints.decisions.input_items import Conversation, append_question
from vllm.entrypoints.decisions.labels import LabelTrie, encode_labels, label_texts
from vllm.entrypoints.decisions.questions import Question, rotations
from vllm.entrypoints.decisions.wording import BETWEEN, LAST_WORDS, LEAD, spell_question
from vllm.exceptions import ContextLengthError
from vllm.parser.call_ids import with_own_ids
from vllm.parser.registry import ParserChoice
from vllm.tokenizers import ChatEncoder, ChatOptions, ChatPrompt, Tokenizer
from vllm.tokenizers.breakpoints import find_breakpoints
from vllm.tokenizers.chat_messages import PromptCut

_FINAL_CHANNEL = "<|channel|>final<|message|>"
# Where none of the texts holds it, it stands for the place where a question's own text begins.
_MARKS = (*range(0xFDD0, 0xFDF0), *range(0xE000, 0xF900))


@dataclass(frozen=True, slots=True)
class Prompt:
    """A question in one order of its options.

    Attributes:
        question: Its place among the questions.
        turn: By how many places the options are rotated.
        token_ids: What the model reads.
        trie: What it may say next.
    """

    question: int
    turn: int
    token_ids: list[int]
    trie: LabelTrie


@dataclass(frozen=True, slots=True)
class PromptSet:
    """The prompts of one request.

    Attributes:
        prompts: Those of each question follow each other; at least one.
        junctions: Where they part, in tokens: behind the input, and behind all that they share.
        marks: Places that the client marked, in tokens.
    """

    prompts: Sequence[Prompt]
    junctions: Sequence[int]
    marks: Sequence[int]

    @property
    def num_shared(self) -> int:
        """Tokens that all prompts begin with."""
        return self.junctions[-1] if self.junctions else 0


class PromptMaker:
    """Renders questions about one input.

    Args:
        conversation: The input.
        encoder: The model's chat format.
        tokenizer: The model's.
        parsers: Know how the model thinks.
        template_kwargs: What the server and the request set.
        max_prompt_tokens: Longest prompt.
    """

    def __init__(
        self,
        conversation: Conversation,
        encoder: ChatEncoder,
        tokenizer: Tokenizer,
        parsers: ParserChoice,
        template_kwargs: Mapping[str, Any],
        max_prompt_tokens: int,
    ) -> None:
        self._messages = with_own_ids(parsers.tools, conversation.messages)
        self._breakpoints = conversation.breakpoints
        self._encoder, self._tokenizer, self._parsers = encoder, tokenizer, parsers
        self._options = _without_thinking(parsers, template_kwargs, max_prompt_tokens)
        self._max_prompt_tokens = max_prompt_tokens
        self._paths: dict[tuple[str, int], LabelTrie] = {}
        self._closing: str | None = None

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
        options = replace(self._options, cut=cut)
        prompts: list[Prompt] = []
        for index, question in enumerate(questions):
            for turn in rotations(question, num_orders):
                if not is_wanted():
                    break
                prompts.append(self._make(index, turn, question.rotated(turn), options))
        if not prompts:
            return PromptSet((), (), ())
        shared = _num_shared([prompt.token_ids for prompt in prompts])
        heads = {cut.num_head_tokens, shared} if len(prompts) > 1 else {cut.num_head_tokens}
        junctions = sorted(place for place in heads if 0 < place < len(prompts[0].token_ids))
        return PromptSet(prompts, junctions, self._find_marks(prompts[0], mark))

    def _make(self, index: int, turn: int, question: Question, options: ChatOptions) -> Prompt:
        assert options.cut is not None
        labels = label_texts(len(question.options))
        spelled = LEAD + options.cut.mark + spell_question(question, labels)
        messages = append_question(self._messages, spelled, BETWEEN)
        try:
            chat = self._encoder.encode_chat(messages, options)
        except ContextLengthError as error:
            raise error.at(question.where) from error
        closing = self._close(chat, messages)
        token_ids = chat.token_ids
        if closing:
            token_ids = token_ids + self._tokenizer.encode(closing, add_special_tokens=False)
        end = chat.text.rpartition(LAST_WORDS)[2] + closing
        trie = self._trie(end, len(labels))
        num_tokens = len(token_ids) + trie.depth
        if num_tokens > self._max_prompt_tokens:
            limit = self._max_prompt_tokens + 1
            raise ContextLengthError(num_tokens, limit, of_messages=True).at(question.where)
        return Prompt(index, turn, token_ids, trie)

    def _trie(self, prompt_end: str, num_labels: int) -> LabelTrie:
        key = prompt_end, num_labels
        if key not in self._paths:
            paths = encode_labels(self._tokenizer, prompt_end, label_texts(num_labels))
            self._paths[key] = LabelTrie.build(paths)
        return self._paths[key]

    def _close(self, chat: ChatPrompt, messages: Sequence[Mapping[str, Any]]) -> str:
        """What must stand behind a prompt so that the answer's first word is next."""
        if self._parsers.is_harmony:
            return _FINAL_CHANNEL
        tags = self._parsers.reasoning_tags
        if tags is None or chat.has_reasoned:
            return ""
        if chat.in_reasoning:
            return f"\n{tags.end}\n\n"
        if self._closing is None:
            # A format that knows no switch leaves it to the model to begin a thought: an empty one
            # stands there, then.
            thinking = replace(self._options, reasoning_effort=None, template_kwargs={})
            chats = [self._encoder.encode_chat(messages, o) for o in (self._options, thinking)]
            has_switch = chats[0].text != chats[1].text
            self._closing = "" if has_switch else f"{tags.start}\n\n{tags.end}\n\n"
        return self._closing

    def _find_marks(self, prompt: Prompt, mark: str) -> Sequence[int]:
        if not self._breakpoints:
            return ()
        messages = append_question(self._messages, LEAD + mark, BETWEEN)
        whole = ChatPrompt("", prompt.token_ids, in_reasoning=False)
        places = find_breakpoints(self._encoder, messages, self._options, whole, self._breakpoints)
        return sorted(places)


def _without_thinking(
    parsers: ParserChoice, template_kwargs: Mapping[str, Any], max_prompt_tokens: int
) -> ChatOptions:
    """The options of chats that are answered at once, whatever the format calls that."""
    if parsers.is_harmony:
        # It always thinks, in a channel of its own.
        return ChatOptions(template_kwargs=template_kwargs, max_prompt_tokens=max_prompt_tokens)
    off = {"thinking": False, "enable_thinking": False}
    return ChatOptions(
        reasoning_effort="none",
        template_kwargs={**off, **template_kwargs},
        max_prompt_tokens=max_prompt_tokens,
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
