"""The root folder: whose it is, its hash root, one sub-folder for each identity.

    root/                 0700, of this user
      MARKER              that it is ours, the format's version, the hash root
      LOCK                held by the process that writes; says which
      weights.json        digests of weights, by file
      <identity>/         16 hex digits: of all that rows depend on
        meta              what the identity is, in words; sizes
        index             cells
        rates, warm       what was measured; what to bring back at the start
        budget            what may yet be written today
        rows.<worker>     slots

Of several engine cores each has a folder ``core-<i>`` like this one, with a share of the limit.
When their number changes, what the first one kept goes on; what the others kept goes.

All files together stay below a limit. Rows of another identity, or of another version of the
format, are never read; they go when their room is needed, the longest unused first.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import socket
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import xxhash

from vllm.exceptions import VllmError
from vllm.utils.byte_sizes import show_size
from vllm.utils.math_utils import cdiv
from vllm.v1.kv_offload.store.cell_table import CellTable
from vllm.v1.kv_offload.store.cells import CELL, CELL_BYTES, PAGE_BYTES, PAGE_CELLS, find_damaged
from vllm.v1.kv_offload.store.file_calls import DiskFiles, FileCalls
from vllm.v1.kv_offload.store.object_store import ObjectStore
from vllm.v1.kv_offload.store.rows_file import SEAL_BYTES
from vllm.v1.kv_offload.store.store_state import StoreShape
from vllm.v1.kv_offload.store.weights_digest import WEIGHTS_LOCK

FORMAT = 1
_MAGIC = "vllm prefix cache"
_MARKER, _LOCK, _META, _INDEX = "MARKER", "LOCK", "meta", "index"
# Held while what another number of cores left is moved.
_MOVING = "MOVING"
WEIGHTS_FILE = "weights.json"
# Beside an index; each replaced as a whole, none of it a promise.
SMALL_FILES = ("rates", "warm", "budget")
_SMALL_FILE_BYTES = 1 << 18
_OURS = frozenset({_MARKER, _LOCK, _MOVING, WEIGHTS_FILE, WEIGHTS_LOCK})
_ROOT_BYTES = 32
_NAME_CHARS = 16
_META_BYTES = 4096
# What the small files of a root may take together.
_SMALL_BYTES = 1 << 20
_SLOT_SIZES = (65536, 32768, 16384, 8192, 4096)
_MAX_PADDING = 0.02
# At most half full, and objects may be smaller than the ones whose size is known.
_CELLS_PER_OBJECT = 3
# An index of up to so many times the size that a new one would get is left as it is.
_NEAR = 2


class FolderBusyError(VllmError):
    """Another process writes to the folder."""


class FolderError(VllmError):
    """The folder cannot be used; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What rows depend on: those of another identity mean something else.

    Attributes:
        parts: By name, in words.
        num_workers: Rows files.
        object_bytes: Sizes of usual objects at a worker, the commonest first.
    """

    parts: Mapping[str, str]
    num_workers: int
    object_bytes: Sequence[int]

    @property
    def digest(self) -> bytes:
        """A digest of all parts."""
        return sha256(json.dumps(dict(self.parts), sort_keys=True).encode()).digest()

    @property
    def name(self) -> str:
        """The sub-folder's name."""
        return self.digest.hex()[:_NAME_CHARS]

    @property
    def seed(self) -> int:
        """The seed of checksums."""
        return int.from_bytes(self.digest[:8], "little")


@dataclass
class FolderMeta:
    """What a sub-folder says of itself.

    Attributes:
        identity: The identity, in words.
        slot_bytes: Bytes of a slot.
        opened: A count that tells which sub-folder was opened last; no time, which may go back.
        format: Version of the format.
    """

    identity: dict[str, str] = field(default_factory=dict)
    slot_bytes: int = 0
    opened: int = 0
    format: int = FORMAT


def choose_slot_bytes(object_bytes: Sequence[int]) -> int:
    """Return the largest slot that pads no usual object by more than 2%."""
    for size in _SLOT_SIZES:
        sealed = [length + SEAL_BYTES for length in object_bytes]
        if all(cdiv(n, size) * size <= n * (1 + _MAX_PADDING) for n in sealed):
            return size
    return _SLOT_SIZES[-1]


def shape_store(
    identity: Identity, max_bytes: int, slot_bytes: int, num_pages_there: int = 0
) -> StoreShape:
    """Return sizes whose files take at most ``max_bytes``.

    Args:
        identity: Whose store.
        max_bytes: Of all files.
        slot_bytes: Bytes of a slot.
        num_pages_there: Pages of the index that is there. It stays if it is of about the right
            size: without a set limit, each start finds other free space.
    """
    usual = cdiv(min(identity.object_bytes) + SEAL_BYTES, slot_bytes)
    cell_bytes = _CELLS_PER_OBJECT * PAGE_BYTES / PAGE_CELLS
    per_slot = slot_bytes * identity.num_workers + cell_bytes / usual
    num_slots = int(max(0, max_bytes - _META_BYTES - PAGE_BYTES) / per_slot)
    num_pages = cdiv(_CELLS_PER_OBJECT * cdiv(num_slots, usual), PAGE_CELLS) or 1
    if num_pages_there and num_pages <= _NEAR * num_pages_there <= _NEAR * _NEAR * num_pages:
        num_pages = num_pages_there
        left = max_bytes - _META_BYTES - num_pages * PAGE_BYTES
        num_slots = max(0, left // (slot_bytes * identity.num_workers))
    return StoreShape(slot_bytes, num_pages, num_slots, identity.seed)


class CacheFolder:
    """A root folder that this process may use.

    Owns: the lock, until ``close``.

    Args:
        root: The folder; made if it is not there.
        max_bytes: What all its files may take.
        read_only: Read what is there, take no lock.
        num_cores: Engine cores that have folders beside it, itself included.
        min_free_bytes: Of the file system, left to others.
        hash_root: What this process names prefixes by already. A folder without a root takes it:
            it was cleared since the root was read from it.
        files: File calls of everything that must be ordered.

    Raises:
        FolderBusyError: Another process writes to it.
        FolderError: It is not ours, others may read it, or it cannot be made.
    """

    def __init__(
        self,
        root: Path,
        max_bytes: int,
        *,
        read_only: bool = False,
        num_cores: int = 1,
        min_free_bytes: int = 0,
        hash_root: bytes | None = None,
        files: FileCalls | None = None,
    ) -> None:
        self.root = root
        known = hash_root or b""
        self._new_root = known if len(known) == _ROOT_BYTES else os.urandom(_ROOT_BYTES)
        self._num_cores = num_cores
        self._min_free_bytes = min_free_bytes
        self.max_bytes = max_bytes
        self.read_only = read_only
        self._files = files or DiskFiles()
        self._locks: list[int] = []
        self._current: Path | None = None
        self._handles: list[int] = []
        self.notes: list[str] = []
        try:
            self._enter()
        except FolderError:
            self.close()
            raise
        except OSError as error:
            # A lock that is not let go would keep this process itself out, at its next try.
            self.close()
            raise FolderError(
                f"{root} cannot hold a prefix cache ({error}): use a folder that this user may "
                "write, on a local file system, or set read_only to read what it holds."
            ) from error

    def _enter(self) -> None:
        if self.root.is_symlink():
            # One that leads nowhere is no folder to be made.
            check_private(self.root)
        if not self.read_only:
            if _is_core(self.root.name):
                self.root.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                check_private(self.root.parent)
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_private(self.root)
        known = read_marker(self.root)
        names = {entry.name for entry in self.root.iterdir()}
        foreign = sorted(name for name in names if not _is_ours(name))
        if foreign and not (self.root / _MARKER).exists():
            raise FolderError(
                f"{self.root} holds {foreign[0]!r}, which is no part of a prefix cache: use an "
                "empty folder."
            )
        if self.read_only:
            if known is None:
                raise FolderError(f"{self.root} holds no prefix cache that could be read.")
            self.hash_root = known
            return
        if _is_core(self.root.name):
            self._join_cores(self.root.parent)
        self._take_lock(self.root)
        # Read again: its last owner may have written it meanwhile.
        known = read_marker(self.root)
        if known is None:
            if (self.root / _MARKER).exists():
                self._set_aside(self.root / _MARKER)
            known = self._new_root
            self._write_marker(self.root, known)
        self.hash_root = known

    def _take_lock(self, folder: Path) -> None:
        """Take a folder for this process alone."""
        handle = self._files_open(folder / _LOCK)
        if not _try_lock(handle, fcntl.LOCK_EX):
            raise self._busy(folder, handle)
        self._locks.append(handle)
        _write_owner(handle, "")

    def _join_cores(self, base: Path) -> None:
        """Share a folder with the other cores of a server, and with no other server.

        Cores of another server, of which there are more or fewer, would divide the limit otherwise.
        """
        share = f", one of {self._num_cores} cores"
        moving = self._files_open(base / _MOVING)
        try:
            # One core at a time: whoever finds nobody there says how many they are.
            fcntl.flock(moving, fcntl.LOCK_EX)
            handle = self._files_open(base / _LOCK)
            if _try_lock(handle, fcntl.LOCK_EX):
                _write_owner(handle, share)
            is_shared = _try_lock(handle, fcntl.LOCK_SH)
            if not is_shared or not _read_owner(handle).endswith(share):
                raise self._busy(base, handle)
            self._locks.append(handle)
            if not (base / _MARKER).exists():
                # The cores' common root, which the next start reads.
                self._write_marker(base, self._new_root)
        finally:
            os.close(moving)

    def _busy(self, folder: Path, handle: int) -> FolderBusyError:
        owner = _read_owner(handle) or "another process"
        os.close(handle)
        self.close()
        return FolderBusyError(f"{folder} is in use by {owner}")

    @staticmethod
    def _files_open(path: Path) -> int:
        return DiskFiles().open(path)

    def _write_marker(self, folder: Path, hash_root: bytes) -> None:
        text = {"magic": _MAGIC, "format": FORMAT, "root": hash_root.hex()}
        self._files.replace(folder / _MARKER, _with_checksum(text))

    def _set_aside(self, path: Path) -> None:
        """Move what cannot be used out of the way; it goes when its room is needed."""
        number = 0
        while (target := path.with_name(f"damaged-{number}-{path.name}")).exists():
            number += 1
        path.rename(target)
        self.notes.append(f"{path.name} was damaged and is set aside as {target.name}")

    # ---- an identity's store -----------------------------------------------------------------

    def open_store(self, identity: Identity, clock: Callable[[], float] = monotonic) -> ObjectStore:
        """Open, or make, the store of an identity; ``load`` it before use.

        Raises:
            FolderError: It cannot be made, or the limit is too small.
        """
        path = self.root / identity.name
        if not self.read_only:
            try:
                self._take_over(identity.name)
            except OSError as error:
                raise FolderError(f"{path} cannot go on as it is ({error}).") from error
        meta = read_meta(path)
        if path.exists() and meta is None and not self.read_only:
            self._set_aside(path)
        self._fit_disk()
        slot_bytes = choose_slot_bytes(identity.object_bytes)
        if meta is not None and meta.slot_bytes in _SLOT_SIZES:
            slot_bytes = meta.slot_bytes
        num_pages = _file_bytes(path / _INDEX) // PAGE_BYTES
        shape = shape_store(identity, self.max_bytes - _SMALL_BYTES, slot_bytes, num_pages)
        if shape.max_slots * slot_bytes < 4 * max(identity.object_bytes):
            least = 8 * identity.num_workers * max(identity.object_bytes) + 2 * _SMALL_BYTES
            raise FolderError(
                f"A prefix cache of {show_size(self.max_bytes)} is too small: one entry takes up "
                f"to {show_size(max(identity.object_bytes))}. Give it at least {show_size(least)}."
            )
        try:
            store = self._open_files(path, identity, shape, clock)
        except OSError as error:
            raise FolderError(f"The prefix cache at {path} cannot be opened ({error}).") from error
        self._current = path
        return store

    def _fit_disk(self) -> None:
        """Lower the limit to what the file system has room for: an index is as large as it says."""
        if self.read_only:
            return
        free = shutil.disk_usage(self.root).free - self._min_free_bytes
        # What is there stays, beside the small files, however full the disk is.
        room = disk_bytes(self.root) + _SMALL_BYTES + max(0, free) // self._num_cores
        if room < self.max_bytes:
            self.notes.append(
                f"the limit of {show_size(self.max_bytes)} is more than there is room for, and is "
                f"{show_size(room)} now"
            )
            self.max_bytes = room

    def _take_over(self, name: str) -> None:
        """Go on in the first core's folder with what another number of cores left.

        What this number of cores has no folder for is removed: it would count against nobody's
        share. A single core keeps the others' folders until their room is needed.
        """
        is_core = _is_core(self.root.name)
        base = self.root.parent if is_core else self.root
        first, last = base / core_name(0), base
        if is_core:
            first, last = last, first
        moving = self._files_open(base / _MOVING)
        try:
            fcntl.flock(moving, fcntl.LOCK_EX)
            if (first / name).is_dir() and not (last / name).exists() and _is_free(first, base):
                last.mkdir(mode=0o700, exist_ok=True)
                (first / name).rename(last / name)
                self.notes.append(f"{first / name} goes on as {last / name}")
            if is_core:
                self._remove_leftovers(base)
        finally:
            os.close(moving)

    def _remove_leftovers(self, base: Path) -> None:
        for entry in base.iterdir():
            number = _core_number(entry.name)
            is_gone = number is not None and number >= self._num_cores and _is_free(entry, base)
            if is_gone or _is_identity(entry.name) or entry.name.startswith("damaged-"):
                _remove(entry)

    def _open_files(
        self, path: Path, identity: Identity, shape: StoreShape, clock: Callable[[], float]
    ) -> ObjectStore:
        writable = not self.read_only
        if writable:
            path.mkdir(mode=0o700, exist_ok=True)
            check_private(path)
            self._current = path
            self._make_index(path, shape)
            opened = 1 + max((meta.opened for _, meta in self.list_identities()), default=0)
            meta = FolderMeta(dict(identity.parts), shape.slot_bytes, opened)
            self._files.replace(path / _META, _with_checksum(asdict(meta)))
        index = self._open(path / _INDEX, writable)
        rows = [
            self._open(rows_path(path, worker), writable) for worker in range(identity.num_workers)
        ]
        if writable:
            for handle in rows:
                if self._files.size(handle) > shape.max_slots * shape.slot_bytes:
                    self._files.truncate(handle, shape.max_slots * shape.slot_bytes)
            self._files.sync_folder(path)
            self._files.sync_folder(self.root)
        num_pages = self._files.size(index) // PAGE_BYTES
        shape = StoreShape(shape.slot_bytes, num_pages or 1, shape.max_slots, shape.seed)
        store = ObjectStore(self._files, index, rows, shape, self._allow, clock)
        store.state.allow_writing(writable)
        return store

    def _open(self, path: Path, writable: bool) -> int:
        handle = self._files.open(path, writable=writable)
        self._handles.append(handle)
        return handle

    def _make_index(self, path: Path, shape: StoreShape) -> None:
        """Give the index its size; entries of one of another size move to a new one."""
        old = self._files.open(path / _INDEX)
        try:
            size = self._files.size(old)
            if size == shape.index_bytes:
                return
            if size == 0:
                self._files.allocate(old, shape.index_bytes)
                self._files.sync(old)
                return
            self._files.replace(path / _INDEX, self._move_cells(old, size, shape))
        finally:
            self._files.close(old)

    def _move_cells(self, old: int, size: int, shape: StoreShape) -> bytes:
        raw = bytearray(size // CELL_BYTES * CELL_BYTES)
        self._files.read(old, memoryview(raw), 0)
        cells = np.frombuffer(raw, CELL)
        cells["checksum"][find_damaged(cells, shape.seed)] = 0
        after = CellTable(shape.num_pages, shape.seed)
        after.take_cells(cells[cells["checksum"] != 0])
        return bytes(after.raw)

    def _allow(self, wanted: int) -> int:
        """Return how large rows may be that want so much; others' files go for it."""
        assert self._current is not None
        rows = {entry.name for entry in self._current.iterdir() if entry.name.startswith("rows.")}
        for name in (*self._list_removable(), None):
            present = sum(disk_bytes(self._current / row) for row in rows)
            allowed = self.max_bytes - (disk_bytes(self.root) - present)
            if self._min_free_bytes:
                free = shutil.disk_usage(self.root).free
                allowed = min(allowed, present + free - self._min_free_bytes)
            if allowed >= wanted or name is None:
                return max(0, allowed)
            _remove(self.root / name)
        return 0

    def _list_removable(self) -> list[str]:
        """Return what may go: damaged things, then other identities, the longest unused first."""
        names = [entry.name for entry in self.root.iterdir()]
        others = [name for name in names if name.startswith("damaged-") or _is_core(name)]
        identities = sorted(self.list_identities(), key=lambda entry: entry[1].opened)
        for name, _ in identities:
            if self._current is None or name != self._current.name:
                others.append(name)
        return others

    def write_small(self, path: Path, data: bytes) -> None:
        """Replace a small file of an identity; what is too large is left out.

        Raises:
            OSError: It cannot be written.
        """
        if len(data) <= _SMALL_FILE_BYTES:
            self._files.replace(path, seal_small(data))

    def list_identities(self) -> list[tuple[str, FolderMeta]]:
        """Return what sub-folders say of themselves; of damaged ones nothing."""
        found = []
        for entry in sorted(self.root.iterdir()):
            if _is_identity(entry.name) and entry.is_dir():
                found.append((entry.name, read_meta(entry) or FolderMeta()))
        return found

    def remove_all(self) -> list[str]:
        """Remove everything of ours but the lock: nothing that was written can be found any more.

        The marker goes last: whoever is killed before finds the rest, and removes it, by calling
        this again.

        Returns:
            Names of what is not ours, which stays.

        Raises:
            OSError: Something cannot be removed.
        """
        names = [entry.name for entry in self.root.iterdir()]
        for name in sorted(names, key=lambda name: name == _MARKER):
            if name == _LOCK or _is_core(name) or not _is_ours(name):
                continue
            entry = self.root / name
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
        self._files.sync_folder(self.root)
        return sorted(name for name in names if not _is_ours(name))

    def close(self) -> None:
        """Close all files and let go of the folder; idempotent."""
        for handle in self._handles:
            self._files.close(handle)
        self._handles = []
        for lock in self._locks:
            os.close(lock)
        self._locks = []


def rows_path(path: Path, worker: int) -> Path:
    """Return the rows file of a worker."""
    return path / f"rows.{worker}"


def core_folders(root: Path) -> list[Path]:
    """Return the folders of several engine cores in a folder."""
    return (
        sorted(entry for entry in root.iterdir() if _is_core(entry.name)) if (root.is_dir()) else []
    )


def check_place(path: Path) -> None:
    """Refuse a path at which no folder can be; one that is not there yet can be made.

    Raises:
        FolderError: A file or a link has its name, a file is where a folder above it would be, or
            no file system takes such a name.
    """
    for place in (path, *path.parents):
        try:
            found = path.lstat() if place is path else place.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
                raise FolderError(f"{path} cannot be a folder ({error.strerror}).") from error
            # What cannot be looked at now may be well at another start.
            return
        if not stat.S_ISDIR(found.st_mode):
            raise FolderError(_no_folder(place))
        return


def _no_folder(path: Path) -> str:
    return f"{path} is no folder: name one, not a link or a file."


def check_private(path: Path) -> None:
    """Refuse a folder that is not this user's alone.

    Raises:
        FolderError: It is another user's, no folder, or open to others.
    """
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise FolderError(_no_folder(path))
    if found.st_uid != os.geteuid():
        raise FolderError(f"{path} belongs to another user: use a folder of your own.")
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise FolderError(
            f"{path} is open to other users ({stat.S_IMODE(found.st_mode):o}), and cached rows "
            f"tell what was prompted: run chmod 700 {path}."
        )


def disk_bytes(path: Path) -> int:
    """Return the bytes of all files at and under a path, as they count against the limit."""
    try:
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode):
            return max(found.st_size, found.st_blocks * 512)
        return sum(disk_bytes(entry) for entry in path.iterdir())
    except FileNotFoundError:
        return 0


def _file_bytes(path: Path) -> int:
    """Return a file's size; 0: there is none."""
    try:
        return path.lstat().st_size
    except OSError:
        return 0


def read_marker(root: Path) -> bytes | None:
    """Return a root's hash root; None: there is no whole marker of this format.

    Raises:
        FolderError: It was written in another format.
    """
    text = _read_checked(root / _MARKER)
    if text is None or text.get("magic") != _MAGIC:
        return None
    if text.get("format") != FORMAT:
        raise FolderError(
            f"{root} was written in format {text.get('format')} of the prefix cache, this version "
            f"writes {FORMAT}: use another folder, or remove this one."
        )
    try:
        known = bytes.fromhex(str(text.get("root")))
    except ValueError:
        return None
    return known if len(known) == _ROOT_BYTES else None


def read_meta(path: Path) -> FolderMeta | None:
    """Return what a sub-folder says of itself; None: nothing that is whole."""
    text = _read_checked(path / _META)
    if text is None:
        return None
    try:
        meta = FolderMeta(**text)
    except TypeError:
        return None
    types = {"identity": dict, "slot_bytes": int, "opened": int, "format": int}
    right = all(type(getattr(meta, name)) is kind for name, kind in types.items())
    return meta if right and meta.format == FORMAT else None


def seal_small(data: bytes) -> bytes:
    """Return a small file's content: a checksum, and the data."""
    return xxhash.xxh3_64_hexdigest(data).encode() + b" " + data


def read_small(path: Path) -> bytes | None:
    """Return a small file's data; None: there is none that is whole."""
    raw = _read_raw(path)
    if raw is None:
        return None
    digest, _, data = raw.partition(b" ")
    return data if xxhash.xxh3_64_hexdigest(data).encode() == digest else None


def _with_checksum(text: dict[str, Any]) -> bytes:
    body = json.dumps(text, sort_keys=True)
    return f"{xxhash.xxh3_64_hexdigest(body.encode())} {body}\n".encode()


def _read_raw(path: Path) -> bytes | None:
    try:
        handle = DiskFiles().open(path, writable=False)
    except OSError:
        return None
    try:
        return os.pread(handle, _SMALL_BYTES, 0)
    except OSError:
        return None
    finally:
        os.close(handle)


def _read_checked(path: Path) -> dict[str, Any] | None:
    raw = _read_raw(path)
    if raw is None:
        return None
    digest, _, body = raw.rstrip(b"\n").partition(b" ")
    if xxhash.xxh3_64_hexdigest(body).encode() != digest:
        return None
    try:
        text = json.loads(body)
    except ValueError:
        return None
    return text if isinstance(text, dict) else None


def _is_identity(name: str) -> bool:
    return len(name) == _NAME_CHARS and all(c in "0123456789abcdef" for c in name)


def _remove(path: Path) -> None:
    """Remove a file or a folder with all that is in it, as far as that is possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def core_name(index: int) -> str:
    """Return the name of the folder of one of several engine cores."""
    return f"core-{index}"


def _core_number(name: str) -> int | None:
    """Return which core's a folder is; None: no core's."""
    number = name.removeprefix("core-")
    return int(number) if name != number and number.isascii() and number.isdecimal() else None


def _is_core(name: str) -> bool:
    """Whether a folder's name is that of one of several engine cores."""
    return _core_number(name) is not None


def _try_lock(handle: int, how: int) -> bool:
    try:
        fcntl.flock(handle, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read_owner(handle: int) -> str:
    """Return who wrote to a lock file last."""
    return os.pread(handle, 200, 0).decode(errors="replace").partition("\n")[0].strip()


def _write_owner(handle: int, share: str) -> None:
    owner = f"process {os.getpid()} on {socket.gethostname()}{share}\n".encode()
    # Longer than the last one or not, it is never seen empty.
    os.pwrite(handle, owner, 0)
    os.ftruncate(handle, len(owner))


def _is_free(folder: Path, base: Path) -> bool:
    """Whether no server writes to a core's folder; of the one around it we hold the lock."""
    if folder == base:
        return True
    try:
        handle = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(handle)
    return True


def _is_ours(name: str) -> bool:
    plain = name.removesuffix(".new")
    is_folder = _is_identity(name) or _is_core(name)
    return plain in _OURS or is_folder or name.startswith("damaged-")
