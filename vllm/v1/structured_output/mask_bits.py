"""The bits of masks: which tokens may follow."""

from collections.abc import Iterable

import numpy as np

# Of a word of a mask.
BITS = 32
_BIT_AS_INT32 = (1 << np.arange(BITS)).astype(np.uint32).view(np.int32).tolist()


def is_allowed(bits: np.ndarray, row: int, token_id: int) -> bool:
    """Whether a row of ``bits``, int32 ``[R, ceil(V / 32)]``, lets a token follow."""
    return bool(bits.item(row, token_id // BITS) >> token_id % BITS & 1)


def allow_only(bits: np.ndarray, row: int, token_id: int) -> None:
    """Let one token alone be possible in a row.

    Mutates: ``bits``, int32 ``[R, ceil(V / 32)]``.
    """
    # Row by row: numpy takes longer to prepare several at once.
    bits[row] = 0
    bits[row, token_id // BITS] = _BIT_AS_INT32[token_id % BITS]


def keep_only(bits: np.ndarray, row: int, token_ids: Iterable[int]) -> None:
    """Take all but these tokens out of a row; where none of them was possible it stays as it is.

    Mutates: ``bits``, int32 ``[R, ceil(V / 32)]``.
    """
    kept = [token_id for token_id in token_ids if is_allowed(bits, row, token_id)]
    if kept:
        bits[row] = 0
        allow_tokens(bits, np.full(len(kept), row), np.array(kept))


def allow_tokens(bits: np.ndarray, rows: np.ndarray, token_ids: np.ndarray) -> None:
    """Let one token in each of these rows, int64 ``[N]``, be possible too.

    Mutates: ``bits``, int32 ``[R, ceil(V / 32)]``.
    """
    bits[rows, token_ids // BITS] |= (1 << token_ids % BITS).astype(np.uint32).view(np.int32)


def forbid_tokens(bits: np.ndarray, rows: range, token_ids: Iterable[int]) -> None:
    """Let none of these tokens be possible in rows that follow each other.

    Mutates: ``bits``, int32 ``[R, ceil(V / 32)]``.
    """
    for token_id in token_ids:
        bits[rows.start : rows.stop, token_id // BITS] &= ~_BIT_AS_INT32[token_id % BITS]
