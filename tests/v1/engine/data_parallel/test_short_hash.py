"""Hashes of a prompt at once are those of its units one by one."""

import random

import pytest

from vllm.v1.engine.data_parallel.short_hash import shorten, shorten_all


@pytest.mark.parametrize("width", [8, 16, 20, 32])
def test_all_at_once_are_as_one_by_one(width: int) -> None:
    rng = random.Random(width)
    hashes = [rng.randbytes(width) for _ in range(9)]
    assert shorten_all(hashes) == [shorten(block_hash) for block_hash in hashes]
    assert all(type(short) is int for short in shorten_all(hashes))
    assert shorten_all([]) == []
