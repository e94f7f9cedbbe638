"""What encoders make beside the steps: who waits for it, what workers must still hear of it.

decide() --place--> open --note_made--> its room is the cache's
                     |  every request that waits has ended: workers are told to give up
                     +--drop----------> note_made says that it was not made
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class TowerOrder:
    """One item that a worker makes beside its steps.

    Attributes:
        key: Under which its output is kept.
        data: What it is made of.
    """

    key: str
    data: Any


@dataclass(slots=True)
class _Open:
    num_embeds: int
    waiting: set[str] = field(default_factory=set)


class TowerOrders:
    """Owns: the orders that are not made yet."""

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}
        self._new: list[TowerOrder] = []
        self._dropped: list[str] = []

    def __len__(self) -> int:
        return len(self._open)

    def is_open(self, key: str) -> bool:
        """Whether an item is being made."""
        return key in self._open

    def place(self, key: str, num_embeds: int, data: Any) -> None:
        """Have an item made; its room is reserved."""
        assert key not in self._open, f"{key} is being made already."
        self._open[key] = _Open(num_embeds)
        self._new.append(TowerOrder(key, data))

    def join(self, key: str, request_id: str) -> None:
        """Note that a request waits for an item."""
        self._open[key].waiting.add(request_id)

    def leave(self, request_id: str) -> None:
        """A request ended: what nobody else waits for is given up."""
        for key, own in self._open.items():
            if request_id in own.waiting:
                own.waiting.discard(request_id)
                if not own.waiting:
                    self._dropped.append(key)

    def waiting_for(self, key: str) -> Iterable[str]:
        """Return the requests that wait for an item."""
        return self._open[key].waiting

    def settle(self, key: str) -> int:
        """Close an order, made or not; returns its embeddings."""
        return self._open.pop(key).num_embeds

    def take_new(self) -> list[TowerOrder]:
        """Drain what workers must begin."""
        new, self._new = self._new, []
        return new

    def take_dropped(self) -> list[str]:
        """Drain what workers need not make any more."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def waiting(self) -> Iterable[str]:
        """Return the requests that wait."""
        return set().union(*(own.waiting for own in self._open.values()))
