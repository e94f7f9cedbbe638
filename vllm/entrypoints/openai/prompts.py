"""Prompts of a completion: text or token ids, one or several."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vllm.entrypoints.openai.context import ServedModel
from vllm.entrypoints.openai.protocol.requests import SamplingRequest
from vllm.entrypoints.openai.sampling import check_token_id
from vllm.entrypoints.openai.text_workers import TextWorkers
from vllm.exceptions import ContextLengthError, UserInputError
from vllm.inputs import MAX_CACHE_BOUNDARIES
from vllm.multimodal.inputs import ImageFeature
from vllm.tokenizers import Tokenizer
from vllm.v1.engine.input_processor import truncate_prompt

# Longer texts are tokenised in a thread: a millisecond of it is about this much.
_THREAD_CHARS = 2_000


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A prompt's tokens, its text if it was given as one, and where parts of it end, in tokens.

    Attributes:
        token_ids: Its tokens.
        text: Its text, if it was given as one.
        cache_boundaries: Where parts of it end.
        cache_ttls: For some of them, seconds to keep what lies before at least.
        marked_until: The last place that its client marked; 0: none.
        insert_end: Where ends what may be left in the cache; None: nowhere.
        images: Its pictures, in their order.
    """

    token_ids: list[int]
    text: str | None = None
    cache_boundaries: Sequence[int] = ()
    cache_ttls: Mapping[int, float] = field(default_factory=dict)
    marked_until: int = 0
    insert_end: int | None = None
    images: tuple[ImageFeature, ...] = ()

    def with_breakpoints(self, offsets: Mapping[int, float | None]) -> "TokenizedPrompt":
        """Return the prompt with what a client marked before what its format tells.

        Args:
            offsets: Places in tokens, and for how many seconds to keep each at least, or None.
        """
        others = [offset for offset in self.cache_boundaries if offset not in offsets]
        boundaries = (*offsets, *others)[:MAX_CACHE_BOUNDARIES]
        ttls = {offset: ttl for offset, ttl in offsets.items() if ttl is not None}
        return replace(
            self,
            cache_boundaries=boundaries,
            cache_ttls={**self.cache_ttls, **ttls},
            marked_until=max(offsets, default=0),
        )

    def only_marked(self) -> "TokenizedPrompt":
        """Return the prompt, of which nothing behind the last mark stays in the cache."""
        end = self.marked_until
        boundaries = [offset for offset in self.cache_boundaries if offset <= end]
        ttls = {offset: ttl for offset, ttl in self.cache_ttls.items() if offset <= end}
        return replace(self, cache_boundaries=boundaries, cache_ttls=ttls, insert_end=end)

    def kept_for(self, ttl_s: float | None) -> "TokenizedPrompt":
        """Return the prompt, kept as a whole so long at least, with marks that do not say how long.

        Args:
            ttl_s: Seconds; None: as long as others.
        """
        if ttl_s is None or not self.token_ids:
            return self
        return replace(self, cache_ttls={len(self.token_ids): ttl_s, **self.cache_ttls})


def split_prompts(prompt: Any) -> list[str | list[int]]:
    """Return the prompts that a ``prompt`` field holds.

    Raises:
        UserInputError: It is none of the four forms, or empty.
    """
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        raise UserInputError(
            "prompt must be a string, a list of strings, a list of token ids or a list of such "
            f"lists, not {type(prompt).__name__}.",
            "prompt",
        )
    if not prompt:
        raise UserInputError("prompt is an empty list: give at least one prompt.", "prompt")
    # Sets of types: a loop over a million ids would keep the event loop busy.
    if set(map(type, prompt)) == {int}:
        return [prompt]
    for item in prompt:
        is_ids = isinstance(item, list) and set(map(type, item)) <= {int}
        if not is_ids and not isinstance(item, str):
            raise UserInputError(
                "prompt holds an entry that is neither a string nor a list of token ids: "
                f"{str(item)[:60]!r}.",
                "prompt",
            )
    return list(prompt)


async def tokenize_prompts(
    tokenizer: Tokenizer,
    prompt: Any,
    vocab_size: int,
    add_special_tokens: bool,
    *,
    workers: TextWorkers,
    max_tokens: int | None = None,
) -> list[TokenizedPrompt]:
    """Check and tokenise the ``prompt`` field of a completion.

    Args:
        tokenizer: The model's.
        prompt: The field.
        vocab_size: Token ids are below it.
        add_special_tokens: Whether to put around a text what the checkpoint does.
        workers: Where long texts are tokenised.
        max_tokens: What cannot have as few is refused unread; None: everything is read.

    Raises:
        UserInputError: It is malformed, empty or holds an id outside the vocabulary.
        ContextLengthError: A prompt is longer than ``max_tokens``.
    """
    prompts = split_prompts(prompt)
    if max_tokens is not None:
        for item in prompts:
            least = tokenizer.min_tokens(item) if isinstance(item, str) else len(item)
            if least > max_tokens:
                raise ContextLengthError(least, max_tokens + 1, is_bound=isinstance(item, str))
    texts = [item for item in prompts if isinstance(item, str)]
    encoded = iter(await encode_texts(tokenizer, texts, add_special_tokens, workers))
    tokenized: list[TokenizedPrompt] = []
    for item in prompts:
        if isinstance(item, str):
            if not item:
                raise UserInputError("The prompt is empty: give at least one character.", "prompt")
            tokenized.append(TokenizedPrompt(next(encoded), item))
            continue
        if item and not 0 <= min(item) <= max(item) < vocab_size:
            worst = min(item) if min(item) < 0 else max(item)
            check_token_id(worst, vocab_size, "prompt")
        tokenized.append(TokenizedPrompt(item))
    return tokenized


def truncate(
    prompt: TokenizedPrompt,
    request: SamplingRequest,
    max_tokens: int | None,
    served_model: ServedModel,
) -> TokenizedPrompt:
    """Cut a prompt to ``truncate_prompt_tokens``, at its beginning unless the request says else.

    Args:
        prompt: The prompt.
        request: Its request.
        max_tokens: Of the answer, as far as it is known.
        served_model: The model's.

    Raises:
        UserInputError: The wanted length is impossible.
    """
    wanted = request.truncate_prompt_tokens
    if wanted is None:
        return prompt
    if wanted < -1 or wanted == 0:
        raise UserInputError(
            f"truncate_prompt_tokens={wanted} must be -1 or at least 1.", "truncate_prompt_tokens"
        )
    side = request.truncation_side or "left"
    kept = truncate_prompt(
        prompt.token_ids, wanted, served_model.max_model_len, max_tokens or 1, side
    )
    if len(kept) == len(prompt.token_ids):
        return prompt
    if prompt.images:
        raise UserInputError(
            f"truncate_prompt_tokens={wanted} would cut a prompt of {len(prompt.token_ids)} tokens "
            "with pictures: leave it out, or send fewer messages.",
            "truncate_prompt_tokens",
        )
    return TokenizedPrompt(kept)


def unread_limit(request: SamplingRequest, served_model: ServedModel) -> int | None:
    """Return the tokens above which a prompt is refused; None: it is cut to fit."""
    return None if request.truncate_prompt_tokens is not None else served_model.max_prompt_tokens


async def encode_texts(
    tokenizer: Tokenizer, texts: list[str], add_special_tokens: bool, workers: TextWorkers
) -> list[list[int]]:
    """Tokenise texts, in a thread if they are long (the library works outside the GIL)."""
    num_chars = sum(map(len, texts))
    if num_chars < _THREAD_CHARS:
        return tokenizer.encode_batch(texts, add_special_tokens)
    return await workers.run(num_chars, lambda _: tokenizer.encode_batch(texts, add_special_tokens))
