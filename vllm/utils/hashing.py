"""Hash functions over any Python value, by name.

The pickle forms are quick but tied to Python; the CBOR forms are the same in every language and
process. sha256 is collision-resistant, xxhash is not: tenants who can choose their prompts could
make collisions with it.
"""

import hashlib
import pickle
from collections.abc import Callable
from typing import Any, NewType

from vllm.exceptions import ConfigError

HashFn = Callable[[Any], bytes]
# Of a block of tokens and all before it: equal hashes mean equal prefixes.
BlockHash = NewType("BlockHash", bytes)

_dumps = pickle.dumps
_PROTOCOL = pickle.HIGHEST_PROTOCOL
_sha256 = hashlib.sha256


def sha256(obj: Any) -> bytes:
    """Return the SHA-256 digest of an object's pickle (highest protocol)."""
    return _sha256(_dumps(obj, _PROTOCOL)).digest()


def _cbor(obj: Any) -> bytes:
    # Optional: only the CBOR hash functions need it.
    import cbor2  # noqa: PLC0415

    encoded: bytes = cbor2.dumps(obj, canonical=True)
    return encoded


def sha256_cbor(obj: Any) -> bytes:
    """Return the SHA-256 digest of an object's canonical CBOR."""
    return _sha256(_cbor(obj)).digest()


def _xxh128(data: bytes) -> bytes:
    # Optional: only the xxhash functions need it.
    try:
        import xxhash  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(
            "The xxhash hash functions need the package xxhash: install it, or use sha256."
        ) from error
    digest: bytes = xxhash.xxh3_128_digest(data)
    return digest


def xxhash(obj: Any) -> bytes:
    """Return the 128-bit XXH3 digest of an object's pickle (highest protocol)."""
    return _xxh128(_dumps(obj, _PROTOCOL))


def xxhash_cbor(obj: Any) -> bytes:
    """Return the 128-bit XXH3 digest of an object's canonical CBOR."""
    return _xxh128(_cbor(obj))


_HASH_FNS: dict[str, HashFn] = {
    "sha256": sha256,
    "sha256_cbor": sha256_cbor,
    "xxhash": xxhash,
    "xxhash_cbor": xxhash_cbor,
}


def get_hash_fn_by_name(name: str) -> HashFn:
    """Return a hash function by its name.

    Raises:
        ConfigError: (a ValueError) The name is unknown.
    """
    hash_fn = _HASH_FNS.get(name)
    if hash_fn is None:
        raise ConfigError(
            f"Hash function {name!r} is unknown: use one of {', '.join(sorted(_HASH_FNS))}."
        )
    return hash_fn
