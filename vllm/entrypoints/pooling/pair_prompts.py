"""What a model is asked of a query and a document: the one place for these words.

The query stands in front and the document behind it, so that the documents of a request share all
that comes before them. The answer is read from two tokens that may come next.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from vllm.entrypoints.openai.context import ServingContext
from vllm.entrypoints.openai.pipeline.chat_task import ChatTask, prepare_chat
from vllm.entrypoints.pooling.inputs import Cut
from vllm.entrypoints.pooling.plan import YesNo
from vllm.exceptions import TextLengthError, UnsupportedFeatureError, UserInputError
from vllm.tokenizers import ChatOptions, Tokenizer
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

_QUESTION = (
    "\n\nDoes the document contain what the query asks for? Answer with one letter only: A for "
    "yes, B for no."
)


@dataclass(frozen=True, slots=True)
class Pair:
    """A query and a document."""

    query: str
    document: str


class PairPrompts(Protocol):
    """Makes prompts of pairs.

    Attributes:
        answer: The two tokens that are read behind them.
    """

    @property
    def answer(self) -> YesNo:
        """The two tokens that are read behind them."""

    async def encode(self, pair: Pair, instruction: str | None) -> list[int]:
        """Return the tokens of a pair's prompt."""


@dataclass(frozen=True, slots=True)
class RerankerPrompts:
    """Those of Qwen3-Reranker. What clients spell of its special tokens stays text."""

    context: ServingContext
    literal: LiteralText
    answer: YesNo

    async def encode(self, pair: Pair, instruction: str | None) -> list[int]:
        """Return the tokens of a pair's prompt."""
        told = _QWEN3_INSTRUCTION if instruction is None else instruction
        num_chars = len(pair.document) + len(pair.query) + len(told)
        return await self.context.workers.run(num_chars, partial(self._encode, pair, told))

    def _encode(self, pair: Pair, told: str, is_wanted: object) -> list[int]:
        del is_wanted
        encode, mark = (
            self.context.tokenizer.encode,
            self.literal.find_mark([told, pair.query, pair.document]),
        )
        told, query, document = (
            self.literal.guard(text, mark) for text in (told, pair.query, pair.document)
        )
        body = f"<Instruct>: {told}\n<Query>: {query}\n<Document>: {document}"
        return [
            *encode(_QWEN3_BEGIN, add_special_tokens=False),
            *self.literal.encode(body, mark, add_special_tokens=False),
            *encode(_QWEN3_END, add_special_tokens=False),
        ]


@dataclass(frozen=True, slots=True)
class QuestionPrompts:
    """A question to any model that generates, as a chat where it has a format for chats."""

    context: ServingContext
    answer: YesNo

    async def encode(self, pair: Pair, instruction: str | None) -> list[int]:
        """Return the tokens of a pair's prompt."""
        head = "" if instruction is None else f"{instruction}\n\n"
        text = f"{head}Query: {pair.query}\n\nDocument: {pair.document}{_QUESTION}"
        context = self.context
        if isinstance(context.chat_encoder, NoChatEncoder):
            work = partial(_encode_bare, context.tokenizer, f"{text}\n\nAnswer:")
            return await context.workers.run(len(text), work)
        options = ChatOptions(
            reasoning_effort="none", template_kwargs=context.args.default_chat_template_kwargs
        )
        task = ChatTask([{"role": "user", "content": text}], options)
        return (await prepare_chat(task, context)).prompt.token_ids


def _encode_bare(tokenizer: Tokenizer, text: str, is_wanted: object) -> list[int]:
    del is_wanted
    return tokenizer.encode(text)


def make_pair_prompts(context: ServingContext) -> PairPrompts:
    """Return how the served model is asked about pairs.

    Raises:
        UnsupportedFeatureError: It cannot be asked.
    """
    plan = context.vectors
    if plan.yes_no is not None:
        return RerankerPrompts(context, LiteralText(context.tokenizer), plan.yes_no)
    if not plan.generates:
        raise UnsupportedFeatureError("This checkpoint has no output matrix: it cannot be asked.")
    space = " " if isinstance(context.chat_encoder, NoChatEncoder) else ""
    for prefix in dict.fromkeys((space, "")):
        ids = [context.tokenizer.encode(f"{prefix}{letter}", False) for letter in "AB"]
        if all(len(found) == 1 for found in ids):
            return QuestionPrompts(context, YesNo(ids[0][0], ids[1][0]))
    raise UnsupportedFeatureError(
        "This model cannot be asked about pairs: in its vocabulary the letters A and B are no "
        "single tokens."
    )


async def encode_pair(
    prompts: PairPrompts,
    pair: Pair,
    instruction: str | None,
    cut: Cut,
    tokenizer: Tokenizer,
) -> list[int]:
    """Return the tokens of a pair's prompt; a document that makes it too long is cut if it may be.

    Raises:
        TextLengthError: It is too long.
        UserInputError: It is, without its document.
    """
    token_ids = await prompts.encode(pair, instruction)
    if cut.kept is None or len(token_ids) <= cut.kept:
        return cut.apply(token_ids)
    room = len(tokenizer.encode(pair.document, False)) - (len(token_ids) - cut.kept)
    while room > 0:
        shorter = replace(pair, document=cut_text(pair.document, room, tokenizer, cut.side))
        token_ids = await prompts.encode(shorter, instruction)
        if len(token_ids) <= cut.kept:
            return token_ids
        # At the cut, tokens may have joined otherwise.
        room -= len(token_ids) - cut.kept
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


__all__ = [
    "Pair",
    "PairPrompts",
    "TextLengthError",
    "cut_text",
    "encode_pair",
    "make_pair_prompts",
]
