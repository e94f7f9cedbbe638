"""The order in which a batch's lines are sent: those that begin alike one after another.

A pool that holds a few prefixes then serves any number of them: each is computed once, while it is
wanted, and never again. The results carry their ``custom_id``, so the order is free.
"""

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import msgspec

# What a prompt is made of, in the order in which chat formats write it.
_FIELDS = ("tools", "instructions", "messages", "input", "prompt", "state")
_PIECE_CHARS = 256
_MAX_PIECES = 64
_DIGEST_BYTES = 6


def prefix_key(body: Mapping[str, Any]) -> bytes:
    """Return what sorts a request among those whose prompts begin like its own.

    Digests of consecutive pieces: requests that begin alike have keys that begin alike, and a key
    is small whatever the request is.
    """
    found = [body[name] for name in _FIELDS if body.get(name) is not None]
    salt = body.get("cache_salt")
    text = msgspec.json.encode([salt, *found])[: _PIECE_CHARS * _MAX_PIECES]
    pieces = (text[i : i + _PIECE_CHARS] for i in range(0, len(text), _PIECE_CHARS))
    return b"".join(blake2b(piece, digest_size=_DIGEST_BYTES).digest() for piece in pieces)
