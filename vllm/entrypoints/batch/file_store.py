"""Files that clients upload and batches write, in a folder: bounded, and apart by owner.

files/file-3f..json    what is said of a file
files/file-3f..data    its content, there before what is said of it
files/file-3f..part    one that is being written; removed at the next start
"""

import os
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import msgspec

from vllm.exceptions import EngineError, FileNotStoredError, UserInputError
from vllm.logger import init_logger

logger = init_logger(__name__)

BATCH, BATCH_OUTPUT = "batch", "batch_output"
MAX_FILES = 10_000
"""Of an owner; as many as one list may show."""
KEPT_S = 2_592_000
"""For how long batches, their inputs and their results are there, where nothing else is said."""


class FileObject(msgspec.Struct, kw_only=True, omit_defaults=False):
    """What clients see of a file."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    expires_at: int | None = None
    status: str = "processed"
    status_details: str | None = None
    object: str = "file"


class _Entry(msgspec.Struct):
    """A file, and whose it is; None: nobody's in particular."""

    about: FileObject
    owner: str | None


class FileStore:
    """The files of a folder.

    Owns: the folder's ``files``; one process at a time may use it.

    Args:
        folder: Where; made if it is not there.
        max_bytes: That the files of one owner may take.
        clock: Seconds since 1970.
    """

    def __init__(
        self, folder: Path, max_bytes: int, clock: Callable[[], float] = time.time
    ) -> None:
        self._folder = folder / "files"
        self._max_bytes = max_bytes
        self._clock = clock
        self._folder.mkdir(parents=True, exist_ok=True)
        self._entries: dict[str, _Entry] = {}
        self._is_used: Callable[[str], bool] = lambda _: False
        self._load()

    def keep_while(self, is_used: Callable[[str], bool]) -> None:
        """Let no file expire that somebody reads."""
        self._is_used = is_used

    def _load(self) -> None:
        for leftover in self._folder.glob("*.part"):
            leftover.unlink()
        for path in sorted(self._folder.glob("*.json")):
            try:
                entry = msgspec.json.decode(path.read_bytes(), type=_Entry)
            except msgspec.DecodeError as error:
                logger.warning("%s is left out: %s", path, error)
                continue
            if self._data_path(entry.about.id).is_file():
                self._entries[entry.about.id] = entry
        known = {self._data_path(name) for name in self._entries}
        for data in self._folder.glob("*.data"):
            if data not in known:
                data.unlink()

    def _data_path(self, file_id: str) -> Path:
        return self._folder / f"{file_id}.data"

    def num_free_bytes(self, owner: str | None) -> int:
        """Bytes that an owner's files may take beyond what they do; negative: results took more."""
        taken = (e.about.bytes for e in list(self._entries.values()) if e.owner == owner)
        return self._max_bytes - sum(taken)

    def _num_files(self, owner: str | None) -> int:
        return sum(entry.owner == owner for entry in list(self._entries.values()))

    def write(
        self,
        owner: str | None,
        filename: str,
        purpose: str,
        *,
        expires_in: int | None = None,
        file_id: str | None = None,
    ) -> "FileWriter":
        """Begin a file; it is there once the writer's ``finish`` was called.

        Args:
            owner: Whose it is.
            filename: What its owner calls it.
            purpose: What it is for.
            expires_in: Seconds until it goes; None: as long as its purpose lets it stay.
            file_id: Its id; None: a new one. One that is there is replaced.

        Raises:
            UserInputError: Its owner has too many.
        """
        self.expire()
        if purpose != BATCH_OUTPUT and self._num_files(owner) >= MAX_FILES:
            raise UserInputError(
                f"There are {MAX_FILES} files of yours, and no more may be: delete some first.",
                "file",
            )
        about = FileObject(
            id=file_id or f"file-{uuid.uuid4().hex}",
            bytes=0,
            created_at=int(self._clock()),
            filename=filename,
            purpose=purpose,
        )
        about.expires_at = _expiry(about, expires_in)
        room = None if purpose == BATCH_OUTPUT else self.num_free_bytes(owner)
        return FileWriter(self, _Entry(about, owner), self._folder / f"{about.id}.part", room)

    def _keep(self, entry: _Entry, part: Path) -> None:
        about = entry.about
        os.replace(part, self._data_path(about.id))
        beside = self._folder / f"{about.id}.part"
        beside.write_bytes(msgspec.json.encode(entry))
        os.replace(beside, self._folder / f"{about.id}.json")
        self._entries[about.id] = entry

    def find(self, file_id: str, owner: str | None) -> FileObject:
        """Return what is known of a file.

        Raises:
            FileNotStoredError: There is none of this id, or it is another owner's.
        """
        self.expire()
        entry = self._entries.get(file_id)
        if entry is None or entry.owner != owner:
            raise FileNotStoredError(
                f"There is no file {file_id[:80]!r}: it was never there, was deleted, or expired.",
                "file_id",
            )
        return entry.about

    def path_of(self, file_id: str, owner: str | None) -> Path:
        """Return where a file's content is.

        Raises:
            FileNotStoredError: As ``find``.
        """
        return self._data_path(self.find(file_id, owner).id)

    def files_of(self, owner: str | None) -> list[FileObject]:
        """Return an owner's files, the oldest first."""
        self.expire()
        found = [e.about for e in list(self._entries.values()) if e.owner == owner]
        return sorted(found, key=lambda about: about.created_at)

    def delete(self, file_id: str, owner: str | None) -> None:
        """Remove a file.

        Raises:
            FileNotStoredError: As ``find``.
        """
        self._drop(self.find(file_id, owner).id)

    def expire(self) -> None:
        """Remove what has been there long enough."""
        now = self._clock()
        over = [
            name
            for name, entry in list(self._entries.items())
            if entry.about.expires_at is not None and entry.about.expires_at <= now
        ]
        for name in over:
            if not self._is_used(name):
                self._drop(name)

    def _drop(self, file_id: str) -> None:
        # Another thread may be removing it, too.
        self._entries.pop(file_id, None)
        # What is said of it first: content alone is removed at the next start.
        (self._folder / f"{file_id}.json").unlink(missing_ok=True)
        self._data_path(file_id).unlink(missing_ok=True)


def _expiry(about: FileObject, expires_in: int | None) -> int | None:
    """Return when a file goes; None: it stays until it is deleted."""
    if expires_in is None:
        expires_in = KEPT_S if about.purpose in (BATCH, BATCH_OUTPUT) else None
    return None if expires_in is None else about.created_at + expires_in


class FileWriter:
    """A file on its way into a store.

    Owns: the part that is written; it goes unless ``finish`` was called.
    """

    def __init__(self, store: FileStore, entry: _Entry, path: Path, room: int | None) -> None:
        self._store, self._entry, self._path = store, entry, path
        self._room = room
        self._file: BinaryIO | None = path.open("wb")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file.close()
            self._path.unlink(missing_ok=True)

    @property
    def num_bytes(self) -> int:
        """Bytes so far."""
        return self._entry.about.bytes

    def describe(self, purpose: str, expires_in: int | None) -> None:
        """Say what the file is for, and in how many seconds it goes."""
        self._entry.about.purpose = purpose
        self._entry.about.expires_at = _expiry(self._entry.about, expires_in)

    def add(self, data: bytes) -> None:
        """Append bytes.

        Raises:
            UserInputError: The owner's files would take too much.
            EngineError: The disk does not take them.
        """
        assert self._file is not None
        about = self._entry.about
        about.bytes += len(data)
        if self._room is not None and about.bytes > self._room:
            raise UserInputError(
                f"The file does not fit: {max(self._room, 0)} bytes are left of what your files "
                "may take (--batch-dir-max-bytes). Delete some first.",
                "file",
            )
        try:
            self._file.write(data)
        except OSError as error:
            raise EngineError(f"The file cannot be written: {error.strerror}.") from error

    def add_all(self, pieces: Iterator[bytes]) -> None:
        """Append all; see ``add``."""
        for piece in pieces:
            self.add(piece)

    def finish(self) -> FileObject:
        """Let the store have the file.

        Raises:
            EngineError: The disk does not take it.
        """
        assert self._file is not None
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None
            self._store._keep(self._entry, self._path)
        except OSError as error:
            raise EngineError(f"The file cannot be written: {error.strerror}.") from error
        return self._entry.about
