"""A disk that changes only when it is looked at: for runs that are recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm.v1.kv_offload.store.folder import SMALL_FILES
from vllm.v1.kv_offload.store.keeper import Keeper
from vllm.v1.kv_offload.store.object_store import ObjectStore
from vllm.v1.kv_offload.store.records import StoredObject
from vllm.v1.kv_offload.store.store_log import StoreChange, StoreLog


@dataclass(frozen=True, slots=True)
class DiskState:
    """Whether the disk can be asked.

    Attributes:
        is_open: Whether its objects can be found.
        is_opening: Whether they may be in a moment.
        is_digesting: Whether that takes long.
        is_writable: Whether more can be written.
    """

    is_open: bool = False
    is_opening: bool = False
    is_digesting: bool = False
    is_writable: bool = False


@dataclass(frozen=True, slots=True)
class DiskContent:
    """What was on the disk when it was opened.

    Attributes:
        objects: What could be found.
        last_sequence: Of its writes and uses.
        small: Small files by name.
        opened_bytes: Bytes of what was there at first.
        max_bytes: The folder's limit.
    """

    objects: Sequence[StoredObject]
    last_sequence: int
    small: dict[str, bytes]
    opened_bytes: int
    max_bytes: int


class LatchedDisk:
    """Shows a keeper's disk as it was at the last ``latch``; what it is told goes on at once.

    Its thread may open a folder in the middle of a step, and nobody could say between which two
    questions. A store is shown when all of it can be found.

    Owns: the log of the store.
    """

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._store: ObjectStore | None = None
        self._state = DiskState(is_opening=True)
        self._log = StoreLog()

    def latch(self) -> tuple[DiskState, DiskContent | None]:
        """Look at the keeper; returns its state, and what it holds when that is shown first."""
        keeper, content = self._keeper, None
        # In this order: it is set before the other says that it is not opening any more.
        is_opening, store = keeper.is_opening, keeper.store
        if self._store is None and store is not None and not is_opening and store.state.is_ready:
            objects, last = store.begin_log(self._log)
            small = {name: data for name in SMALL_FILES if (data := keeper.recall(name))}
            content = DiskContent(objects, last, small, store.state.opened_bytes, keeper.max_bytes)
            self._store = store
        is_hidden = store is not None and self._store is None and store.state.is_writable
        is_opening = is_opening or is_hidden
        is_open = self._store is not None
        is_writable = self._store is not None and self._store.state.is_writable
        self._state = DiskState(is_open, is_opening, keeper.is_digesting, is_writable)
        return self._state, content

    def take_changes(self) -> list[StoreChange]:
        """Drain what the keeper's thread changed."""
        return self._log.take()

    @property
    def store(self) -> ObjectStore | None:
        """What is on the disk; None: it is not shown."""
        return self._store

    @property
    def is_opening(self) -> bool:
        """Whether it may be open in a moment."""
        return self._state.is_opening

    @property
    def is_digesting(self) -> bool:
        """Whether that takes long."""
        return self._state.is_digesting
