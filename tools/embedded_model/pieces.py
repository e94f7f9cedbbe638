"""Text with loss weights: what the makers of training data return."""

import re
from collections.abc import Collection
from dataclasses import dataclass, field

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
THINK, END_THINK = "<think>", "</think>"


@dataclass
class Pieces:
    """A text in pieces, each with the weight of its tokens in the loss.

    Pieces are cut where the tokenizer's pre-tokenizer cuts (before a space, at a special token),
    so their tokens are those of the whole text.

    Attributes:
        parts: (text, weight, tag, look): pieces of one tag say the same, so that a later one can be
            copied from an earlier; ``look`` is the tag of a piece that has to be found before this
            one's first token can be said; "" without.
    """

    parts: list[tuple[str, float, str, str]] = field(default_factory=list)

    def add(self, text: str, weight: float = 0.0, tag: str = "", look: str = "") -> "Pieces":
        """Append a piece."""
        if text:
            self.parts.append((text, weight, tag, look))
        return self

    def extend(self, other: "Pieces") -> "Pieces":
        """Append all of another's pieces."""
        self.parts.extend(other.parts)
        return self

    @property
    def tags(self) -> set[str]:
        """The tags of all pieces."""
        return {tag for _, _, tag, _ in self.parts if tag}

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(text for text, *_ in self.parts)


def tag_words(text: str, words: Collection[str]) -> Pieces:
    """Cut a text so that each of ``words`` that follows a space is a piece, tagged as itself."""
    pieces, rest = Pieces(), text
    while True:
        places = [
            (match.start(), word)
            for word in words
            if (match := re.search(rf" {re.escape(word)}(?!\w)", rest)) is not None
        ]
        if not places:
            return pieces.add(rest)
        start, word = min(places)
        pieces.add(rest[:start]).add(f" {word}", 0.0, word)
        rest = rest[start + 1 + len(word) :]
