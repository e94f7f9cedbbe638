"""How a model is asked so that the first word it says is the answer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm.entrypoints.decisions.input_items import append_question
from vllm.entrypoints.decisions.labels import LabelTrie, encode_labels, label_texts
from vllm.entrypoints.decisions.questions import Question
from vllm.entrypoints.decisions.wording import BETWEEN, LAST_WORDS, LEAD, spell_question
from vllm.exceptions import ContextLengthError
from vllm.parser.registry import ParserChoice
from vllm.tokenizers import ChatEncoder, ChatOptions, ChatPrompt, Tokenizer
from vllm.tokenizers.chat_messages import PromptCut

_FINAL_CHANNEL = "<|channel|>final<|message|>"


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


class QuestionFormat:
    """Puts a question behind messages, in a model's chat format.

    Owns: what it found out about the format: the labels' tokens, and how thinking is closed.

    Args:
        encoder: The model's chat format.
        tokenizer: The model's.
        parsers: Know how the model thinks.
        template_kwargs: What the server and the request set.
        max_prompt_tokens: Longest prompt; None: whoever calls looks at that.
    """

    def __init__(
        self,
        encoder: ChatEncoder,
        tokenizer: Tokenizer,
        parsers: ParserChoice,
        template_kwargs: Mapping[str, Any],
        max_prompt_tokens: int | None = None,
    ) -> None:
        self.encoder, self.parsers = encoder, parsers
        self.options = _without_thinking(parsers, template_kwargs, max_prompt_tokens)
        self._tokenizer = tokenizer
        self._tries: dict[tuple[str, int], LabelTrie] = {}
        self._closing: str | None = None

    def ask(
        self,
        messages: Sequence[Mapping[str, Any]],
        place: tuple[int, int],
        question: Question,
        cut: PromptCut,
    ) -> Prompt:
        """Return the prompt of a question.

        Args:
            messages: What it is about.
            place: Of the prompt: see ``Prompt``.
            question: With its options in the order in which they are shown.
            cut: Stands before the question's own text.

        Raises:
            UserInputError: The chat format does not take the messages.
            ContextLengthError: The prompt does not fit; the message names the question.
            UnsupportedFeatureError: The vocabulary has no labels.
        """
        labels = label_texts(len(question.options))
        asked = append_question(
            messages, LEAD + cut.mark + spell_question(question, labels), BETWEEN
        )
        try:
            chat = self.encoder.encode_chat(asked, replace(self.options, cut=cut))
        except ContextLengthError as error:
            raise error.at(question.where) from error
        closing = self._close(chat, asked)
        token_ids = chat.token_ids
        if closing:
            token_ids = token_ids + self._tokenizer.encode(closing, add_special_tokens=False)
        end = chat.text.rpartition(LAST_WORDS)[2] + closing
        trie = self._trie(end, len(labels))
        most, num_tokens = self.options.max_prompt_tokens, len(token_ids) + trie.depth
        if most is not None and num_tokens > most:
            raise ContextLengthError(num_tokens, most + 1, of_messages=True).at(question.where)
        return Prompt(*place, token_ids, trie)

    def _trie(self, prompt_end: str, num_labels: int) -> LabelTrie:
        key = prompt_end, num_labels
        if key not in self._tries:
            paths = encode_labels(self._tokenizer, prompt_end, label_texts(num_labels))
            self._tries[key] = LabelTrie.build(paths)
        return self._tries[key]

    def _close(self, chat: ChatPrompt, messages: Sequence[Mapping[str, Any]]) -> str:
        """What must stand behind a prompt so that the answer's first word is next."""
        if self.parsers.is_harmony:
            return _FINAL_CHANNEL
        tags = self.parsers.reasoning_tags
        if tags is None or chat.has_reasoned:
            return ""
        if chat.in_reasoning:
            return f"\n{tags.end}\n\n"
        if self._closing is None:
            # A format that knows no switch leaves it to the model to begin a thought: an empty one
            # stands there, then.
            thinking = replace(self.options, reasoning_effort=None, template_kwargs={})
            chats = [self.encoder.encode_chat(messages, o) for o in (self.options, thinking)]
            has_switch = chats[0].text != chats[1].text
            self._closing = "" if has_switch else f"{tags.start}\n\n{tags.end}\n\n"
        return self._closing


def _without_thinking(
    parsers: ParserChoice, template_kwargs: Mapping[str, Any], max_prompt_tokens: int | None
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
