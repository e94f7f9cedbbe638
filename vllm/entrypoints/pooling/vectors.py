"""From rows of the model to vectors, and from vectors to what clients read. Pure functions.

Every vector is made alone, in one order of operations: its bits are the same whatever comes beside
it.
"""

import base64
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm.v1.messages import PooledRows

Vector = npt.NDArray[np.float32]  # [D]
Rows = npt.NDArray[np.float32]  # [n, D]

_LEAST_NORM = 1e-12
_MOST_STEPS = 127
FLOAT_TYPES: Mapping[str, str] = {"float32": "f4", "float16": "f2"}
ENDIANNESS: Mapping[str, str] = {"native": "=", "little": "<", "big": ">"}


def read_rows(pooled: PooledRows) -> Rows:
    """Return what an engine sent."""
    return np.frombuffer(pooled.data, dtype="<f4").reshape(pooled.num_rows, -1).astype(np.float32)


# ---- from rows to a vector -----------------------------------------------------------------------


def narrow(values: npt.NDArray[np.floating[Any]]) -> Vector:
    """Return numbers as float32."""
    narrowed: Vector = values.astype(np.float32)
    return narrowed


def _mean(rows: Rows, first: int) -> Vector:
    kept = rows[first:]
    return narrow(kept.sum(axis=0, dtype=np.float64) / max(len(kept), 1))


def _mean_by_root(rows: Rows, first: int) -> Vector:
    kept = rows[first:]
    return narrow(kept.sum(axis=0, dtype=np.float64) / np.sqrt(max(len(kept), 1)))


def _weighted_mean(rows: Rows, first: int) -> Vector:
    weights = np.arange(first + 1, len(rows) + 1, dtype=np.float64)
    return narrow((rows[first:] * weights[:, None]).sum(axis=0) / max(weights.sum(), 1.0))


def _highest(rows: Rows, first: int) -> Vector:
    highest: Vector = rows[first:].max(axis=0)
    return highest


def _first_row(rows: Rows, first: int) -> Vector:
    del first
    return narrow(rows[0])


def _last_row(rows: Rows, first: int) -> Vector:
    del first
    return narrow(rows[-1])


# By sentence-transformers' names. Each takes rows [n, D] and the number of the prompt's tokens that
# are left out; several are joined in this order.
LAST_TOKEN = "lasttoken"
HIGHEST = "max"
POOLINGS: Mapping[str, Callable[[Rows, int], Vector]] = {
    "cls": _first_row,
    HIGHEST: _highest,
    "mean": _mean,
    "mean_sqrt_len_tokens": _mean_by_root,
    "weightedmean": _weighted_mean,
    LAST_TOKEN: _last_row,
}


def normalise(vector: Vector) -> Vector:
    """Return a vector of length 1 in the same direction; one without a direction stays."""
    wide = vector.astype(np.float64)
    norm = float(np.sqrt(np.square(wide).sum()))
    return (wide / max(norm, _LEAST_NORM)).astype(np.float32)


def cosine(one: Vector, other: Vector) -> float:
    """Return the cosine of the angle between two vectors; 0 where one has no direction."""
    first, second = normalise(one).astype(np.float64), normalise(other).astype(np.float64)
    return float((first * second).sum())


# ---- from a vector to what clients read ----------------------------------------------------------


def encode_base64(values: Vector, float_type: str = "float32", endianness: str = "little") -> str:
    """Return the numbers' bytes in base64.

    Args:
        values: Of any shape, row by row.
        float_type: One of ``FLOAT_TYPES``.
        endianness: One of ``ENDIANNESS``.
    """
    kind = ENDIANNESS[endianness] + FLOAT_TYPES[float_type]
    return base64.b64encode(values.astype(kind).tobytes()).decode()


def to_unsigned_bits(vector: Vector) -> list[int]:
    """Return a byte for every eight numbers: a bit is set where one is not negative, first high."""
    return [int(byte) for byte in np.packbits(vector >= 0)]


def to_signed_bits(vector: Vector) -> list[int]:
    """Return the same bytes less 128."""
    return [byte - 128 for byte in to_unsigned_bits(vector)]


def to_signed_bytes(vector: Vector) -> list[int]:
    """Return a number from -127 to 127 for each: the vector's largest is one of the two.

    The direction stays, to half a step. The length goes: compare by cosine.
    """
    largest = float(np.abs(vector).max())
    steps = np.rint(vector.astype(np.float64) * (_MOST_STEPS / max(largest, _LEAST_NORM)))
    return [int(step) for step in steps]


def to_unsigned_bytes(vector: Vector) -> list[int]:
    """Return the same numbers and 128."""
    return [step + 128 for step in to_signed_bytes(vector)]
