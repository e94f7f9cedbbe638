"""Objects on their way to the disk: nobody finds them yet, and nobody else takes their names."""

from __future__ import annotations

from collections.abc import Sequence

from vllm.v1.kv_offload.store.records import ObjectKey, Reservation


class Reservations:
    """What is on its way. Whoever calls holds the store's lock.

    Owns: the names with their last use, and which of them were made before the store was cleared.
    """

    def __init__(self) -> None:
        self._last_uses: dict[ObjectKey, int] = {}
        # Those up to this sequence were made before the store was cleared.
        self._cleared_at = -1

    def __contains__(self, key: ObjectKey) -> bool:
        """Whether an object of this name is on its way."""
        return key in self._last_uses

    def __len__(self) -> int:
        """How many are."""
        return len(self._last_uses)

    def add(self, key: ObjectKey, sequence: int) -> None:
        """Let an object be on its way."""
        self._last_uses[key] = sequence

    def use(self, keys: Sequence[ObjectKey], sequence: int) -> None:
        """Note a use of those that are on their way."""
        self._last_uses.update((key, sequence) for key in keys if key in self._last_uses)

    def last_use(self, key: ObjectKey) -> int:
        """Return when an object was last of use; 0: it is not on its way."""
        return self._last_uses.get(key, 0)

    def drop(self, key: ObjectKey) -> None:
        """Let an object be on its way no more: it came, or never will."""
        self._last_uses.pop(key, None)

    def clear(self, sequence: int) -> None:
        """Have given up what was reserved up to a sequence."""
        self._cleared_at = sequence

    def is_cleared(self, reservation: Reservation) -> bool:
        """Whether an object was reserved before the store was cleared."""
        return reservation.extent.sequence <= self._cleared_at
