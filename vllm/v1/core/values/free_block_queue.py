"""Blocks, and the intrusive list of the free ones (take, return, unlink: all O(1))."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NewType

from vllm.utils.hashing import BlockHash

BlockHashWithGroupId = NewType("BlockHashWithGroupId", bytes)


@dataclass(slots=True, eq=False)
class KVCacheBlock:
    """One slot of the block pool.

    Compared by identity; its owner is the BlockPool.

    Attributes:
        block_id: 0 to the pool's size - 1; sentinels of a queue have -1.
        ref_cnt: Tables, copies and transfers that hold it (I2); 0 for the null block.
        prev_free_block: Neighbour in the free queue, None outside.
        next_free_block: Likewise.
        is_null: Whether it is the placeholder that is never read or written.
        group_id: Group of the keys it carries; of no meaning without any.
        key: Hash of the shortest prefix whose last rows it holds; None: nothing of a dense group
            is cached in it.
        more_keys: Those of longer ones, ascending in position; None: there are none. Apart, because
            where a block is a unit a prompt would make hundreds of lists of one.
    """

    block_id: int
    ref_cnt: int = 0
    _block_hash: BlockHashWithGroupId | None = None
    prev_free_block: KVCacheBlock | None = None
    next_free_block: KVCacheBlock | None = None
    is_null: bool = False
    group_id: int = -1
    key: BlockHash | None = None
    more_keys: list[BlockHash] | None = None

    @property
    def block_hash(self) -> BlockHashWithGroupId | None:
        """The key under which the block is cached, None if it is not."""
        return self._block_hash

    @block_hash.setter
    def block_hash(self, block_hash: BlockHashWithGroupId) -> None:
        assert self._block_hash is None, (
            f"Block {self.block_id} already has a hash: reset it before setting another."
        )
        self._block_hash = block_hash

    def reset_hash(self) -> None:
        """Forget what is cached in it."""
        self._block_hash = self.key = self.more_keys = None

    def __repr__(self) -> str:
        # Neighbours by id: following the links would print the whole queue.
        before = self.prev_free_block.block_id if self.prev_free_block else None
        after = self.next_free_block.block_id if self.next_free_block else None
        return (
            f"KVCacheBlock(block_id={self.block_id}, ref_cnt={self.ref_cnt}, "
            f"_block_hash={self._block_hash!r}, prev_free_block={before}, next_free_block={after})"
        )


class FreeKVCacheBlockQueue:
    """The free blocks in the order they are reused.

    Intrusive and doubly linked: the links live in the blocks, so that a hit takes a block out of
    the middle in O(1) and nothing is allocated. Two sentinels spare the ends special cases.

        head(-1) <-> next to be reused <-> ... <-> last freed <-> tail(-1)

    Args:
        blocks: The initial blocks, in order.
    """

    __slots__ = ("fake_free_list_head", "fake_free_list_tail", "num_free_blocks")

    def __init__(self, blocks: Sequence[KVCacheBlock]) -> None:
        self.num_free_blocks = 0
        self.fake_free_list_head = KVCacheBlock(block_id=-1)
        self.fake_free_list_tail = KVCacheBlock(block_id=-1)
        self.fake_free_list_head.next_free_block = self.fake_free_list_tail
        self.fake_free_list_tail.prev_free_block = self.fake_free_list_head
        self.append_n(blocks)

    def popleft(self) -> KVCacheBlock:
        """Take the first block.

        Raises:
            ValueError: The queue is empty.
        """
        head = self.fake_free_list_head
        block = head.next_free_block
        if block is None or block is self.fake_free_list_tail:
            assert self.num_free_blocks == 0, (
                f"The queue counts {self.num_free_blocks} free blocks but is empty."
            )
            raise ValueError("No free blocks available")
        after = block.next_free_block
        if after is None:
            raise RuntimeError(f"Free block {block.block_id} has no successor.")
        head.next_free_block = after
        after.prev_free_block = head
        block.prev_free_block = block.next_free_block = None
        self.num_free_blocks -= 1
        return block

    def peekleft(self) -> KVCacheBlock | None:
        """Return the first block and leave it there; None if the queue is empty."""
        return self.fake_free_list_head.next_free_block if self.num_free_blocks else None

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """Take the first ``n`` blocks, which must be there."""
        if n == 0:
            return []
        assert 0 < n <= self.num_free_blocks, (
            f"{n} free blocks were asked for, {self.num_free_blocks} are there."
        )
        blocks: list[KVCacheBlock] = []
        append = blocks.append
        # The count was checked, so every link is there. A prompt takes thousands of blocks: this
        # loop is the larger part of what admitting it costs.
        block: Any = self.fake_free_list_head.next_free_block
        for _ in range(n):
            append(block)
            after = block.next_free_block
            block.prev_free_block = block.next_free_block = None
            block = after
        self.fake_free_list_head.next_free_block = block
        block.prev_free_block = self.fake_free_list_head
        self.num_free_blocks -= n
        return blocks

    def remove(self, block: KVCacheBlock) -> None:
        """Take a block out, wherever it stands.

        Raises:
            RuntimeError: The block is in no queue.
        """
        before, after = block.prev_free_block, block.next_free_block
        if before is None or after is None:
            raise RuntimeError(f"Block {block.block_id} is in no free queue: {block}")
        before.next_free_block = after
        after.prev_free_block = before
        block.prev_free_block = block.next_free_block = None
        self.num_free_blocks -= 1

    def append(self, block: KVCacheBlock) -> None:
        """Put a block last.

        Raises:
            RuntimeError: The tail sentinel has lost its link.
        """
        tail = self.fake_free_list_tail
        last = tail.prev_free_block
        if last is None:
            raise RuntimeError("The tail of the free queue has no predecessor.")
        last.next_free_block = block
        block.prev_free_block = last
        block.next_free_block = tail
        tail.prev_free_block = block
        self.num_free_blocks += 1

    def append_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Put blocks last, in the order given."""
        if not blocks:
            return
        last = self.fake_free_list_tail.prev_free_block
        assert last is not None, "The tail of the free queue has no predecessor."
        self._link(last, blocks, self.fake_free_list_tail)

    def prepend_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Put blocks first, in the order given: the next ones to be reused."""
        if not blocks:
            return
        first = self.fake_free_list_head.next_free_block
        assert first is not None, "The head of the free queue has no successor."
        self._link(self.fake_free_list_head, blocks, first)

    def _link(
        self, before: KVCacheBlock, blocks: Sequence[KVCacheBlock], after: KVCacheBlock
    ) -> None:
        """Link blocks between two neighbours."""
        for block in blocks:
            block.prev_free_block = before
            before.next_free_block = block
            before = block
        before.next_free_block = after
        after.prev_free_block = before
        self.num_free_blocks += len(blocks)

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        """Return the free blocks in order; for tests and checks, O(n)."""
        blocks = []
        block = self.fake_free_list_head.next_free_block
        while block is not None and block is not self.fake_free_list_tail:
            blocks.append(block)
            block = block.next_free_block
        return blocks
