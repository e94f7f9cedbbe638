"""What the prefilling engine's worker holds for others, and when each of it may go.

    offered --(pulled, any number of times)--> ended: released, expired or withdrawn
                                                 `--> collected, once nobody reads it any more

Only then does the scheduler free the blocks: rows that are on their way are never overwritten.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from vllm.v1.core.pool.exports import PrefixBlocks

# Of leases that ended or were released early: enough to tell "gone" from "not heard of yet".
_NUM_REMEMBERED = 4096


@dataclass(slots=True)
class Lease:
    """One prefix that is held.

    Attributes:
        name: Its name.
        blocks: Where its rows lie.
        expires_at: By the table's clock.
        num_readers: Connections that send its rows now.
        has_ended: Whether no further row may be sent.
    """

    name: str
    blocks: PrefixBlocks
    expires_at: float
    num_readers: int = 0
    has_ended: bool = False


class LeaseTable:
    """The leases of one worker; every method may be called from any thread.

    Owns: the leases.

    Args:
        clock: Seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # Re-entrant: what reads a lease may be collected as garbage, and so end its reading, in a
        # thread that is in here.
        self._lock = threading.RLock()
        self._leases: dict[str, Lease] = {}
        self._gone: OrderedDict[str, None] = OrderedDict()
        # Released before they were offered: the puller's word may overtake this engine's step.
        self._early: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        with self._lock:
            return len(self._leases)

    def offer(self, name: str, blocks: PrefixBlocks, lifetime_s: float) -> None:
        """Let others read a prefix for so long."""
        with self._lock:
            self._leases[name] = Lease(name, blocks, self._clock() + lifetime_s)
            if name in self._early:
                del self._early[name]
                self.end(name)

    def is_gone(self, name: str) -> bool:
        """Whether there was a lease of the name; False too for one nobody has heard of yet."""
        with self._lock:
            return name in self._gone

    def begin_reading(self, name: str) -> Lease | None:
        """Return a lease whose rows stay as they are until ``end_reading``; None: there is none."""
        with self._lock:
            lease = self._leases.get(name)
            if lease is None or lease.has_ended:
                return None
            lease.num_readers += 1
            return lease

    def end_reading(self, lease: Lease) -> None:
        """The other half of ``begin_reading``."""
        with self._lock:
            lease.num_readers -= 1

    def end(self, name: str) -> None:
        """End a lease: it was released or withdrawn; one not heard of yet, once it is offered."""
        with self._lock:
            lease = self._leases.get(name)
            if lease is not None:
                lease.has_ended = True
                _remember(self._gone, name)
            elif name not in self._gone:
                _remember(self._early, name)

    def end_all(self) -> None:
        """End every lease: the engine goes away."""
        with self._lock:
            for name, lease in self._leases.items():
                lease.has_ended = True
                _remember(self._gone, name)

    def collect(self) -> set[str]:
        """Forget the leases that have ended and are read no more; returns their names."""
        with self._lock:
            now = self._clock()
            for name, lease in self._leases.items():
                if lease.expires_at <= now and not lease.has_ended:
                    lease.has_ended = True
                    _remember(self._gone, name)
            done = {n for n, it in self._leases.items() if it.has_ended and not it.num_readers}
            for name in done:
                del self._leases[name]
            return done


def _remember(names: OrderedDict[str, None], name: str) -> None:
    names[name] = None
    while len(names) > _NUM_REMEMBERED:
        names.popitem(last=False)
