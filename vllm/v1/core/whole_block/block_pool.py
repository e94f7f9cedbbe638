"""The pool of hits at whole blocks: one queue of free blocks, whose keys are blocks' hashes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from vllm.v1.core.free_block_queue import FreeKVCacheBlockQueue, KVCacheBlock
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id
from vllm.v1.core.prefix.events import KVEventWriter
from vllm.v1.core.retention.tiers import Tier
from vllm.v1.core.tiered_pool import TieredPool
from vllm.v1.core.whole_block.hash_index import BlockHashToBlockMap, HashIndex

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_metrics import KVCacheMetricsCollector
    from vllm.v1.request import Request


class BlockPool(TieredPool):
    """All blocks of a KV cache that hits at whole blocks.

    One queue stands for all tiers but the pinned one: what no hit can find is reused from its
    front, what is cached joins its back.

    Owns: beside what every pool does, the keys of full blocks.

    Args:
        num_gpu_blocks: Blocks in all, the null block included.
        enable_caching: Whether freed blocks keep what is cached in them.
        hash_block_size: Tokens under one hash of ``Request.block_hashes``.
        enable_kv_cache_events: Whether stored and removed prefixes are recorded.
        metrics_collector: Samples block lifetimes, if given.
    """

    def __init__(
        self,
        num_gpu_blocks: int,
        enable_caching: bool,
        hash_block_size: int,
        enable_kv_cache_events: bool = False,
        metrics_collector: KVCacheMetricsCollector | None = None,
    ) -> None:
        self.hash_block_size = hash_block_size
        self.hash_index = HashIndex(hash_block_size, KVEventWriter(enable_kv_cache_events))
        super().__init__(
            num_gpu_blocks, enable_caching, self.hash_index, metrics_collector=metrics_collector
        )
        self.enable_kv_cache_events = enable_kv_cache_events
        self.kv_event_queue = self.index.events.queue

    def _lay_out_tiers(
        self,
    ) -> tuple[tuple[FreeKVCacheBlockQueue, ...], tuple[FreeKVCacheBlockQueue, ...]]:
        """Return the one queue for all tiers but the last."""
        queue, pinned = self.free_block_queue, self.pinned_queue
        return (*[queue] * Tier.PINNED, pinned), (queue, pinned)

    @property
    def cached_block_hash_to_block(self) -> BlockHashToBlockMap:
        """The keys of full blocks."""
        return self.hash_index.map

    # ---- giving back -------------------------------------------------------------------------

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock], prepend: bool = False) -> None:
        """Give blocks back; those nobody holds any more join the queue.

        Args:
            ordered_blocks: In the order in which they shall be reused.
            prepend: Reuse them before anything else, whatever is cached in them.
        """
        freed: list[KVCacheBlock] = []
        null_block = self.null_block
        for block in ordered_blocks:
            if block is null_block:
                continue
            block.ref_cnt = ref_cnt = block.ref_cnt - 1
            if ref_cnt == 0:
                freed.append(block)
        if freed:
            self._place(freed, Tier.SCRATCH if prepend else Tier.REGULAR)

    def free_unhashed_first(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """Give blocks back: those no hit can find to the queue's front, the hashed to its back.

        Args:
            ordered_blocks: In the order in which they shall be reused, on either side.
        """
        unhashed: list[KVCacheBlock] = []
        hashed: list[KVCacheBlock] = []
        null_block = self.null_block
        for block in ordered_blocks:
            if block is null_block:
                continue
            # A prompt's windows give back thousands: counted and sorted in one pass.
            block.ref_cnt = ref_cnt = block.ref_cnt - 1
            if ref_cnt == 0:
                (unhashed if block._block_hash is None else hashed).append(block)
        if unhashed:
            self._place(unhashed, Tier.SCRATCH)
        if hashed:
            self._place(hashed, Tier.REGULAR)

    def _place(self, freed: Sequence[KVCacheBlock], tier: Tier) -> None:
        """Let blocks that nobody holds join the queue, or stand under their pins."""
        if self.pins is None:
            self._join(freed, tier)
        else:
            self._enqueue(freed, [tier] * len(freed))

    def _take_lowest(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take blocks of the one queue, at most so many, with what is cached in them."""
        queue, is_watched = self.free_block_queue, self.metrics_collector is not None
        taken = queue.popleft_n(min(num_blocks, queue.num_free_blocks))
        for block in taken:
            block.ref_cnt = 1
            # The field, not the property: a prompt takes thousands of blocks.
            if is_watched or block._block_hash is not None:
                self._forget(block)
        return taken

    def _join(self, blocks: Sequence[KVCacheBlock], tier: Tier) -> None:
        """Put blocks that stand nowhere to the queue's front or back, in the order given."""
        if self.pins is not None:
            for block in blocks:
                self._tier_of[block.block_id] = tier
        self._num_free += len(blocks)
        if tier is Tier.SCRATCH:
            self.free_block_queue.prepend_n(blocks)
        else:
            self.tiers[tier].append_n(blocks)

    # ---- what is cached ----------------------------------------------------------------------

    def get_cached_block(
        self, block_hash: BlockHash, kv_cache_group_ids: Sequence[int]
    ) -> list[KVCacheBlock] | None:
        """Return one cached block per group, or None unless every group has one."""
        get_one_block = self.hash_index.map.get_one_block
        cached_blocks = []
        for group_id in kv_cache_group_ids:
            block = get_one_block(make_block_hash_with_group_id(block_hash, group_id))
            if block is None:
                return None
            cached_blocks.append(block)
        return cached_blocks

    def cache_full_blocks(
        self,
        request: Request,
        blocks: Sequence[KVCacheBlock],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        block_mask: Sequence[bool] | None = None,
    ) -> None:
        """Hash ``blocks[num_cached_blocks:num_full_blocks]`` and enter them in the index.

        Null blocks and masked ones are left out. An equal block may be cached already: both stay,
        because block ids in a request's table never change.

        Args:
            request: Whose tokens the blocks hold.
            blocks: The request's blocks of one group; those before ``num_cached_blocks`` are not
                looked at.
            num_cached_blocks: Blocks done by earlier calls.
            num_full_blocks: Blocks filled by now.
            block_size: Tokens of a block, a multiple of the pool's ``hash_block_size``.
            kv_cache_group_id: The group.
            block_mask: Entry i is for block ``num_cached_blocks + i``; None caches all.
        """
        run = range(num_cached_blocks, num_full_blocks)
        self.hash_index.cache_run(request, blocks, run, block_size, kv_cache_group_id, block_mask)
