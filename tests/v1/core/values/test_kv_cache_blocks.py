"""Blocks by group."""

import pytest

from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock
from vllm.v1.core.values.kv_cache_blocks import KVCacheBlocks


def test_blocks() -> None:
    null = KVCacheBlock(0, is_null=True)
    hashed = KVCacheBlock(4)
    hashed.block_hash = BlockHashWithGroupId(b"h")
    blocks = KVCacheBlocks(([KVCacheBlock(1), hashed], [null, KVCacheBlock(2)]))
    more = KVCacheBlocks(((), [KVCacheBlock(3)]))
    assert (blocks + more).get_block_ids() == ([1, 4], [0, 2, 3])
    assert blocks.get_unhashed_block_ids_all_groups() == [[1], [2]]
    with pytest.raises(AssertionError):
        blocks.get_unhashed_block_ids()
    assert KVCacheBlocks(([KVCacheBlock(1), hashed],)).get_unhashed_block_ids() == [1]
    empty = blocks.new_empty()
    assert empty.get_block_ids() == ([], [])
    assert empty.get_block_ids(allow_none=True) is None
    assert blocks.get_block_ids(allow_none=True) == ([1, 4], [0, 2])
