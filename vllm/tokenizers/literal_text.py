"""Special tokens that a client spells in a message stay text; those of the prompt's format do not.

A rendered chat mixes both. Occurrences in messages are marked before rendering; afterwards the
format's own are respelled, unguessably, the marks are removed, and a twin of the tokenizer that
knows special tokens by their new spelling alone encodes the text:

    message      a <|end|> b        guard    a <*|end|> b              (* is the mark)
    rendered     <|start|>a <*|end|> b<|end|>
    respelled    <9f..3>a <|end|> b<9f..4>
    twin         [start] a < | end | > b [end]

Chats without such text, nearly all, take none of these steps.
"""

import json
import re
import secrets
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import tokenizers

from vllm.exceptions import ConfigError
from vllm.tokenizers.tokenizer import Tokenizer

_PIECE_CHARS = 100_000
# Noncharacters first; then private use, should a client send all of those.
_MARKS = (*range(0xFDD0, 0xFDF0), *range(0xE000, 0xF900))


class LiteralText:
    """Guards texts of clients, and encodes rendered prompts that contain guarded ones.

    Owns: the twin of the tokenizer, made when it is first needed.

    Args:
        tokenizer: The checkpoint's.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        specials = sorted(tokenizer.special_texts, key=len, reverse=True)
        # A special token of one character cannot be marked inside; none is known.
        self._specials = [text for text in specials if len(text) > 1]
        self._pattern = re.compile("|".join(map(re.escape, self._specials)) or r"(?!)")
        nonce = secrets.token_hex(8)
        self._spelling = {text: f"<{nonce}{i}>" for i, text in enumerate(self._specials)}

    def find_mark(self, texts: Iterable[str]) -> str | None:
        """Return a character to mark special tokens in these texts with; None: there are none."""
        listed = [text for text in texts if text]
        if not any(map(self._has_special, listed)):
            return None
        used = set().union(*listed)
        return next(chr(code) for code in _MARKS if chr(code) not in used)

    def _has_special(self, text: str) -> bool:
        """Whether a text spells one; looked for in pieces, so that other threads get their turn."""
        overlap = len(self._specials[0]) if self._specials else 0
        return any(
            self._pattern.search(text, at, at + _PIECE_CHARS + overlap)
            for at in range(0, len(text), _PIECE_CHARS)
        )

    def guard(self, text: str, mark: str | None) -> str:
        """Return a client's text with its special tokens marked."""
        if mark is None:
            return text
        return self._pattern.sub(lambda match: match[0][0] + mark + match[0][1:], text)

    def encode(self, rendered: str, mark: str | None, add_special_tokens: bool) -> list[int]:
        """Return the tokens of a rendered prompt; marked special tokens are text.

        Raises:
            UserInputError: The text cannot be tokenised.
        """
        if mark is None:
            return self._tokenizer.encode(rendered, add_special_tokens=add_special_tokens)
        respelled = self._pattern.sub(lambda match: self._spelling[match[0]], rendered)
        return self._twin.encode(respelled.replace(mark, ""), add_special_tokens=add_special_tokens)

    @cached_property
    def _twin(self) -> Tokenizer:
        """The same tokenizer with other spellings of its special tokens, ids unchanged."""
        state = json.loads(self._tokenizer.backend.to_str())
        for token in state["added_tokens"]:
            token["content"] = self._spelling.get(token["content"], token["content"])
        self._respell_model(state["model"])
        backend = tokenizers.Tokenizer.from_str(json.dumps(state))
        for text, spelling in self._spelling.items():
            if backend.token_to_id(spelling) != self._tokenizer.token_to_id(text):
                raise ConfigError(
                    f"special token {text!r} cannot be told from text with this tokenizer: start "
                    "the server with --allow-special-tokens-in-content"
                )
        return self._tokenizer.with_backend(backend)

    def _respell_model(self, model: dict[str, Any]) -> None:
        """Rename special tokens in a model's vocabulary, where a text could match them.

        Mutates: model.
        """
        vocab = model.get("vocab")
        if isinstance(vocab, dict):
            model["vocab"] = {self._spelling.get(t, t): i for t, i in vocab.items()}
        elif isinstance(vocab, list):
            model["vocab"] = [[self._spelling.get(t, t), score] for t, score in vocab]
        if model.get("unk_token") in self._spelling:
            model["unk_token"] = self._spelling[model["unk_token"]]
