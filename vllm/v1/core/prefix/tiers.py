"""The order in which free blocks are reused."""

from enum import IntEnum


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
