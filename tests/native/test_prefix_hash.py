"""The native chain of hashes: the bytes of the Python one, or no chain at all."""

import random

import pytest

from vllm.native.prefix_hash import find_hash_chain
from vllm.utils.hashing import sha256, sha256_cbor


def hash_in_python(parent: bytes, token_ids: list[int], block_size: int) -> list[bytes]:
    hashes: list[bytes] = []
    for begin in range(0, len(token_ids), block_size):
        parent = sha256((parent, tuple(token_ids[begin : begin + block_size]), None))
        hashes.append(parent)
    return hashes


@pytest.mark.parametrize("block_size", [4, 5, 16, 32, 53, 54, 128, 1000])
def test_hashes_are_those_of_python(block_size: int) -> None:
    chain = find_hash_chain(sha256, block_size)
    assert chain is not None
    rng = random.Random(block_size)
    bounds = (256, 257, 65_536, 65_537, 200_000, 2**31)
    for num_blocks in range(1, 9):
        parent = rng.randbytes(32)
        token_ids = [rng.randrange(rng.choice(bounds)) for _ in range(num_blocks * block_size)]
        assert chain(parent, token_ids) == hash_in_python(parent, token_ids, block_size)


def test_negative_token_ids() -> None:
    chain = find_hash_chain(sha256, 4)
    assert chain is not None
    token_ids = [-1, -256, -(2**31), 7]
    assert chain(bytes(32), token_ids) == hash_in_python(bytes(32), token_ids, 4)


def test_what_it_cannot_write_is_left_to_python() -> None:
    chain = find_hash_chain(sha256, 4)
    assert chain is not None
    assert chain(bytes(32), [1, 2, 3, 2**31]) is None
    assert chain(b"a short parent", [1, 2, 3, 4]) is None


def test_other_functions_and_tiny_blocks_have_no_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_hash_chain(sha256_cbor, 16) is None
    assert find_hash_chain(sha256, 3) is None
    monkeypatch.setenv("VLLM_NATIVE", "0")
    assert find_hash_chain(sha256, 16) is None
