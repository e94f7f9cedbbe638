"""Which checkpoints allocation reaches last (``VLLM_PIN_SWA_TOKENS`` with hits at one unit)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vllm.v1.core.free_block_queue import KVCacheBlock

if TYPE_CHECKING:
    from vllm.v1.core.unit_block_pool import Checkpoint


class PinnedCheckpoints:
    """The pins of a pool, and how many blocks they may cover.

        reused first   SCRATCH | COLD | REGULAR | PINNED: oldest ... youngest   reused last
                                                  <- demoted, a checkpoint at a time

    A checkpoint is atomic, so it is pinned as a whole: a block is pinned while any pinned
    checkpoint holds it. Pins are capped: a tier without a bound flushes everything else. All
    operations are O(1) per block.

    Owns: the pins. Where blocks stand, and which pins give way, is the pool's business.

    Args:
        max_blocks: Most blocks pinned at once.
    """

    __slots__ = ("_num_pins", "_records", "max_blocks")

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        # In the order of pinning, oldest first.
        self._records: dict[Checkpoint, None] = {}
        # Block id -> pinned checkpoints that hold it.
        self._num_pins: dict[int, int] = {}

    def __iter__(self) -> Iterator[Checkpoint]:
        """Iterate over the pinned checkpoints, oldest pin first."""
        return iter(self._records)

    def __contains__(self, record: Checkpoint) -> bool:
        return record in self._records

    def holds(self, block: KVCacheBlock) -> bool:
        """Whether a pinned checkpoint needs the block."""
        return block.block_id in self._num_pins

    def num_pins_by_block(self) -> dict[int, int]:
        """Return how many pins cover each pinned block, by id; for checks."""
        return dict(self._num_pins)

    def can_hold(self, record: Checkpoint) -> bool:
        """Whether the cap allows a checkpoint of that size at all."""
        return sum(1 for _ in record.all_blocks()) <= self.max_blocks

    def num_excess(self, record: Checkpoint) -> int:
        """Return how many pinned blocks would be too many if a checkpoint joined."""
        new = sum(1 for block in record.all_blocks() if not self.holds(block))
        return len(self._num_pins) + new - self.max_blocks

    def add(self, record: Checkpoint) -> None:
        """Pin a checkpoint; one that is pinned becomes the youngest."""
        if record in self._records:
            del self._records[record]
        else:
            for block in record.all_blocks():
                self._num_pins[block.block_id] = self._num_pins.get(block.block_id, 0) + 1
        self._records[record] = None

    def discard(self, record: Checkpoint) -> bool:
        """Forget a checkpoint's pin; False if it had none."""
        if record not in self._records:
            return False
        del self._records[record]
        for block in record.all_blocks():
            left = self._num_pins[block.block_id] - 1
            if left:
                self._num_pins[block.block_id] = left
            else:
                del self._num_pins[block.block_id]
        return True
