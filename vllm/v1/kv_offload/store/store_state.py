"""What the parts of a store share: one lock, and what it guards, each thing with its owner."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock

from vllm.v1.kv_offload.store.cells import PAGE_BYTES
from vllm.v1.kv_offload.store.entries import Entries
from vllm.v1.kv_offload.store.reservations import Reservations
from vllm.v1.kv_offload.store.room import Room

_FAILURES_TO_STOP = 2
_FAILURE_WINDOW_S = 60.0


@dataclass(frozen=True, slots=True)
class StoreShape:
    """The sizes of a store's files.

    Attributes:
        slot_bytes: Bytes of a slot.
        num_pages: Pages of the index.
        max_slots: Slots of the rows file at its largest.
        seed: Of checksums.
    """

    slot_bytes: int
    num_pages: int
    max_slots: int
    seed: int

    @property
    def index_bytes(self) -> int:
        """The size of the index."""
        return self.num_pages * PAGE_BYTES


@dataclass(slots=True)
class StoreCounts:
    """What a store did since it was opened, in objects unless said otherwise."""

    committed: int = 0
    committed_bytes: int = 0
    failed: int = 0
    no_room: int = 0
    evicted: int = 0
    corrupt: int = 0
    damaged_cells: int = 0


class StoreState:
    """A store's lock, and what may be touched only under it.

    Owns: whether all of the index is read, whether the store may be written, and which syncs
    failed of late. ``entries``, ``room`` and ``reservations`` own the rest.

    Args:
        shape: Sizes.
        lock: The store's; ``room`` takes it too.
        room: Slots.
        clock: Monotonic seconds.

    Attributes:
        entries: What there is.
        reservations: What is on its way to the disk.
        counts: What happened; every part counts what it does.
        is_ready: Whether all of the index is read.
        is_writable: Whether the store may be written, as far as is known.
        opened_bytes: Bytes that were there when all of the index was read.
    """

    def __init__(
        self, shape: StoreShape, lock: Lock, room: Room, clock: Callable[[], float]
    ) -> None:
        self.shape = shape
        self.lock = lock
        self.entries = Entries(shape.num_pages, shape.seed)
        self.room = room
        self.reservations = Reservations()
        self.counts = StoreCounts()
        self.is_ready = False
        self.is_writable = True
        self.opened_bytes = 0
        self._clock = clock
        self._failures: deque[float] = deque(maxlen=_FAILURES_TO_STOP)

    @property
    def can_be_written(self) -> bool:
        """Whether objects can be reserved, and others given up for them."""
        return self.is_ready and self.is_writable

    def begin_serving(self, opened_bytes: int) -> None:
        """Take note that all of the index is read.

        Args:
            opened_bytes: Bytes of objects that were there.
        """
        self.opened_bytes = opened_bytes
        self.is_ready = True

    def allow_writing(self, is_writable: bool) -> None:
        """Say whether the store may be written."""
        self.is_writable = is_writable

    def note_failure(self) -> None:
        """Take note of a failed sync; after two in a minute nothing more is written."""
        now = self._clock()
        self._failures.append(now)
        if len(self._failures) == _FAILURES_TO_STOP:
            self.is_writable = now - self._failures[0] > _FAILURE_WINDOW_S
