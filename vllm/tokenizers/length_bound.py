"""The least number of tokens that a text can have, by its length alone.

No token stands for more characters than the longest in the vocabulary spells, so a text that is
longer than the context's tokens times that cannot fit, and need not be tokenised to know it:

    text       5,000,000 characters
    longest           21 characters
    tokens       238,096 at least; the context has 16,384

That holds where no step before the vocabulary makes texts shorter. A tokenizer with a step that may
has no bound.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import tokenizers

# Steps that keep every character, or put others in its place, one for one at least.
_KEEPING_NORMALIZERS = frozenset({"Prepend", "Lowercase", "NFD", "NFKD"})
# These compose characters, none of which is ASCII.
_COMPOSING_NORMALIZERS = frozenset({"NFC", "NFKC"})
_KEEPING_SPLITTERS = frozenset({"ByteLevel", "Metaspace", "Digits", "UnicodeScripts"})
# They drop what they split at, if told to.
_SPLITTERS = frozenset({"Split", "Punctuation"})


class LengthBound:
    """Bounds the tokens of texts from below.

    Args:
        backend: The library's tokenizer.
        knows_every_byte: Whether every text has tokens: unknown characters are bytes.
    """

    def __init__(self, backend: tokenizers.Tokenizer, knows_every_byte: bool) -> None:
        normalizers = list(_steps(backend.normalizer))
        kinds = {step["type"] for step in normalizers}
        self._is_known = (
            knows_every_byte
            and all(map(_keeps_length, normalizers))
            and all(map(_keeps_text, _steps(backend.pre_tokenizer)))
        )
        self._ascii_only = not kinds.isdisjoint(_COMPOSING_NORMALIZERS)
        added = backend.get_added_tokens_decoder().values()
        self._takes_space = any(token.lstrip or token.rstrip for token in added)
        self._longest = max(map(len, backend.get_vocab(with_added_tokens=True)), default=1)

    def min_tokens(self, text: str) -> int:
        """Return how many tokens a text has at least; 0 where nothing is known."""
        if not self._is_known or (self._ascii_only and not text.isascii()):
            return 0
        num_chars = len(text)
        if self._takes_space:
            # A token may take any number of spaces beside it.
            num_chars = sum(map(len, text.split()))
        return -(-num_chars // max(self._longest, 1))


def _steps(part: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a normalizer or a splitter, as the library writes them."""
    if part is None:
        return
    waiting = [json.loads(part.__getstate__())]
    while waiting:
        step = waiting.pop()
        inner = step.get("normalizers") or step.get("pretokenizers")
        if inner is None:
            yield step
        else:
            waiting += inner


def _keeps_length(step: Mapping[str, Any]) -> bool:
    kind = step["type"]
    if kind != "Replace":
        return kind in _KEEPING_NORMALIZERS or kind in _COMPOSING_NORMALIZERS
    pattern = step["pattern"].get("String")
    return pattern is not None and len(step["content"]) >= len(pattern)


def _keeps_text(step: Mapping[str, Any]) -> bool:
    kind = step["type"]
    return kind in _KEEPING_SPLITTERS or (kind in _SPLITTERS and step.get("behavior") != "Removed")
