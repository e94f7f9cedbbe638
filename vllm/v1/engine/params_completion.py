"""What the tokenizer adds to a request's sampling parameters, and what it must check of them."""

from collections.abc import Sequence

from vllm.exceptions import UserInputError
from vllm.sampling_params import ReasoningSpan, SamplingParams
from vllm.tokenizers import Tokenizer
from vllm.v1.structured_output.limits import check_size

_MAX_BAD_WORDS = 1024
# How reasoning is opened and closed, where it is closed by one token.
_THINK_TOKENS = ("<think>", "</think>")


def complete_from_tokenizer(
    params: SamplingParams, prompt_token_ids: Sequence[int], tokenizer: Tokenizer | None
) -> None:
    """Fill in what follows from the vocabulary.

    Args:
        params: Of the request.
        prompt_token_ids: Its prompt.
        tokenizer: None: token ids only.

    Raises:
        UserInputError: A field needs a tokenizer, or asks for too much.

    Mutates: ``params``: the tokens of bad words, and where an open reasoning ends.
    """
    if params.structured_outputs is not None:
        check_size(params.structured_outputs)
    if tokenizer is None:
        for name in ("bad_words", "structured_outputs"):
            if getattr(params, name):
                raise UserInputError(
                    f"{name} needs a tokenizer, which this engine runs without "
                    "(skip_tokenizer_init): leave it out.",
                    name,
                )
        return
    if params.bad_words:
        params.bad_words_token_ids = _encode_words(params.bad_words, tokenizer)
    needs_span = params.structured_outputs is not None or params.thinking_token_budget is not None
    if needs_span and params.reasoning is None:
        params.reasoning = find_open_reasoning(tokenizer, prompt_token_ids)


def _encode_words(words: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Return the words' tokens, at the beginning of a line and behind a space."""
    if len(words) > _MAX_BAD_WORDS:
        raise UserInputError(
            f"bad_words holds {len(words)} texts: at most {_MAX_BAD_WORDS} are allowed.",
            "bad_words",
        )
    spellings = [text for word in words for text in (word.lstrip(), f" {word.lstrip()}", word)]
    encoded = tokenizer.encode_batch([text for text in spellings if text], add_special_tokens=False)
    return [list(ids) for ids in dict.fromkeys(tuple(ids) for ids in encoded if ids)]


def find_open_reasoning(
    tokenizer: Tokenizer, prompt_token_ids: Sequence[int]
) -> ReasoningSpan | None:
    """Return where the reasoning ends that a prompt leaves open; None: it leaves none open."""
    start, end = (tokenizer.token_to_id(text) for text in _THINK_TOKENS)
    if start is None or end is None:
        return None
    for token_id in reversed(prompt_token_ids):
        if token_id == end:
            return None
        if token_id == start:
            return ReasoningSpan([end])
    return None
