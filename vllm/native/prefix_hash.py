"""The chained hashes of a prompt's blocks in one native call: the bytes of ``utils.hashing``."""

import ctypes
import struct
from collections.abc import Callable, Sequence
from typing import Any

from vllm import envs
from vllm.native.loader import load_library
from vllm.utils.hashing import sha256

# (parent's hash, tokens of whole blocks) -> a hash per block; None: these need the Python way.
HashChain = Callable[[bytes, Sequence[int]], list[bytes] | None]

_HASH_BYTES = 32
# One value of each size that pickle writes differently.
_SAMPLE = (0, 255, 256, 65_535, 65_536, 2**31 - 1)


def find_hash_chain(hash_function: Callable[[Any], Any], block_size: int) -> HashChain | None:
    """Returns what hashes blocks that have no extra keys, if there is a native way.

    Args:
        hash_function: The prefix cache's; only ``utils.hashing.sha256`` has one.
        block_size: Tokens of a block.
    """
    if hash_function is not sha256 or not envs.VLLM_NATIVE:
        return None
    library = load_library()
    if library is None:
        return None

    def hash_chain(parent: bytes, token_ids: Sequence[int]) -> list[bytes] | None:
        if len(parent) != _HASH_BYTES:
            return None
        num_blocks = len(token_ids) // block_size
        try:
            packed = struct.pack(f"{num_blocks * block_size}i", *token_ids)
        except struct.error:
            return None  # beyond 31 bits
        hashes = ctypes.create_string_buffer(num_blocks * _HASH_BYTES)
        if library.vn_hash_blocks(parent, packed, num_blocks, block_size, hashes):
            return None
        return list(struct.unpack(f"{_HASH_BYTES}s" * num_blocks, hashes))

    return hash_chain if _gives_the_same(hash_chain, block_size) else None


def _gives_the_same(hash_chain: HashChain, block_size: int) -> bool:
    """Whether this Python's pickle is the one that the library writes."""
    tokens = (_SAMPLE * block_size)[:block_size]
    parent = bytes(range(_HASH_BYTES))
    return hash_chain(parent, tokens) == [sha256((parent, tokens, None))]
