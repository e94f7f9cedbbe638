"""From a request's inputs to token ids: their forms, prompts in front, what is cut."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.entrypoints.openai.context import ServingContext
from vllm.entrypoints.openai.pipeline.chat_task import ChatTask, prepare_chat
from vllm.entrypoints.openai.prompts import encode_texts
from vllm.entrypoints.openai.sampling import check_token_id
from vllm.exceptions import TextLengthError, UserInputError
from vllm.tokenizers import ChatOptions, Tokenizer

MAX_INPUTS = 2048
"""OpenAI's own limit, which its clients keep to."""


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """A text of which something is wanted.

    Attributes:
        num_prompt_tokens: Of its tokens, those of the prompt in front of it.
    """

    token_ids: list[int]
    num_prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Cut:
    """What becomes of a text that is too long.

    Attributes:
        limit: Tokens of the longest that is taken.
        kept: Tokens to keep; None: a longer one is refused.
        side: Where others go.
    """

    limit: int
    kept: int | None = None
    side: str = "right"

    @classmethod
    def read(cls, wanted: int | None, side: str | None, limit: int) -> "Cut":
        """Read the two fields.

        Raises:
            UserInputError: There can be no such length.
        """
        name = "truncate_prompt_tokens"
        if wanted is not None and (wanted < -1 or wanted == 0):
            raise UserInputError(f"{name}={wanted} must be -1 or at least 1.", name)
        if wanted is not None and wanted > limit:
            raise UserInputError(
                f"{name}={wanted} is above this model's longest text of {limit} tokens: lower it, "
                "or use -1.",
                name,
            )
        return cls(limit, limit if wanted == -1 else wanted, side or "right")

    def apply(self, token_ids: list[int], affixes: tuple[int, int] = (0, 0)) -> list[int]:
        """Return the tokens that are kept.

        Args:
            token_ids: Of a text.
            affixes: How many of its first and last ones are the checkpoint's own, which stay.

        Raises:
            TextLengthError: It is too long.
        """
        if self.kept is not None and len(token_ids) > self.kept:
            num_first, num_last = affixes
            room = self.kept - num_first - num_last
            end = len(token_ids) - num_last
            if room <= 0:
                return token_ids[: self.kept]
            body = token_ids[num_first:end]
            body = body[:room] if self.side == "right" else body[-room:]
            token_ids = [*token_ids[:num_first], *body, *token_ids[end:]]
        if len(token_ids) > self.limit:
            raise TextLengthError(len(token_ids), self.limit)
        return token_ids


def split_inputs(given: Any, name: str = "input") -> list[str | list[int]]:
    """Return the texts that a field holds: one or several, each a text or token ids.

    Raises:
        UserInputError: It is of none of the four forms, or one of them is empty.
    """
    if isinstance(given, str):
        given = [given]
    if not isinstance(given, list):
        raise UserInputError(
            f"{name} must be a text, a list of texts, a list of token ids or a list of such lists, "
            f"not {type(given).__name__}.",
            name,
        )
    if not given:
        raise UserInputError(f"{name} is an empty list: give at least one text.", name)
    # Sets of types: a loop over a million ids would keep the event loop busy.
    if set(map(type, given)) == {int}:
        given = [given]
    if len(given) > MAX_INPUTS:
        raise UserInputError(
            f"{name} holds {len(given)} texts: send at most {MAX_INPUTS} in a request.", name
        )
    for index, item in enumerate(given):
        is_ids = isinstance(item, list) and set(map(type, item)) <= {int}
        if not is_ids and not isinstance(item, str):
            raise UserInputError(
                f"{name} holds an entry that is neither a text nor a list of token ids: "
                f"{str(item)[:60]!r}.",
                name,
            )
        if not item:
            raise UserInputError(
                f"{name} holds an empty entry (number {index}): give at least one character.", name
            )
    return list(given)


async def tokenize_inputs(
    items: Sequence[str | list[int]],
    prompt: str | None,
    cut: Cut,
    context: ServingContext,
    *,
    adds_special_tokens: bool = True,
    name: str = "input",
) -> list[TokenizedText]:
    """Return the tokens of a field's entries.

    Args:
        items: See ``split_inputs``.
        prompt: Stands in front of texts, never of token ids; None: nothing does.
        cut: What becomes of long ones.
        context: The server's.
        adds_special_tokens: Whether to put around texts what the checkpoint does.
        name: The field.

    Raises:
        UserInputError: An id is out of the vocabulary.
        TextLengthError: An entry is too long.
    """
    tokenizer, vocab_size = context.tokenizer, context.served_model.vocab_size
    texts = [item for item in items if isinstance(item, str)]
    if cut.kept is None:
        for text in texts:
            if (least := tokenizer.min_tokens(text)) > cut.limit:
                raise TextLengthError(least, cut.limit, is_bound=True)
    if context.vectors.lowers:
        prompt, texts = prompt and prompt.lower(), [text.lower() for text in texts]
    affixes, num_prompt = (0, 0), 0
    if context.vectors.renders:
        encoded = iter([await _render(text, prompt, context) for text in texts])
    else:
        texts = [(prompt or "") + text for text in texts]
        encoded = iter(await encode_texts(tokenizer, texts, adds_special_tokens, context.workers))
        affixes = _count_affixes(tokenizer) if adds_special_tokens else affixes
        if prompt:
            num_prompt = len(tokenizer.encode(prompt, adds_special_tokens)) - affixes[1]
    tokenized: list[TokenizedText] = []
    for item in items:
        if isinstance(item, str):
            token_ids = cut.apply(next(encoded), affixes)
            if not token_ids:
                raise UserInputError(f"{name} holds a text without a token: {item[:60]!r}.", name)
            tokenized.append(TokenizedText(token_ids, min(num_prompt, len(token_ids))))
            continue
        if not 0 <= min(item) <= max(item) < vocab_size:
            worst = min(item) if min(item) < 0 else max(item)
            check_token_id(worst, vocab_size, name)
        tokenized.append(TokenizedText(cut.apply(item)))
    return tokenized


async def _render(text: str, prompt: str | None, context: ServingContext) -> list[int]:
    """Return the tokens of a text as a user's message, as it stands: nothing opens an answer."""
    messages = [{"role": "system", "content": prompt}] if prompt else []
    messages.append({"role": "user", "content": text})
    task = ChatTask(messages, ChatOptions(add_generation_prompt=False))
    return (await prepare_chat(task, context)).prompt.token_ids


def _count_affixes(tokenizer: Tokenizer) -> tuple[int, int]:
    """Return how many tokens the checkpoint puts before a text, and how many behind it."""
    bare = tokenizer.encode("a", add_special_tokens=False)
    whole = tokenizer.encode("a", add_special_tokens=True)
    more = len(whole) - len(bare)
    for num_first in range(more + 1):
        if whole[num_first : num_first + len(bare)] == bare:
            return num_first, more - num_first
    return 0, 0
