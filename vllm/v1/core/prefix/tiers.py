"""The order in which free blocks are reused."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import Protocol

from vllm.v1.core.free_block_queue import FreeKVCacheBlockQueue, KVCacheBlock


class Tier(IntEnum):
    """Where a free block stands; lower tiers are reused first.

    SCRATCH   nothing can hit it: never hashed, or its keys are gone
    FILLER    spare checkpoints on a grid, the youngest first
    SPARE     spare checkpoints near prompts' ends: nobody asked for them, nobody hit them yet
    COLD      hashed, but superseded by something better
    WARM      spare checkpoints of a kind that is hit as often as those that were asked for
    REGULAR   hashed; the eviction rule in force says which goes first
    LIVE      checkpoints that running requests made or resumed at
    PINNED    the windows at which long prompts paused, if pins are on; counted as free
    """

    SCRATCH = 0
    FILLER = 1
    SPARE = 2
    COLD = 3
    WARM = 4
    REGULAR = 5
    LIVE = 6
    PINNED = 7


class TieredBlocks(Protocol):
    """The free blocks of a pool, as pins and checkpoints see them."""

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
