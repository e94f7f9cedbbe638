"""Lookups over prompts whose blocks are cached or not by a list of flags."""

from collections.abc import Sequence
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    KVCacheBlock,
    make_block_hash_with_group_id,
)
from vllm.v1.core.single_type_kv_cache_manager import (
    SingleTypeKVCacheManager,
    get_manager_for_kv_cache_spec,
)
from vllm.v1.kv_cache_interface import KVCacheSpec


def make_manager(spec: KVCacheSpec, num_blocks: int = 100, **kw: Any) -> tuple[Any, BlockPool]:
    """Return the registered manager of a spec and its pool."""
    pool = BlockPool(num_blocks, True, spec.block_size)
    manager: SingleTypeKVCacheManager = get_manager_for_kv_cache_spec(
        spec,
        max_num_batched_tokens=8192,
        max_model_len=8192,
        **{
            "block_pool": pool,
            "enable_caching": True,
            "kv_cache_group_id": 0,
            "scheduler_block_size": spec.block_size,
            **kw,
        },
    )
    return manager, pool


def hashes(num_blocks: int) -> list[BlockHash]:
    """Return distinct hashes."""
    return [BlockHash(i.to_bytes(4, "big")) for i in range(num_blocks)]


def find(
    manager: SingleTypeKVCacheManager,
    pool: BlockPool,
    is_cached: Sequence[bool],
    tail_tokens: int = 0,
    drop_eagle_block: bool = False,
    alignment_tokens: int | None = None,
) -> list[KVCacheBlock]:
    """Look up a prompt of which blocks are cached as flagged.

    A cached block's id is its index + 10, so that a hit shows where its blocks come from.
    """
    block_hashes = hashes(len(is_cached))
    pool.cached_block_hash_to_block._cache.clear()
    for i, flag in enumerate(is_cached):
        if flag:
            pool.cached_block_hash_to_block._cache[
                make_block_hash_with_group_id(block_hashes[i], 0)
            ] = pool.blocks[i + 10]
    block_size = manager.block_size
    (found,) = manager.find_longest_cache_hit(
        block_hashes=block_hashes,
        max_length=len(is_cached) * block_size + tail_tokens,
        kv_cache_group_ids=[0],
        block_pool=pool,
        kv_cache_spec=manager.kv_cache_spec,
        drop_eagle_block=drop_eagle_block,
        alignment_tokens=block_size if alignment_tokens is None else alignment_tokens,
    )
    for i, block in enumerate(found):
        assert block.is_null or block is pool.blocks[i + 10]
    return found
