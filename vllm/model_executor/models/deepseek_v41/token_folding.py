"""Token ids by what their text says, not how it is written: case, accents and spaces fold."""

import re
import unicodedata

import numpy as np

from vllm.exceptions import CheckpointError
from vllm.tokenizers.tokenizer import Tokenizer

_SPACES = re.compile(r"[ \t\r\n]+")


def fold_text(text: str) -> str:
    """Returns what all spellings of a text have in common; a lone space stays one."""
    composed = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    bare = "".join(char for char in composed if unicodedata.category(char) != "Mn").lower()
    spaced = _SPACES.sub(" ", bare)
    return spaced if spaced == " " else spaced.strip()


def fold_tokens(tokenizer: Tokenizer, vocab_size: int, num_folded: int) -> np.ndarray:
    """Returns the folded id of every token id, int64 [vocab_size], numbered as they first occur.

    Ids without a token, with which a vocabulary is padded, count as one more where there is room
    for it; else they are the first: no text has them.

    Args:
        tokenizer: The checkpoint's.
        vocab_size: Ids of the model.
        num_folded: How many folded ids there must be: rows of tables are found by it.

    Raises:
        CheckpointError: There are more or fewer.
    """
    number_of: dict[str, int] = {}
    folded = np.full(vocab_size, -1, dtype=np.int64)
    for token_id in range(vocab_size):
        key = _find_key(tokenizer, token_id)
        if key is not None:
            folded[token_id] = number_of.setdefault(key, len(number_of))
    is_padding = folded < 0
    count = len(number_of)
    has_room = bool(is_padding.any()) and num_folded == count + 1
    folded[is_padding] = count if has_room else 0
    if num_folded != count and not has_room:
        raise CheckpointError(
            f"the tokenizer's {vocab_size - int(is_padding.sum())} ids fold to {count}, but "
            f"config.json says engram_compressed_vocab_size is {num_folded}: the rows of the "
            "engram tables would be others than those trained. Use the tokenizer that the weights "
            "were published with."
        )
    return folded


def _find_key(tokenizer: Tokenizer, token_id: int) -> str | None:
    """Returns what a token is folded by; None: the id has no token."""
    piece = tokenizer.backend.id_to_token(token_id)
    if piece is None:
        return None
    try:
        text = tokenizer.token_bytes(token_id).decode("utf-8")
    except UnicodeDecodeError:
        # Part of a character.
        return piece
    return fold_text(text) or text
