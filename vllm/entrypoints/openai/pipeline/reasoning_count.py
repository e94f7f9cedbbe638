"""How many tokens of an answer are reasoning."""

from collections.abc import Sequence

from vllm.parser.pieces import Piece, ReasoningText
from vllm.tokenizers import Tokenizer


class ReasoningCounter:
    """Counts an answer's tokens up to and including the mark that ends its reasoning.

    An output of the engine may hold many tokens and pieces, and pieces come later than the tokens
    that they are made of. So the end is found by spelling: it is the first token that, with all
    before it, goes beyond the reasoning's text and the white space behind that, which some formats
    drop.

        tokens  <think> | Let | me | see | . | </think> | Yes
        text              Let   me   see   .
        counted ---------------------------------------->

    Owns: the count; until the reasoning ended, the tokens and the text so far.

    Args:
        tokenizer: Spells tokens.
        in_reasoning: Whether the answer begins inside the reasoning.
    """

    def __init__(self, tokenizer: Tokenizer, in_reasoning: bool) -> None:
        self._tokenizer = tokenizer
        self._has_begun = in_reasoning
        self._has_ended = False
        self._token_ids: list[int] = []
        self._text: list[str] = []
        self._num_tokens = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of reasoning so far."""
        return self._num_tokens

    @property
    def has_ended(self) -> bool:
        """Whether ``num_tokens`` is final: the answer goes beyond its reasoning."""
        return self._has_ended

    def add(self, token_ids: Sequence[int], pieces: Sequence[Piece]) -> None:
        """Take in an output of the engine and what it was read as."""
        if self._has_ended:
            return
        self._token_ids += token_ids
        thought = [piece.text for piece in pieces if isinstance(piece, ReasoningText)]
        self._text += thought
        self._has_begun |= bool(thought)
        if len(thought) < len(pieces):
            self._has_ended = True
            self._num_tokens = self._find_end() if self._has_begun else 0
            self._token_ids.clear()
        elif self._has_begun:
            self._num_tokens = len(self._token_ids)

    def _find_end(self) -> int:
        spelled = [self._tokenizer.token_bytes(token_id) for token_id in self._token_ids]
        text = "".join(self._text).encode()
        start = b"".join(spelled).find(text)
        num_bytes = max(start, 0) + len(text)
        for i, token in enumerate(spelled):
            beyond = token[num_bytes:]
            num_bytes = max(num_bytes - len(token), 0)
            if beyond.strip():
                return i + 1
        return len(spelled)
