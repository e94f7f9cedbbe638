"""Prefix hashes as routing keeps them: 64 bits, as KV events carry them by default."""

from collections.abc import Sequence

import numpy as np

_BYTES = 8
_MASK = (1 << 64) - 1


def shorten(block_hash: bytes | int) -> int:
    """Return the last 64 bits of a hash.

    A collision sends a request to a core that lacks its prefix; it is computed there. The hash of a
    block of several units ends with that of its last unit.
    """
    if isinstance(block_hash, int):
        return block_hash & _MASK
    return int.from_bytes(block_hash[-_BYTES:], "big")


def shorten_all(block_hashes: Sequence[bytes]) -> list[int]:
    """Return the last 64 bits of each of a prompt's hashes, which are of one length.

    At once: one by one, a long prompt's would take longer than to choose its replica.
    """
    joined = b"".join(block_hashes)
    width = len(joined) // max(1, len(block_hashes))
    if width % _BYTES:
        return [shorten(block_hash) for block_hash in block_hashes]
    words = width // _BYTES
    shortened: list[int] = np.frombuffer(joined, ">u8")[words - 1 :: max(1, words)].tolist()
    return shortened


def shorten_kept(block_hash: bytes) -> int:
    """Return the second 64 bits of a hash: what tiers behind a cache keep ends with them."""
    return int.from_bytes(block_hash[_BYTES : 2 * _BYTES], "little")
