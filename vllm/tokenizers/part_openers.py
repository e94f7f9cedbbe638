"""Which token begins a message in a chat format that is known by its template alone."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from vllm.exceptions import UserInputError

_PROBE = (
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
)


def find_openers(
    encode: Callable[[Sequence[Mapping[str, Any]]], Sequence[int]], special_ids: Collection[int]
) -> frozenset[int]:
    """Return the special token that stands before every message; none if the format has none.

    Of the special tokens that a small chat has at least once a message, it is the first:

        <bos> <|start|> user <|sep|> a <|end|> <|start|> assistant <|sep|> b <|end|> ...
              ^-- three times, as others are, and before them

    Args:
        encode: Returns a chat's tokens, without a generation prompt.
        special_ids: The tokenizer's special tokens.
    """
    try:
        token_ids = encode(_PROBE)
    except UserInputError:
        # A template may take other chats only; then nothing is known of its messages.
        return frozenset()
    counts = Counter(token_id for token_id in token_ids if token_id in special_ids)
    repeated = [token_id for token_id in token_ids if counts[token_id] >= len(_PROBE)]
    return frozenset(repeated[:1])
