"""Full attention: every token's entry is kept, whatever its compression."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, ClassVar

from vllm.v1.core.managers.base import SingleTypeKVCacheManager

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import BlockHashList, KVCacheBlock
    from vllm.v1.kv_cache_interface import KVCacheSpec


class FullAttentionManager(SingleTypeKVCacheManager):
    """Tables of a group that needs all blocks from the first to the last."""

    is_downward_closed: ClassVar[bool] = True
    drops_skipped_blocks: ClassVar[bool] = False

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
        """Walk left to right until a miss, drop for the drafter, align down."""
        block_size = kv_cache_spec.block_size * dcp_world_size * pcp_world_size
        rows: list[list[KVCacheBlock]] = []
        for block_hash in islice(block_hashes, max(max_length, 0) // block_size):
            cached_blocks = block_pool.get_cached_block(block_hash, kv_cache_group_ids)
            if cached_blocks is None:
                break
            rows.append(cached_blocks)
        num_blocks = len(rows)
        if drop_eagle_block and num_blocks:
            num_blocks -= 1
        while num_blocks * block_size % alignment_tokens:
            num_blocks -= 1
        return tuple([row[i] for row in rows[:num_blocks]] for i in range(len(kv_cache_group_ids)))

    def get_num_common_prefix_blocks(self, request_id: str) -> int:
        """Return how many leading blocks are held by every request that has blocks."""
        num_requests = len(self.req_to_blocks)
        table = self.req_to_blocks.get(request_id, ())
        if num_requests == 1:
            # Asked in every step: a request that runs alone must not pay for its whole context.
            return len(table)
        num_common = 0
        for block in table:
            if block.ref_cnt != num_requests:
                break
            num_common += 1
        return num_common
