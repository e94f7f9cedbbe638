"""The store's one thread: opens it beside the start, commits what workers wrote, makes room."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic
from typing import Protocol

from vllm.exceptions import VllmError
from vllm.logger import init_logger
from vllm.utils.byte_sizes import show_size
from vllm.v1.kv_offload.store.folder import (
    SMALL_FILES,
    CacheFolder,
    Identity,
    read_small,
    rows_path,
)
from vllm.v1.kv_offload.store.object_store import ObjectStore
from vllm.v1.kv_offload.store.records import ObjectKey, Reservation

logger = init_logger(__name__)

_PROGRESS_S = 5.0
_STOP_S = 5.0
# A reset waits for the disk as long.
_CLEAR_S = 30.0
# Names that wait to be told to those who listen to KV events.
_MAX_COMMITTED = 1 << 16

IdentityFinder = Callable[[Callable[[int, int], None], threading.Event], Identity | None]


class Disk(Protocol):
    """What the scheduler's side sees of the disk.

    Attributes:
        store: What is on it; None: it is not open.
        is_opening: Whether it may be open in a moment.
        is_digesting: Whether that takes long: all weights are being read.
    """

    @property
    def store(self) -> ObjectStore | None: ...

    @property
    def is_opening(self) -> bool: ...

    @property
    def is_digesting(self) -> bool: ...


class Keeper(Disk, Protocol):
    """What the scheduler's side asks of the disk's thread.

    Attributes:
        path: The folder of its files.
    """

    @property
    def path(self) -> Path | None: ...

    @property
    def num_uncommitted(self) -> int:
        """Objects that are not acknowledged yet."""

    @property
    def max_bytes(self) -> int:
        """The folder's limit; 0 until it is known."""

    def bind_wake(self, wake: Callable[[], None]) -> None:
        """Have ``wake`` called whenever the thread has got on."""

    def commit(self, reservations: Sequence[Reservation]) -> None:
        """Acknowledge objects that all workers have synced."""

    def make_room(self) -> None:
        """Have slots freed, or the file grown."""

    def recall(self, name: str) -> bytes | None:
        """Return a small file beside the index, as it was when the folder was opened."""

    def remember(self, name: str, data: bytes) -> None:
        """Have a small file beside the index replaced; it is no promise."""

    @property
    def has_committed(self) -> bool:
        """Whether ``take_committed`` has names to tell."""

    def take_committed(self) -> list[ObjectKey]:
        """Drain the names of what was acknowledged since the last call."""

    def clear(self) -> bool:
        """Forget everything; False: the disk did not take it."""

    def close(self) -> None:
        """End the thread and let go of the folder; idempotent."""


class StoreKeeper:
    """Opens a store and does all its file calls, in one thread.

    Owns: the folder, the store, the thread. A tier that cannot be opened is off for this run: one
    warning says why, and everything is as without it.

    Args:
        open_folder: Opens the folder.
        find_identity: Works the identity out; may read for minutes.
    """

    def __init__(
        self,
        open_folder: Callable[[], CacheFolder],
        find_identity: IdentityFinder,
    ) -> None:
        self._open_folder = open_folder
        self._find_identity = find_identity
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._folder: CacheFolder | None = None
        self.store: ObjectStore | None = None
        self.path: Path | None = None
        self.num_uncommitted = 0
        self.is_opening = True
        # Whether opening takes long: all weights are being read.
        self.is_digesting = False
        self._small: dict[str, bytes] = {}
        # What is ordered and not begun, each once however often it is asked for: the disk may hang.
        self._is_room_ordered = False
        self._to_remember: dict[str, bytes] = {}
        self._committed: list[ObjectKey] = []
        self._lock = threading.Lock()
        self._last_progress = monotonic()
        self._wake: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._run, name="prefix-cache-disk", daemon=True)
        self._thread.start()

    def bind_wake(self, wake: Callable[[], None]) -> None:
        """Have ``wake`` called whenever the thread has got on."""
        self._wake = wake
        # What it did until now was told to nobody.
        wake()

    @property
    def max_bytes(self) -> int:
        """The folder's limit; 0 until it is known."""
        return 0 if self._folder is None else self._folder.max_bytes

    # ---- called by the scheduler's thread ----------------------------------------------------

    def commit(self, reservations: Sequence[Reservation]) -> None:
        """Acknowledge objects that all workers have synced."""
        with self._lock:
            self.num_uncommitted += len(reservations)
        self._work.put(lambda: self._commit(reservations))

    def make_room(self) -> None:
        """Have slots freed, or the file grown."""
        with self._lock:
            is_ordered, self._is_room_ordered = self._is_room_ordered, True
        if not is_ordered:
            self._work.put(self._make_ordered_room)

    def recall(self, name: str) -> bytes | None:
        """Return a small file beside the index, as it was when the folder was opened."""
        return self._small.get(name)

    def remember(self, name: str, data: bytes) -> None:
        """Have a small file beside the index replaced; it is no promise."""
        with self._lock:
            is_ordered = name in self._to_remember
            self._to_remember[name] = data
        if not is_ordered:
            self._work.put(lambda: self._remember(name))

    @property
    def has_committed(self) -> bool:
        """Whether ``take_committed`` has names to tell."""
        return bool(self._committed)

    def take_committed(self) -> list[ObjectKey]:
        """Drain the names of what was acknowledged since the last call."""
        with self._lock:
            committed, self._committed = self._committed, []
        return committed

    def clear(self) -> bool:
        """Forget everything; False: the disk did not take it."""
        done: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._work.put(lambda: self._clear(done))
        try:
            return done.get(timeout=_CLEAR_S)
        except queue.Empty:
            return False

    def close(self) -> None:
        """End the thread and let go of the folder; idempotent."""
        self._stopping.set()
        self._work.put(None)
        self._thread.join(_STOP_S)

    # ---- the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        self._attempt(self._open, "is off", self._stop_writing)
        self.is_opening = False
        self._wake()
        if self.store is not None:
            self._read_index(self.store)
        while (work := self._work.get()) is not None:
            self._attempt(work, "is written no more", self._stop_writing)
            self._wake()
        if self._folder is not None:
            self._folder.close()

    def _attempt(self, work: Callable[[], None], outcome: str, give_up: Callable[[], None]) -> None:
        """Do a part of the thread's work; without it the engine goes on as without that part.

        The one edge of this thread: whatever went wrong is told once, and the tier's state
        (``find_disk_state``) says from then on what no longer works. Nothing that is in the pool
        depends on it.

        Args:
            work: The part.
            outcome: What becomes of the prefix cache on disk if it fails.
            give_up: Does that.
        """
        try:
            work()
        except (VllmError, OSError) as error:
            logger.warning("The prefix cache on disk %s: %s", outcome, error)
            give_up()
        except Exception:  # a thread's edge: requests would wait for it for ever
            logger.exception("The prefix cache on disk %s.", outcome)
            give_up()

    def _stop_writing(self) -> None:
        if self.store is not None:
            self.store.state.allow_writing(False)

    def _open(self) -> None:
        folder = self._open_folder()
        self._folder = folder
        identity = self._find_identity(self._note_progress, self._stopping)
        if identity is None:
            return
        store = folder.open_store(identity)
        store.opening.begin()
        for note in folder.notes:
            logger.warning("Prefix cache on disk: %s.", note)
        self.path = rows_path(folder.root / identity.name, 0).parent
        self._small = {name: data for name in SMALL_FILES if (data := read_small(self.path / name))}
        self.store = store

    def _read_index(self, store: ObjectStore) -> None:
        """Read all entries; what a lookup waits for comes first."""
        assert self._folder is not None
        self._attempt(
            lambda: self._read_cells(store),
            "is read and written no more",
            store.opening.stop_reading,
        )
        if not store.state.is_ready:
            self._wake()
            return
        with self._lock:
            self._committed = store.content.list_keys(_MAX_COMMITTED)
        self.make_room()
        self._wake()
        counts = store.content.num_objects()
        logger.info(
            "Prefix cache on disk: %s, at most %s; %s of %d checkpoints and %d row groups are "
            "there.",
            self._folder.root,
            show_size(self._folder.max_bytes),
            show_size(store.content.live_bytes),
            counts["state"],
            counts["rows"],
        )

    def _read_cells(self, store: ObjectStore) -> None:
        while not self._stopping.is_set() and store.opening.read_on():
            if store.opening.take_served():
                self._wake()

    def _note_progress(self, done: int, total: int) -> None:
        if not self.is_digesting:
            self.is_digesting = True
            self._wake()
        if monotonic() - self._last_progress >= _PROGRESS_S:
            self._last_progress = monotonic()
            logger.info(
                "Prefix cache on disk: reading the weights once for their digest, %.1f of %.1f GB.",
                done / 1e9,
                total / 1e9,
            )

    def _commit(self, reservations: Sequence[Reservation]) -> None:
        assert self.store is not None
        try:
            done = self.store.writer.commit(reservations)
            with self._lock:
                if len(self._committed) < _MAX_COMMITTED:
                    self._committed += [reservation.spec.key for reservation in done]
        finally:
            with self._lock:
                self.num_uncommitted -= len(reservations)
        self._make_room()

    def _make_ordered_room(self) -> None:
        with self._lock:
            self._is_room_ordered = False
        self._make_room()

    def _make_room(self) -> None:
        if self.store is not None:
            self.store.writer.make_room(may_wait=True)

    def _remember(self, name: str) -> None:
        with self._lock:
            data = self._to_remember.pop(name)
        if self._folder is None or self.path is None or self._folder.read_only:
            return
        # A disk that refused once would refuse, and be told of, every few seconds.
        if self.store is not None and self.store.state.is_writable:
            self._folder.write_small(self.path / name, data)

    def _clear(self, done: queue.SimpleQueue[bool]) -> None:
        is_clear = False
        try:
            # Whoever may not write the folder leaves the files of whoever does.
            if self.path is not None and self.store is not None and self.store.writer.clear():
                for name in SMALL_FILES:
                    (self.path / name).unlink(missing_ok=True)
                is_clear = True
        finally:
            # A step waits for it, after an error too.
            done.put(is_clear)
