"""What is known of cached things, and who says which of them is given up next.

Everything cached stands, by what is known of it, in one of three queues, least recently used first.
"""

from collections.abc import Callable
from enum import IntEnum
from typing import Protocol


class Standing(IntEnum):
    """What is known of a cached thing.

    NEW        nobody came back for it yet
    RETURNED   it had been given up, and was computed again before long
    HIT        somebody came back for it while it was there
    """

    NEW = 0
    RETURNED = 1
    HIT = 2


class StandingQueues(Protocol):
    """Three queues in the order of their entries' stamps; a stamp tells when an entry was used."""

    def size(self, standing: Standing) -> int:
        """Return how many entries a queue has."""
        ...

    def oldest(self, standing: Standing) -> int:
        """Return the stamp of a queue's first entry; the queue is not empty."""
        ...

    def newest(self, standing: Standing) -> int:
        """Return the stamp of a queue's last entry; the queue is not empty."""
        ...


# Of queues of which one has an entry, what the cache can hold in all, and the stamp given last: the
# queue to take the next victim from, and whether from its newest end.
ChooseVictim = Callable[[StandingQueues, int, int], tuple[Standing, bool]]
