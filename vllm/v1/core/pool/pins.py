"""Which blocks allocation reaches last (``VLLM_PIN_SWA_TOKENS``)."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from vllm.v1.core.values.free_block_queue import FreeKVCacheBlockQueue, KVCacheBlock


class TieredBlocks(Protocol):
    """The free blocks of a pool, as pins see them."""

    @property
    def pinned_queue(self) -> FreeKVCacheBlockQueue:
        """The free blocks under pins, the next to be reused first."""
        ...

    def get_num_free_blocks(self) -> int:
        """Return how many blocks allocation can take."""
        ...

    def replace(self, blocks: Iterable[KVCacheBlock], *, even_if_unchanged: bool = False) -> None:
        """Move free blocks to the tier they belong in now, as its youngest."""
        ...


class Pins:
    """The pins of a pool, and how many blocks they may cover.

        reused first   SCRATCH | ... | REGULAR | LIVE | PINNED: oldest ... youngest   reused last
                                                  <- demoted, a pin at a time

    What is pinned are the windows at which long prompts paused, so that they resume there: a
    checkpoint as a whole, because it is of no use without one of its blocks, or, with hits at whole
    blocks, single blocks. A block is pinned while any pin covers it. Pins are capped: a tier
    without a bound flushes everything else. All operations are O(1) per block.

    Owns: the pins.

    Args:
        pool: Where the blocks stand.
        max_blocks: Most blocks pinned at once.
    """

    __slots__ = ("_blocks", "_pins_of", "_pool", "max_blocks")

    def __init__(self, pool: TieredBlocks, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self._pool = pool
        # What is pinned -> its blocks, oldest pin first.
        self._blocks: dict[Hashable, tuple[KVCacheBlock, ...]] = {}
        # Block id -> what is pinned and needs it.
        self._pins_of: dict[int, list[Hashable]] = {}

    def __iter__(self) -> Iterator[Hashable]:
        """Iterate over what is pinned, oldest first."""
        return iter(self._blocks)

    def __contains__(self, pinned: Hashable) -> bool:
        return pinned in self._blocks

    def holds(self, block: KVCacheBlock) -> bool:
        """Whether a pin covers the block."""
        return block.block_id in self._pins_of

    @property
    def num_blocks(self) -> int:
        """Blocks that pins cover."""
        return len(self._pins_of)

    def pin(self, wanted: Mapping[Hashable, Sequence[KVCacheBlock]]) -> bool:
        """Let allocation reach blocks last; the oldest pins give way to the cap.

        A pin outlives hits: touched blocks leave the tier and come back to its end. What is pinned
        already becomes the youngest.

        Args:
            wanted: What to pin, and the blocks of each.

        Returns:
            Whether all is pinned; if it is larger than the cap, nothing is.
        """
        blocks = {block.block_id: block for group in wanted.values() for block in group}
        if len(blocks) > self.max_blocks:
            return False
        for pinned in wanted:
            self.unpin(pinned)
        while self._num_covered_with(blocks) > self.max_blocks:
            self.unpin(self._oldest())
        for pinned, covered in wanted.items():
            self._blocks[pinned] = tuple(covered)
            for block in covered:
                self._pins_of.setdefault(block.block_id, []).append(pinned)
        self._pool.replace(blocks.values(), even_if_unchanged=True)
        return True

    def _num_covered_with(self, blocks: Mapping[int, KVCacheBlock]) -> int:
        new = sum(1 for block_id in blocks if block_id not in self._pins_of)
        return len(self._pins_of) + new

    def unpin(self, pinned: Hashable) -> None:
        """Take a pin away; its free blocks become the youngest of a lower tier."""
        self._pool.replace(self._discard(pinned))

    def forget(self, block: KVCacheBlock) -> None:
        """Drop the pins that cover a block: what is in it is gone."""
        for pinned in tuple(self._pins_of.get(block.block_id, ())):
            self._discard(pinned)

    def clear(self) -> None:
        """Forget all pins."""
        self._blocks.clear()
        self._pins_of.clear()

    def make_room(self, num_blocks: int) -> None:
        """Unpin, oldest first, until as many free blocks are not pinned."""
        queue = self._pool.pinned_queue
        while queue.num_free_blocks and (
            self._pool.get_num_free_blocks() - queue.num_free_blocks < num_blocks
        ):
            self.unpin(self._oldest())

    def _oldest(self) -> Hashable:
        """Return the pin that gives way next: of those with free blocks, the one freed first."""
        block = self._pool.pinned_queue.peekleft()
        return next(iter(self._blocks)) if block is None else self._pins_of[block.block_id][0]

    def _discard(self, pinned: Hashable) -> Sequence[KVCacheBlock]:
        """Forget a pin; returns the blocks it covered, none if it was not there."""
        blocks = self._blocks.pop(pinned, ())
        for block in blocks:
            pins = self._pins_of[block.block_id]
            pins.remove(pinned)
            if not pins:
                del self._pins_of[block.block_id]
        return blocks

    def find_faults(self) -> Iterator[str]:
        """Say where pins and blocks disagree."""
        covered: dict[int, int] = {}
        for blocks in self._blocks.values():
            for block in blocks:
                covered[block.block_id] = covered.get(block.block_id, 0) + 1
        believed = {block_id: len(pins) for block_id, pins in self._pins_of.items()}
        if covered != believed:
            yield f"pins cover the blocks {sorted(covered)}, believed are {sorted(believed)}"
