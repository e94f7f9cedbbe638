"""What is given up when its room is needed: what was used least goes first."""

from __future__ import annotations

from vllm.v1.kv_offload.store.records import ObjectKey
from vllm.v1.kv_offload.store.store_state import StoreState


class Evictions:
    """Empties cells in memory; their slots are free once that is on the disk.

    Whoever calls holds the store's lock.

    Args:
        state: The store's.
    """

    def __init__(self, state: StoreState) -> None:
        self._state = state

    def evict(self, cell: int) -> int:
        """Give an object up for want of room; returns its slots."""
        self._state.counts.evicted += 1
        return self._state.entries.evict(cell)

    def evict_ahead(self) -> None:
        """Give objects up until enough slots will be free after the next sync."""
        entries, room = self._state.entries, self._state.room
        num_missing = room.num_missing
        if room.can_grow:
            return
        room.begin_making()
        freed = sum(count for slots in entries.dying.values() for _, count in slots)
        while freed < num_missing:
            cell = entries.table.next_victim(entries.pins)
            if cell is None:
                return
            freed += self.evict(cell)

    def evict_near(self, key: ObjectKey) -> None:
        """Give an object up whose cell one of this name could have taken."""
        entries = self._state.entries
        for cell in entries.table.cells_near(key):
            if cell not in entries.pins and cell not in entries.dying:
                self.evict(cell)
                return
