"""Random numbers that depend on (key, position) only.

A stateful generator would make a seeded answer depend on what else is in the batch, on preemption
and on how many draft tokens were rejected. Here the draw for the token at position p of a request
is a hash of the request's key and p, the same whenever and beside whomever it is made.
"""

import numpy as np

# SplitMix64's increment and finaliser: a bijection of 64-bit words with good avalanche.
_INCREMENT = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)
# float32 holds 24 bits exactly, and the devices draw in float32.
_DROPPED_BITS = np.uint64(64 - 24)
_SCALE = np.float32(2.0**-24)


def make_key(seed: int) -> int:
    """Return the 64-bit key of a user's seed; seeds that differ by one give unrelated keys."""
    return int(_mix(np.array([seed % 2**64], dtype=np.uint64))[0])


def draw_uniforms(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return one float32 in [0, 1) for each (key, position).

    Args:
        keys: uint64 ``[N]``.
        positions: int64 ``[N]``, not negative.
    """
    words = _mix(keys ^ _mix(positions.astype(np.uint64))) >> _DROPPED_BITS
    uniforms: np.ndarray = words.astype(np.float32) * _SCALE
    return uniforms


def _mix(words: np.ndarray) -> np.ndarray:
    # Array arithmetic wraps silently, which is meant.
    words = words + _INCREMENT
    words = (words ^ (words >> np.uint64(30))) * _MULTIPLIER_1
    words = (words ^ (words >> np.uint64(27))) * _MULTIPLIER_2
    result: np.ndarray = words ^ (words >> np.uint64(31))
    return result
