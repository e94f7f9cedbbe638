"""Texts in which special tokens of a vocabulary are written as the tokenizer writes them."""

import re
from collections.abc import Iterator, Mapping


class SpecialTexts:
    """Finds special tokens in texts.

    Args:
        ids: Of the special tokens, by their text.
    """

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = ids
        longest_first = sorted(ids, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def split(self, text: str) -> Iterator[str | int]:
        """Yield the parts of a text in order: a special token's id, or what stands between."""
        position = 0
        for match in self._pattern.finditer(text):
            if match.start() > position:
                yield text[position : match.start()]
            yield self._ids[match[0]]
            position = match.end()
        if position < len(text):
            yield text[position:]

    def begins(self, text: str) -> bool:
        """Whether a text begins with a special token."""
        return self._pattern.match(text) is not None

    def stands_in(self, text: str) -> bool:
        """Whether a text holds a special token."""
        return self._pattern.search(text) is not None
