"""Window blocks that allocation reaches last (``VLLM_PIN_SWA_TOKENS``)."""

from __future__ import annotations

from collections.abc import Iterable

from vllm import envs
from vllm.v1.core.free_block_queue import FreeKVCacheBlockQueue, KVCacheBlock
from vllm.v1.kv_cache_interface import KVCacheConfig


def pinned_share(kv_cache_config: KVCacheConfig) -> float:
    """Return the share of a pool that pins may hold: the config's, else the environment's."""
    share = kv_cache_config.prefix_cache_pinned_share
    return envs.VLLM_PIN_MAX_SHARE if share is None else share


class PinnedTier:
    """Which blocks are pinned, and the queue of those that are free.

        reused first   free queue: scratch ... LRU | pinned queue: oldest ... newest   reused last
                                                   <- demote_n moves the oldest over

    What is pinned are the windows at which long prompts paused, so that they resume there. A pin
    outlives hits: a touched block leaves the queue and comes back to its end. Pins are capped: a
    tier without a bound flushes everything else. All operations are O(1) per block.

    Owns: the pins and the pinned queue; ref counts and hashes stay with the pool.

    Args:
        free_queue: Where blocks go that lose their pin while free.
        max_pinned: Most blocks pinned at once.
        min_drop_blocks: Blocks a window must drop at once for its next ones to be pinned.
    """

    __slots__ = ("_free_queue", "_is_free", "max_pinned", "min_drop_blocks", "queue")

    def __init__(
        self, free_queue: FreeKVCacheBlockQueue, max_pinned: int, min_drop_blocks: int
    ) -> None:
        self.max_pinned = max_pinned
        self.min_drop_blocks = min_drop_blocks
        self.queue = FreeKVCacheBlockQueue([])
        self._free_queue = free_queue
        # Pinned block -> whether it stands in the queue; oldest pin first.
        self._is_free: dict[KVCacheBlock, bool] = {}

    def __len__(self) -> int:
        return len(self._is_free)

    def __contains__(self, block: KVCacheBlock) -> bool:
        return block in self._is_free

    def pinned_blocks(self) -> list[KVCacheBlock]:
        """Return the pinned blocks, the oldest pin first."""
        return list(self._is_free)

    def free_block_ids(self) -> set[int]:
        """Return the ids of the pinned blocks it takes for free; for checks."""
        return {block.block_id for block, is_free in self._is_free.items() if is_free}

    def pin(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Pin held blocks; the oldest pins give way. More than fit are not pinned at all.

        A block without a hash serves no hit and is left out.
        """
        new = [b for b in blocks if b.block_hash is not None and not b.is_null]
        if len(new) > self.max_pinned:
            return
        for block in new:
            # Pinned again: young again.
            self._is_free.pop(block, None)
        excess = len(self._is_free) + len(new) - self.max_pinned
        if excess > 0:
            excess -= self.demote_n(excess)
            # The rest is held by requests: those lose the pin only.
            for block in self.pinned_blocks()[:excess]:
                del self._is_free[block]
        for block in new:
            assert block.ref_cnt > 0
            self._is_free[block] = False

    def demote_n(self, num_blocks: int) -> int:
        """Unpin the free blocks that were freed first; they become the youngest of the free queue.

        Returns:
            How many there were, at most ``num_blocks``.
        """
        demoted = self.queue.popleft_n(min(num_blocks, self.queue.num_free_blocks))
        for block in demoted:
            del self._is_free[block]
        self._free_queue.append_n(demoted)
        return len(demoted)

    def on_freed(self, blocks: list[KVCacheBlock]) -> list[KVCacheBlock]:
        """Queue the pinned ones among blocks nobody holds any more; return the others."""
        pinned = [block for block in blocks if block in self._is_free]
        if not pinned:
            return blocks
        for block in pinned:
            self._is_free[block] = True
        self.queue.append_n(pinned)
        return [block for block in blocks if block not in self._is_free]

    def on_touched(self, block: KVCacheBlock) -> bool:
        """Take a free block that is held again out of the queue; False if it does not stand there.

        The pin stays.
        """
        if not self._is_free.get(block, False):
            return False
        self._is_free[block] = False
        self.queue.remove(block)
        return True

    def unpin(self, block: KVCacheBlock) -> None:
        """Forget a block's pin: its contents are of no use any more."""
        if self._is_free.pop(block, False):
            self.queue.remove(block)
            self._free_queue.prepend_n([block])

    def clear(self) -> None:
        """Forget all pins."""
        self.demote_n(self.queue.num_free_blocks)
        self._is_free.clear()
