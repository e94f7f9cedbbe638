"""Free blocks that something can hit, in three queues by what is known of it."""

from collections.abc import Sequence
from typing import Protocol

from vllm.v1.core.retention.queues import ChooseVictim, Standing
from vllm.v1.core.values.free_block_queue import FreeKVCacheBlockQueue, KVCacheBlock


class RankedIndex(Protocol):
    """What the tier asks of the index of cached prefixes."""

    def standings(self, blocks: Sequence[KVCacheBlock]) -> Sequence[Standing]:
        """Return what is known of blocks."""
        ...

    def note_hit(self, block: KVCacheBlock) -> None:
        """Take note that somebody came back for a block."""
        ...


class RegularTier:
    """The tier of useful free blocks; the policy says which goes first.

    Has the verbs of a queue, so that the pool need not tell it from the other tiers.

    Owns: the queues, in which of them each block stands, the stamp of its last use.

    Args:
        num_blocks: Blocks of the pool.
        index: Knows what is known of blocks, and hears which are hit.
        choose_victim: Says which queue gives its oldest or newest block next.
    """

    def __init__(
        self,
        num_blocks: int,
        index: RankedIndex,
        choose_victim: ChooseVictim,
    ) -> None:
        self._choose_victim = choose_victim
        self._capacity = num_blocks
        self._queues = tuple(FreeKVCacheBlockQueue([]) for _ in Standing)
        self._new = self._queues[Standing.NEW]
        self._standings_of = index.standings
        # Of a block that is taken out because somebody came back for it.
        self.note_hit = index.note_hit
        # By block id; of no meaning for a block that stands elsewhere.
        self._placed = [Standing.NEW] * num_blocks
        self._stamps = [0] * num_blocks
        self._now = 0
        self.num_free_blocks = 0

    def append(self, block: KVCacheBlock) -> None:
        """Let a block join as the one used last."""
        self.append_n((block,))

    def append_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Let blocks join, the last as the one used last."""
        placed, stamps, now = self._placed, self._stamps, self._now
        standings = self._standings_of(blocks)
        for block, standing in zip(blocks, standings, strict=True):
            now += 1
            stamps[block.block_id] = now
            placed[block.block_id] = standing
        self._now = now
        self.num_free_blocks += len(blocks)
        if standings and standings.count(standings[0]) == len(standings):
            self._queues[standings[0]].append_n(blocks)
            return
        for known, queue in zip(Standing, self._queues, strict=True):
            queue.append_n([b for b, s in zip(blocks, standings, strict=True) if s is known])

    @property
    def proven_share(self) -> float:
        """The part of the blocks that were hit or came back, 0..1."""
        num_free = self.num_free_blocks
        return 1 - self._new.num_free_blocks / num_free if num_free else 0.0

    def remove(self, block: KVCacheBlock) -> None:
        """Take a block out."""
        self._queues[self._placed[block.block_id]].remove(block)
        self.num_free_blocks -= 1

    def popleft(self) -> KVCacheBlock:
        """Take the next victim; there is one."""
        standing, is_newest = self._choose_victim(self, self._capacity, self._now)
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
