"""What changes on the disk: objects are acknowledged, others give way to them.

commit      cells of what workers have synced, cells emptied, uses      one sync for all of them
make_room   the rows file grows, or a commit empties cells              before the next batch
clear       all cells are emptied
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm.v1.kv_offload.store.cells import CELL_BYTES, EMPTY_HEAD, USES_OFFSET
from vllm.v1.kv_offload.store.evictions import Evictions
from vllm.v1.kv_offload.store.file_calls import FileCalls
from vllm.v1.kv_offload.store.records import Reservation
from vllm.v1.kv_offload.store.store_log import LOST
from vllm.v1.kv_offload.store.store_state import StoreState


class StoreWriter:
    """Writes the index. One thread calls, that of the store's files.

    Owns: the index's file, and what is on its way to it.

    Args:
        files: File calls.
        index: Handle of the index.
        state: The store's.
    """

    def __init__(self, files: FileCalls, index: int, state: StoreState) -> None:
        self._files = files
        self._index = index
        self._state = state
        self._evictions = Evictions(state)

    def commit(self, reservations: Sequence[Reservation]) -> list[Reservation]:
        """Acknowledge objects whose bytes are synced at every worker.

        Returns:
            Those that will be found from now on, whatever becomes of this process.
        """
        state, entries = self._state, self._state.entries
        with state.lock:
            reservations = self._drop_cleared(reservations)
            self._evictions.evict_ahead()
            placed = self._place(reservations)
            buried = dict(entries.dying)
            changes = [(index * CELL_BYTES, cell) for _, index, cell in placed]
            changes += [(index * CELL_BYTES, EMPTY_HEAD) for index in buried]
            changes += [
                (index * CELL_BYTES + USES_OFFSET, entries.table.uses_of(index))
                for index in entries.take_uses(buried.keys())
            ]
        if not changes:
            return []
        is_written = self._write_cells(changes)
        with state.lock:
            for index, slots in buried.items():
                entries.dying.pop(index, None)
                if is_written:
                    state.room.give_back(slots)
            for reservation, index, cell in placed:
                if is_written:
                    state.reservations.drop(reservation.spec.key)
                    entries.put(reservation, index, cell)
                    state.counts.committed += 1
                    state.counts.committed_bytes += reservation.spec.num_bytes
                else:
                    # On the disk its cell may stand or not: nothing else may take its slots.
                    self._lose(reservation)
                    state.counts.failed += 1
            if not is_written:
                state.note_failure()
                return []
        return [reservation for reservation, _, _ in placed]

    def make_room(self, *, may_wait: bool = False) -> None:
        """Grow, or evict, until what was last refused fits and some is free ahead.

        Args:
            may_wait: Whether room that nobody was refused may be made by the commit of what is on
                its way: one sync less.
        """
        state, room = self._state, self._state.room
        with state.lock:
            if not state.can_be_written:
                return
            num_missing = room.num_missing
            if num_missing <= 0 and not state.entries.dying:
                return
            comes_later = may_wait and not room.has_refused and bool(state.reservations)
        if num_missing > 0 and room.can_grow:
            room.grow(num_missing)
        if not comes_later:
            self.commit(())

    def clear(self) -> bool:
        """Forget all objects, on the disk too, and those on their way; False: that failed."""
        state, entries = self._state, self._state.entries
        with state.lock:
            if not state.can_be_written:
                return False
            state.reservations.clear(entries.sequence)
            for index in entries.table.used().tolist():
                entries.bury(index)
        self.commit(())
        with state.lock:
            return not entries.dying

    def _drop_cleared(self, reservations: Sequence[Reservation]) -> list[Reservation]:
        """Give up what was reserved before the store was cleared."""
        state, kept = self._state, []
        for reservation in reservations:
            if not state.reservations.is_cleared(reservation):
                kept.append(reservation)
                continue
            self._lose(reservation)
            state.room.give_back(reservation.extent.slots)
            state.counts.failed += 1
        return kept

    def _lose(self, reservation: Reservation) -> None:
        """Take note that an object on its way will not be found."""
        self._state.reservations.drop(reservation.spec.key)
        self._state.entries.note(LOST, reservation.spec.key)

    def _place(self, reservations: Sequence[Reservation]) -> list[tuple[Reservation, int, bytes]]:
        """Return objects with their cells' numbers and bytes; those that find none are lost."""
        placed: list[tuple[Reservation, int, bytes]] = []
        state, table = self._state, self._state.entries.table
        taken = set(state.entries.dying)
        for reservation in reservations:
            key = reservation.spec.key
            index = table.choose_cell(key, taken)
            if index is None:
                self._lose(reservation)
                state.room.give_back(reservation.extent.slots)
                state.counts.no_room += 1
                self._evictions.evict_near(key)
                continue
            taken.add(index)
            cell = table.make_cell(reservation, state.reservations.last_use(key))
            placed.append((reservation, index, cell))
        return placed

    def _write_cells(self, changes: Sequence[tuple[int, bytes]]) -> bool:
        """Write parts of cells, at their offsets; False: nobody knows what the disk holds."""
        try:
            for offset, data in changes:
                self._files.write(self._index, [data], offset)
            self._files.sync(self._index)
        except OSError:
            return False
        return True
