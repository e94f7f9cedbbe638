"""What a checkpoint is to the cache, and what changes that.

One enum, and one table of what every event makes of every standing. Who keeps checkpoints
(``prefix.checkpoint_store``) applies it; a policy turns a standing into a tier.

    spare checkpoints, in memory that nothing needs      those that somebody asked for

     FILLER ----------- hit, or left there again --.      .-------------------------.
     SPARE --.                                     v      |                         v
       |     '--------------------------------->  LEFT --asked for--> KEPT -----> SUPERSEDED
       '-> WARM --------------------------------->  |  <-- passed, it    ^              |
         its kind pays     SPARE, FILLER or gone <--'      goes          '- left again -'

    any of them -- prompts were seen to part there --> JUNCTION
    any but FILLER -- the only session that used it is over --> SPARE
"""

from collections.abc import Mapping
from enum import StrEnum


class CheckpointStanding(StrEnum):
    """What a checkpoint is to the cache.

    FILLER       nobody asked for it: left on a grid, in memory that nothing else needed
    SPARE        nobody asked for it: left near a prompt's end, likewise
    WARM         a spare one of a kind that is hit as often as those that were asked for
    LEFT         where a request stopped; it gives it up when it goes on, unless somebody hit it
    KEPT         asked for: it outlives the advance of the request that made it
    SUPERSEDED   where a conversation began the turn before last
    JUNCTION     where prompts were seen to part
    """

    FILLER = "filler"
    SPARE = "spare"
    WARM = "warm"
    LEFT = "left"
    KEPT = "kept"
    SUPERSEDED = "superseded"
    JUNCTION = "junction"

    @property
    def is_spare(self) -> bool:
        """Whether nobody asked for it, and nobody hit it yet."""
        return self in (self.FILLER, self.SPARE, self.WARM)


class CheckpointEvent(StrEnum):
    """What happens to a checkpoint.

    HIT           a request resumes there
    LEFT_AGAIN    another request stops there
    ASKED_FOR     another request wants it kept
    PARTED        prompts were seen to part there
    HELD          somebody holds it, by a pin
    KIND_PAYS     its kind is hit as often as those that were asked for
    SUPERSEDED    the conversation that began there has begun further on
    PASSED        its request went on; what it becomes in memory that nothing needs
    PASSED_FAR    the same, far from its prompt's end
    ENDED         the only session that used it is over
    """

    HIT = "hit"
    LEFT_AGAIN = "left again"
    ASKED_FOR = "asked for"
    PARTED = "parted"
    HELD = "held"
    KIND_PAYS = "kind pays"
    SUPERSEDED = "superseded"
    PASSED = "passed"
    PASSED_FAR = "passed far from the end"
    ENDED = "ended"


_S, _E = CheckpointStanding, CheckpointEvent
_SPARE_ONES = {
    _E.HIT: _S.LEFT,
    _E.LEFT_AGAIN: _S.LEFT,
    _E.ASKED_FOR: _S.KEPT,
    _E.PARTED: _S.JUNCTION,
}
# What is not in a row changes nothing.
TRANSITIONS: Mapping[CheckpointStanding, Mapping[CheckpointEvent, CheckpointStanding]] = {
    _S.FILLER: _SPARE_ONES,
    _S.SPARE: {**_SPARE_ONES, _E.KIND_PAYS: _S.WARM},
    _S.WARM: {**_SPARE_ONES, _E.ENDED: _S.SPARE},
    _S.LEFT: {
        _E.ASKED_FOR: _S.KEPT,
        _E.PARTED: _S.JUNCTION,
        _E.HELD: _S.KEPT,
        _E.SUPERSEDED: _S.SUPERSEDED,
        _E.PASSED: _S.SPARE,
        _E.PASSED_FAR: _S.FILLER,
        _E.ENDED: _S.SPARE,
    },
    _S.KEPT: {
        _E.PARTED: _S.JUNCTION,
        _E.SUPERSEDED: _S.SUPERSEDED,
        _E.ENDED: _S.SPARE,
    },
    _S.SUPERSEDED: {
        _E.LEFT_AGAIN: _S.KEPT,
        _E.ASKED_FOR: _S.KEPT,
        _E.PARTED: _S.JUNCTION,
        _E.ENDED: _S.SPARE,
    },
    _S.JUNCTION: {_E.ENDED: _S.SPARE},
}


def next_standing(standing: CheckpointStanding, event: CheckpointEvent) -> CheckpointStanding:
    """Return what an event makes of a checkpoint."""
    return TRANSITIONS[standing].get(event, standing)
