"""The order in which free blocks are reused."""

from enum import IntEnum


class Tier(IntEnum):
    """Where a free block stands; lower tiers are reused first.

    SCRATCH   nothing can hit it: never hashed, or its keys are gone
    FILLER    spare checkpoints on a grid, the youngest first
    SPARE     spare checkpoints near prompts' ends: nobody asked for them, nobody hit them yet; and
              all that requests left whose prefixes are spare (``RequestOptions.is_spare``)
    COLD      hashed, but superseded by something better
    WARM      spare checkpoints of a kind that is hit as often as those that were asked for
    REGULAR   hashed; the policy says which goes first
    LIVE      checkpoints that running requests made or resumed at
    CLAIMED   what waiting requests would hit; counted as free
    PINNED    the windows at which long prompts paused, if pins are on; counted as free
    """

    SCRATCH = 0
    FILLER = 1
    SPARE = 2
    COLD = 3
    WARM = 4
    REGULAR = 5
    LIVE = 6
    CLAIMED = 7
    PINNED = 8
