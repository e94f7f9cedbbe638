"""Chunked local attention: finished chunks are granted, the current one must be there."""

import random

import pytest

from tests.v1.core.cache_helpers import ids
from tests.v1.core.specs import chunked
from tests.v1.core.whole_block.lookup_table import find, make_manager
from vllm.v1.core.kv_cache_utils import KVCacheBlock

T, F = True, False


@pytest.mark.parametrize(
    ("is_cached", "tail", "expected"),
    [
        ([T], 0, 1),
        ([T], 1, 1),
        ([T, F], 0, 2),
        ([T, F], 1, 2),
        ([F, F], 0, 2),
        ([F], 1, 0),
    ],
)
def test_lookup(is_cached: list[bool], tail: int, expected: int) -> None:
    manager, pool = make_manager(chunked(block_size=2, attention_chunk_size=4))
    assert len(find(manager, pool, is_cached, tail)) == expected


@pytest.mark.parametrize(
    ("end", "tail", "expected"),
    [
        ([T], 0, 9),
        ([T, F], 0, 10),
        ([T, F], 1, 10),
        ([T, F, T], 0, 11),
        ([T, F, F], 0, 10),
        ([T, F, F, T], 1, 12),
    ],
)
def test_lookup_behind_random_chunks(end: list[bool], tail: int, expected: int) -> None:
    rng = random.Random(0)
    manager, pool = make_manager(chunked(block_size=2, attention_chunk_size=4))
    for _ in range(20):
        is_cached = [rng.random() < 0.5 for _ in range(8)] + end
        found = find(manager, pool, is_cached, tail)
        assert len(found) == expected


def test_drafters_and_mixed_block_sizes_are_bugs() -> None:
    manager, pool = make_manager(chunked(block_size=2, attention_chunk_size=4))
    with pytest.raises(AssertionError):
        find(manager, pool, [T], drop_eagle_block=True)
    with pytest.raises(AssertionError):
        find(manager, pool, [T], alignment_tokens=4)


def test_remove_skipped_blocks() -> None:
    manager, _ = make_manager(chunked(block_size=2, attention_chunk_size=4))
    table = [KVCacheBlock(1000 + i) for i in range(10)]
    manager.req_to_blocks["test"] = table
    for num_computed, num_null in ((0, 0), (4, 2), (6, 2), (12, 6)):
        manager.remove_skipped_blocks("test", num_computed)
        assert ids(table) == [0] * num_null + list(range(1000 + num_null, 1010))
