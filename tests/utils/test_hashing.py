import hashlib
import pickle

import cbor2
import pytest
import xxhash as xxhash_lib

from vllm.exceptions import ConfigError
from vllm.utils.hashing import get_hash_fn_by_name, sha256, sha256_cbor, xxhash, xxhash_cbor
from vllm.utils.mem_constants import GiB_bytes

VALUES = [None, 7, "text", b"bytes", (b"\x00" * 32, (1, 2, 3), None), (b"p", (1,), ("lora", 4))]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_definitions(value):
    pickled = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    encoded = cbor2.dumps(value, canonical=True)
    assert sha256(value) == hashlib.sha256(pickled).digest()
    assert sha256_cbor(value) == hashlib.sha256(encoded).digest()
    assert xxhash(value) == xxhash_lib.xxh3_128_digest(pickled)
    assert xxhash_cbor(value) == xxhash_lib.xxh3_128_digest(encoded)


@pytest.mark.parametrize("fn", [sha256, sha256_cbor, xxhash, xxhash_cbor])
def test_distinct_values_differ(fn):
    digests = [fn(value) for value in VALUES]
    assert len(set(digests)) == len(VALUES)
    assert all(isinstance(digest, bytes) for digest in digests)


def test_by_name():
    assert get_hash_fn_by_name("sha256") is sha256
    assert get_hash_fn_by_name("sha256_cbor") is sha256_cbor
    assert get_hash_fn_by_name("xxhash") is xxhash
    assert get_hash_fn_by_name("xxhash_cbor") is xxhash_cbor


@pytest.mark.parametrize("name", ["", "md5", "SHA256"])
def test_unknown_name(name):
    with pytest.raises(ValueError, match="sha256_cbor") as error:
        get_hash_fn_by_name(name)
    assert isinstance(error.value, ConfigError)


def test_gib():
    assert GiB_bytes == 1024**3
