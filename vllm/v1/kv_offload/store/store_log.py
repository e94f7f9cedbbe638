"""What a store's own thread changes, and between which questions of the scheduler's thread.

The two threads take turns at a store in an order that nobody knows beforehand. Whoever wants to
repeat what happened needs that order: questions are counted, and a change carries their number.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm.v1.kv_offload.store.records import Extent, ObjectKey

PUT = "put"
EVICTED = "evicted"
GONE = "gone"
LOST = "lost"
REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class StoreChange:
    """One change.

    Attributes:
        after: Questions that were asked before it.
        kind: "put": it can be found from now on. "evicted", "gone": it cannot, for want of room or
            because it was wrong or the store was cleared. "lost": it was on its way and will not be
            found. "refused": the question of this number found no room.
        key: Its name.
        position: Tokens of the prefix at whose end it stands; of what is put.
        num_bytes: Its size; of what is put.
        sequence: Of its write; of what is put.
        next_token: See ``ObjectSpec``; of what is put.
    """

    after: int
    kind: str
    key: ObjectKey
    position: int = 0
    num_bytes: int = 0
    sequence: int = 0
    next_token: int | None = None


class StoreLog:
    """Counts questions and keeps changes; all calls are made under the store's lock.

    Owns: the count, and what nobody took yet.
    """

    def __init__(self) -> None:
        self.num_asked = 0
        self._changes: list[StoreChange] = []

    def note_asked(self) -> None:
        """Count a question of the scheduler's thread."""
        self.num_asked += 1

    def note_put(self, extent: Extent, position: int, next_token: int | None) -> None:
        """Note an object that can be found from now on."""
        key, size, sequence = extent.key, extent.num_bytes, extent.sequence
        change = StoreChange(self.num_asked, PUT, key, position, size, sequence, next_token)
        self._changes.append(change)

    def note(self, kind: str, key: ObjectKey) -> None:
        """Note any other change."""
        self._changes.append(StoreChange(self.num_asked, kind, key))

    def take(self) -> list[StoreChange]:
        """Drain the changes."""
        changes, self._changes = self._changes, []
        return changes
