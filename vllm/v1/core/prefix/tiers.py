"""The order in which free blocks are reused."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Protocol

from vllm.v1.core.free_block_queue import FreeKVCacheBlockQueue, KVCacheBlock


class Tier(IntEnum):
    """Where a free block stands; lower tiers are reused first.

    SCRATCH   nothing can hit it: never hashed, or its keys are gone
    COLD      hashed, but superseded by something better, or on trial
    REGULAR   hashed, in LRU order
    PINNED    the windows at which long prompts paused, if pins are on; counted as free
    """

    SCRATCH = 0
    COLD = 1
    REGULAR = 2
    PINNED = 3


class TieredBlocks(Protocol):
    """The free blocks of a pool, as pins and checkpoints see them."""

    @property
    def tiers(self) -> Sequence[FreeKVCacheBlockQueue]:
        """The free blocks by tier, the next to be reused first."""
        ...

    def get_num_free_blocks(self) -> int:
        """Return how many blocks allocation can take."""
        ...

    def replace(self, blocks: Iterable[KVCacheBlock], *, even_if_unchanged: bool = False) -> None:
        """Move free blocks to the tier they belong in now, as its youngest."""
        ...
