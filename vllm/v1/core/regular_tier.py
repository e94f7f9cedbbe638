"""Free blocks that something can hit, in three queues by what is known of it."""

from collections.abc import Sequence

from vllm.v1.core.free_block_queue import FreeKVCacheBlockQueue, KVCacheBlock
from vllm.v1.core.policy.eviction import Rule, Standing, choose_victim


class RegularTier:
    """The tier of useful free blocks; the rule in force says which goes first.

    Has the verbs of a queue, so that the pool need not tell it from the other tiers.

    Owns: the queues, each block's standing and the stamp of its last use.

    Args:
        num_blocks: Blocks of the pool.
    """

    def __init__(self, num_blocks: int) -> None:
        self.rule = Rule.LRU
        self._capacity = num_blocks
        self._queues = tuple(FreeKVCacheBlockQueue([]) for _ in Standing)
        # By block id. A free block's standing says in which queue it is.
        self._standings = [Standing.NEW] * num_blocks
        self._stamps = [0] * num_blocks
        self._now = 0
        self.num_free_blocks = 0

    def standing_of(self, block: KVCacheBlock) -> Standing:
        """Return what is known of a block, free or held."""
        return self._standings[block.block_id]

    def set_standing(self, block: KVCacheBlock, standing: Standing) -> None:
        """Note what is known of a block that is in no queue."""
        self._standings[block.block_id] = standing

    def append(self, block: KVCacheBlock) -> None:
        """Let a block join as the one used last."""
        self._now += 1
        self.num_free_blocks += 1
        self._stamps[block.block_id] = self._now
        self._queues[self._standings[block.block_id]].append(block)

    def append_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Let blocks join, the last as the one used last."""
        standings, stamps, now = self._standings, self._stamps, self._now
        members: tuple[list[KVCacheBlock], ...] = ([], [], [])
        for block in blocks:
            now += 1
            stamps[block.block_id] = now
            members[standings[block.block_id]].append(block)
        self._now = now
        self.num_free_blocks += len(blocks)
        for queue, joined in zip(self._queues, members, strict=True):
            queue.append_n(joined)

    def remove(self, block: KVCacheBlock) -> None:
        """Take a block out."""
        self._queues[self._standings[block.block_id]].remove(block)
        self.num_free_blocks -= 1

    def popleft(self) -> KVCacheBlock:
        """Take the next victim; there is one."""
        standing, is_newest = choose_victim(self.rule, self, self._capacity, self._now)
        queue = self._queues[standing]
        self.num_free_blocks -= 1
        if not is_newest:
            return queue.popleft()
        block = queue.fake_free_list_tail.prev_free_block
        assert block is not None
        queue.remove(block)
        return block

    # ---- for choose_victim -------------------------------------------------------------------

    def size(self, standing: Standing) -> int:
        """Return how many blocks have a standing."""
        return self._queues[standing].num_free_blocks

    def oldest(self, standing: Standing) -> int:
        """Return the stamp of a queue's first block."""
        block = self._queues[standing].fake_free_list_head.next_free_block
        assert block is not None
        return self._stamps[block.block_id]

    def newest(self, standing: Standing) -> int:
        """Return the stamp of a queue's last block."""
        block = self._queues[standing].fake_free_list_tail.prev_free_block
        assert block is not None
        return self._stamps[block.block_id]

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        """Return all blocks, the one used last at the end; for tests and checks."""
        blocks = [block for queue in self._queues for block in queue.get_all_free_blocks()]
        return sorted(blocks, key=lambda block: self._stamps[block.block_id])
