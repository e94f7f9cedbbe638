"""Chunked local attention: a token attends to the tokens before it in its own chunk."""

from __future__ import annotations

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashList, KVCacheBlock
from vllm.v1.core.managers.base import SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, KVCacheSpec


class ChunkedLocalAttentionManager(SingleTypeKVCacheManager):
    """Tables of a group that needs only the current chunk."""

    def __init__(
        self,
        kv_cache_spec: ChunkedLocalAttentionSpec,
        block_pool: BlockPool,
        enable_caching: bool,
        kv_cache_group_id: int,
        scheduler_block_size: int,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
        max_admission_blocks_per_request: int | None = None,
    ) -> None:
        super().__init__(
            kv_cache_spec,
            block_pool,
            enable_caching,
            kv_cache_group_id,
            scheduler_block_size,
            dcp_world_size,
            pcp_world_size,
            max_admission_blocks_per_request,
        )
        self.attention_chunk_size = kv_cache_spec.attention_chunk_size

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Return the tokens in the chunks before the next token's.

        chunk 4, 6 computed:   0 1 2 3 | 4 5 [6] 7      skipped 4
        """
        return num_computed_tokens // self.attention_chunk_size * self.attention_chunk_size

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: BlockHashList,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: BlockPool,
        kv_cache_spec: KVCacheSpec,
        drop_eagle_block: bool,
        alignment_tokens: int,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
    ) -> tuple[list[KVCacheBlock], ...]:
        """Take the blocks of finished chunks for granted, then walk right until a miss."""
        assert isinstance(kv_cache_spec, ChunkedLocalAttentionSpec)
        block_size = kv_cache_spec.block_size
        assert not drop_eagle_block, "Chunked local attention has no drafter support."
        assert dcp_world_size == 1
        assert pcp_world_size == 1
        assert block_size == alignment_tokens, (
            "Chunked local attention needs groups of one block size to cache prefixes."
        )
        max_length = max(max_length, 0)
        chunk_size = kv_cache_spec.attention_chunk_size
        num_granted = max_length // chunk_size * chunk_size // block_size
        hit_blocks = tuple([block_pool.null_block] * num_granted for _ in kv_cache_group_ids)
        for i in range(num_granted, max_length // block_size):
            cached_blocks = block_pool.get_cached_block(block_hashes[i], kv_cache_group_ids)
            if cached_blocks is None:
                break
            for group_blocks, block in zip(hit_blocks, cached_blocks, strict=True):
                group_blocks.append(block)
        return hit_blocks
