"""Made-up text of an exact number of tokens."""

import re
from collections.abc import Sequence
from typing import Protocol

from vllm.benchmarks.draws import Draws
from vllm.exceptions import ConfigError
from vllm.model_executor.model_loader.resolve import resolve_checkpoint
from vllm.tokenizers import Tokenizer

# A token that is a blank and small letters is one piece for every pre-tokenizer in use: a text of
# such tokens has as many tokens as were put in, whatever their order.
_WHOLE_WORD = re.compile(r" [a-z]+")
_MIN_WORDS = 32
_SYLLABLES = tuple(c + v for c in "bdfgklmnprst" for v in "aeiou")


class Words(Protocol):
    """Where made-up text comes from.

    Attributes:
        is_exact: Whether a word is a token.
        num_special: Tokens that the server puts around a plain prompt.
    """

    is_exact: bool
    num_special: int

    def draw(self, draws: Draws, count: int) -> list[int]:
        """Return numbers of words."""

    def text(self, words: Sequence[int]) -> str:
        """Return the text of words."""

    def count(self, text: str) -> int:
        """Return the tokens of a text."""

    def fit(self, text: str, num_tokens: int) -> str:
        """Repeat or cut a text to about that many tokens."""


class TokenWords:
    """Words that are tokens of a vocabulary.

    Args:
        tokenizer: Of the served model.

    Raises:
        ConfigError: Its vocabulary has too few whole words.
    """

    is_exact = True

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        texts = [tokenizer.decode([i]) for i in range(tokenizer.vocab_size)]
        # The id must also come back: some decoders drop a leading blank.
        self._words = [
            i
            for i, text in enumerate(texts)
            if _WHOLE_WORD.fullmatch(text) and tokenizer.encode(text, False) == [i]
        ]
        if len(self._words) < _MIN_WORDS:
            raise ConfigError(
                f"The tokenizer has {len(self._words)} tokens that are whole words, too few to "
                "make up prompts of: give another --tokenizer, or --skip-tokenizer-init."
            )
        self.num_special = len(tokenizer.encode("a")) - len(tokenizer.encode("a", False))

    def draw(self, draws: Draws, count: int) -> list[int]:
        """Return numbers of words."""
        words, size = self._words, len(self._words)
        return [words[draws.below(size)] for _ in range(count)]

    def text(self, words: Sequence[int]) -> str:
        """Return the text of words."""
        return self._tokenizer.decode(words)

    def count(self, text: str) -> int:
        """Return the tokens of a text."""
        return len(self._tokenizer.encode(text, False))

    def fit(self, text: str, num_tokens: int) -> str:
        """Repeat or cut a text to about that many tokens."""
        ids = self._tokenizer.encode(text, False) or self._words[:1]
        ids = (ids * -(-num_tokens // len(ids)))[:num_tokens]
        return self._tokenizer.decode(ids)


class PlainWords:
    """Words of two syllables, for servers whose tokenizer is not at hand: about a token or two."""

    is_exact = False
    num_special = 0

    def draw(self, draws: Draws, count: int) -> list[int]:
        """Return numbers of words."""
        return [draws.below(len(_SYLLABLES) ** 2) for _ in range(count)]

    def text(self, words: Sequence[int]) -> str:
        """Return the text of words."""
        size = len(_SYLLABLES)
        return "".join(f" {_SYLLABLES[i // size]}{_SYLLABLES[i % size]}" for i in words)

    def count(self, text: str) -> int:
        """Return the words of a text."""
        return len(text.split())

    def fit(self, text: str, num_tokens: int) -> str:
        """Repeat or cut a text to that many words."""
        words = text.split() or ["a"]
        return " ".join((words * -(-num_tokens // len(words)))[:num_tokens])


def load_words(tokenizer: str | None, *, skip: bool = False) -> Words:
    """Return the words of a tokenizer.

    Args:
        tokenizer: A folder or hub id; None: there is none.
        skip: Whether to do without.

    Raises:
        ConfigError: It cannot be had; says what to do.
    """
    if skip or tokenizer is None:
        return PlainWords()
    try:
        folder = resolve_checkpoint(tokenizer, with_weights=False).path
        return TokenWords(Tokenizer.from_folder(folder))
    except ConfigError as error:
        raise ConfigError(
            f"{error} Prompts of an exact length need the tokenizer: give --tokenizer FOLDER, or "
            "--skip-tokenizer-init for prompts counted in words."
        ) from error
