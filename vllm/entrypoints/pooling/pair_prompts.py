"""What a model is asked of a query and a document.

A checkpoint that was trained for it has its own prompt, which is here. Any other model is asked a
predicate as ``/v1/decisions`` asks it, in the words of ``decisions/wording.py``.

The query stands in front and the document behind it, so that the documents of a request share all
that comes before them. The answer is read from two tokens that may come next.
"""

from dataclasses import dataclass, replace
from typing import Protocol

from vllm.entrypoints.decisions.input_items import Conversation
from vllm.entrypoints.decisions.labels import LabelTrie, encode_labels, label_texts
from vllm.entrypoints.decisions.prompts import PromptMaker
from vllm.entrypoints.decisions.question_format import QuestionFormat
from vllm.entrypoints.decisions.wording import (
    PLAIN_END,
    PROMPT_FORMAT_VERSION,
    RELEVANCE,
    spell_pair,
    spell_plain,
)
from vllm.entrypoints.openai.context import ServingContext
from vllm.entrypoints.pooling.inputs import Cut
from vllm.entrypoints.pooling.plan import YesNo
from vllm.exceptions import UnsupportedFeatureError, UserInputError
from vllm.tokenizers import Tokenizer
from vllm.tokenizers.chat_encoder import NoChatEncoder
from vllm.tokenizers.literal_text import LiteralText

# The prompt that Qwen3-Reranker was trained with, word for word.
_QWEN3_BEGIN = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
_QWEN3_END = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_QWEN3_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


@dataclass(frozen=True, slots=True)
class Pair:
    """A query and a document."""

    query: str
    document: str


@dataclass(frozen=True, slots=True)
class PairPrompt:
    """A pair as the model reads it.

    Attributes:
        token_ids: What the model reads.
        answer: The two tokens that are read behind it, the same for all pairs of a request.
    """

    token_ids: list[int]
    answer: YesNo


class PairPrompts(Protocol):
    """Makes prompts of pairs.

    Attributes:
        wording: Version of the words; None: they are those that the checkpoint was trained with.
    """

    @property
    def wording(self) -> int | None:
        """Version of the words; None: they are those that the checkpoint was trained with."""

    def encode(self, pair: Pair, instruction: str | None) -> PairPrompt:
        """Return a pair's prompt. Slow: call it in a thread."""


@dataclass(frozen=True, slots=True)
class RerankerPrompts:
    """Those of Qwen3-Reranker. What clients spell of its special tokens stays text."""

    tokenizer: Tokenizer
    literal: LiteralText
    answer: YesNo
    wording: int | None = None

    def encode(self, pair: Pair, instruction: str | None) -> PairPrompt:
        """Return a pair's prompt."""
        encode = self.tokenizer.encode
        told = _QWEN3_INSTRUCTION if instruction is None else instruction
        mark = self.literal.find_mark([told, pair.query, pair.document])
        told, query, document = (
            self.literal.guard(text, mark) for text in (told, pair.query, pair.document)
        )
        body = f"<Instruct>: {told}\n<Query>: {query}\n<Document>: {document}"
        token_ids = [
            *encode(_QWEN3_BEGIN, add_special_tokens=False),
            *self.literal.encode(body, mark, add_special_tokens=False),
            *encode(_QWEN3_END, add_special_tokens=False),
        ]
        return PairPrompt(token_ids, self.answer)


@dataclass(frozen=True, slots=True)
class QuestionPrompts:
    """A predicate to any model that generates, in its chat format."""

    asks: QuestionFormat
    wording: int | None = PROMPT_FORMAT_VERSION

    def encode(self, pair: Pair, instruction: str | None) -> PairPrompt:
        """Return a pair's prompt."""
        text = spell_pair(pair.query, pair.document, instruction)
        maker = PromptMaker(Conversation([{"role": "user", "content": text}]), self.asks)
        (prompt,) = maker.make([RELEVANCE], 1, lambda: True).prompts
        return PairPrompt(prompt.token_ids, _read_answer(prompt.trie))


@dataclass(frozen=True, slots=True)
class PlainPrompts:
    """A predicate to a model that generates and knows no chats."""

    tokenizer: Tokenizer
    answer: YesNo
    wording: int | None = PROMPT_FORMAT_VERSION

    def encode(self, pair: Pair, instruction: str | None) -> PairPrompt:
        """Return a pair's prompt."""
        text = spell_plain(spell_pair(pair.query, pair.document, instruction), RELEVANCE)
        return PairPrompt(self.tokenizer.encode(text), self.answer)


def _find_plain_answer(tokenizer: Tokenizer) -> YesNo:
    labels = label_texts(len(RELEVANCE.options))
    # A space stands before a word; where that is a token of its own, the letters come without.
    spaced = LabelTrie.build(encode_labels(tokenizer, PLAIN_END, [f" {one}" for one in labels]))
    if not spaced.depth:
        return _read_answer(spaced)
    return _read_answer(LabelTrie.build(encode_labels(tokenizer, PLAIN_END, labels)))


def _read_answer(trie: LabelTrie) -> YesNo:
    """Return the tokens of the two labels.

    Raises:
        UnsupportedFeatureError: They are several.
    """
    if trie.depth:
        raise UnsupportedFeatureError(
            "This model cannot be asked about pairs: in its vocabulary the letters A and B are no "
            "single tokens."
        )
    (yes,), (no,) = trie.paths
    return YesNo(yes, no)


def make_pair_prompts(context: ServingContext) -> PairPrompts:
    """Return how the served model is asked about pairs.

    Raises:
        UnsupportedFeatureError: It cannot be asked.
    """
    plan, tokenizer = context.vectors, context.tokenizer
    if plan.yes_no is not None:
        return RerankerPrompts(tokenizer, LiteralText(tokenizer), plan.yes_no)
    if not plan.generates:
        raise UnsupportedFeatureError("This checkpoint has no output matrix: it cannot be asked.")
    if isinstance(context.chat_encoder, NoChatEncoder):
        return PlainPrompts(tokenizer, _find_plain_answer(tokenizer))
    kwargs = context.args.default_chat_template_kwargs
    return QuestionPrompts(QuestionFormat(context.chat_encoder, tokenizer, context.parsers, kwargs))


def encode_pair(
    prompts: PairPrompts, pair: Pair, instruction: str | None, cut: Cut, tokenizer: Tokenizer
) -> PairPrompt:
    """Return a pair's prompt; a document that makes it too long is cut if it may be.

    Slow: call it in a thread.

    Raises:
        TextLengthError: It is too long.
        UserInputError: It is, without its document.
    """
    prompt = prompts.encode(pair, instruction)
    num_tokens = len(prompt.token_ids)
    if cut.kept is None or num_tokens <= cut.kept:
        return replace(prompt, token_ids=cut.apply(prompt.token_ids))
    room = len(tokenizer.encode(pair.document, False)) - (num_tokens - cut.kept)
    while room > 0:
        shorter = replace(pair, document=cut_text(pair.document, room, tokenizer, cut.side))
        prompt = prompts.encode(shorter, instruction)
        if len(prompt.token_ids) <= cut.kept:
            return prompt
        # At the cut, tokens may have joined otherwise.
        room -= len(prompt.token_ids) - cut.kept
    raise UserInputError(
        f"truncate_prompt_tokens={cut.kept} leaves no room for a document: query and instruction "
        "alone are as long.",
        "truncate_prompt_tokens",
    )


def cut_text(text: str, num_tokens: int, tokenizer: Tokenizer, side: str = "right") -> str:
    """Return a text of so many tokens at most: its beginning, or with "left" its end."""
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    if len(token_ids) <= num_tokens:
        return text
    kept = token_ids[:num_tokens] if side == "right" else token_ids[-num_tokens:]
    # Not a part of a character.
    return tokenizer.decode(kept).strip("\ufffd")
