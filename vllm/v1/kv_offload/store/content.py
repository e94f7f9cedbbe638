"""What a store holds, in numbers and lists."""

from __future__ import annotations

from vllm.v1.kv_offload.store.records import ObjectKey, StoredObject
from vllm.v1.kv_offload.store.store_state import StoreState


class StoreContent:
    """Counts and lists a store's objects; memory alone, any thread may ask.

    Args:
        state: The store's.
    """

    def __init__(self, state: StoreState) -> None:
        self._state = state

    @property
    def capacity_bytes(self) -> int:
        """Bytes of slots at one worker, as of now."""
        return self._state.room.num_slots * self._state.shape.slot_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of slots that are not free."""
        room = self._state.room
        return (room.num_slots - room.num_free) * self._state.shape.slot_bytes

    @property
    def live_bytes(self) -> int:
        """Bytes of objects that can be found."""
        return self._state.entries.live_bytes

    def num_objects(self) -> dict[str, int]:
        """Return how many objects of each kind can be found."""
        with self._state.lock:
            return self._state.entries.num_by_kind()

    def list_objects(self) -> list[StoredObject]:
        """Return all objects; O(objects)."""
        with self._state.lock:
            return self._state.entries.list_all()

    def list_keys(self, most: int) -> list[ObjectKey]:
        """Return the names of the objects that were used last."""
        with self._state.lock:
            return self._state.entries.list_keys(most)

    def find_faults(self) -> list[str]:
        """Say which slots are in two places (D3)."""
        entries, room = self._state.entries, self._state.room
        with self._state.lock:
            owners: dict[int, str] = {}
            faults = []
            places = [(f"cell {one.cell}", one.extent.slots) for one in entries.list_all()]
            places += [(f"dying cell {i}", slots) for i, slots in entries.dying.items()]
            places += [("the free list", room.free_runs)]
            for name, slots in places:
                for start, count in slots:
                    for slot in range(start, start + count):
                        if slot in owners:
                            faults.append(f"slot {slot} is in {owners[slot]} and in {name}")
                        owners[slot] = name
            return faults
