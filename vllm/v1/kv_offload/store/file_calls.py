"""All file calls of the store, in one small interface: a simulated disk stands in its place."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from vllm.utils.own_files import open_own

# Of one call; POSIX promises 1,024 buffers.
_MAX_BUFFERS = 1024

Buffer = bytes | bytearray | memoryview


class FileCalls(Protocol):
    """What the store asks of a file system. Every method may raise OSError."""

    def open(self, path: Path, *, writable: bool = True) -> int:
        """Open a regular file of this user's, made if it is not there; return its handle.

        A link, a folder or a pipe in its place is an OSError.
        """
        ...

    def close(self, handle: int) -> None:
        """Close a file."""
        ...

    def size(self, handle: int) -> int:
        """Return a file's size in bytes."""
        ...

    def allocate(self, handle: int, end: int) -> None:
        """Make a file ``end`` bytes long with all of them on the disk; new ones read as zeros."""
        ...

    def truncate(self, handle: int, end: int) -> None:
        """Cut a file to ``end`` bytes."""
        ...

    def read(self, handle: int, buffer: memoryview, offset: int) -> int:
        """Read into a buffer until it is full or the file ends; return the bytes read."""
        ...

    def write(self, handle: int, parts: Sequence[Buffer], offset: int) -> None:
        """Write all bytes of all parts, one behind the other."""
        ...

    def sync(self, handle: int) -> None:
        """Return when all that was written, and the file's size, would survive a power cut."""
        ...

    def sync_folder(self, path: Path) -> None:
        """Return when a folder's entries would survive a power cut."""
        ...

    def replace(self, path: Path, data: bytes) -> None:
        """Write a small file whole: after a power cut it is the old or the new one."""
        ...


class DiskFiles:
    """The file system of the operating system."""

    def open(self, path: Path, *, writable: bool = True) -> int:
        """Open a regular file, 0600.

        Raises:
            OSError: It cannot be opened, or is no regular file of this user's.
        """
        return open_own(path, writable=writable)

    def close(self, handle: int) -> None:
        """Close a file."""
        os.close(handle)

    def size(self, handle: int) -> int:
        """Return a file's size."""
        return os.fstat(handle).st_size

    def allocate(self, handle: int, end: int) -> None:
        """Reserve blocks for the whole file."""
        if end > 0:
            os.posix_fallocate(handle, 0, end)

    def truncate(self, handle: int, end: int) -> None:
        """Cut a file."""
        os.ftruncate(handle, end)

    def read(self, handle: int, buffer: memoryview, offset: int) -> int:
        """Read until the buffer is full or the file ends."""
        done = 0
        while done < len(buffer):
            count = os.preadv(handle, [buffer[done:]], offset + done)
            if not count:
                break
            done += count
        return done

    def write(self, handle: int, parts: Sequence[Buffer], offset: int) -> None:
        """Write all parts."""
        views = [memoryview(part).cast("B") for part in parts if len(part)]
        while views:
            count = os.pwritev(handle, views[:_MAX_BUFFERS], offset)
            offset += count
            while views and count >= len(views[0]):
                count -= len(views[0])
                del views[0]
            if views and count:
                views[0] = views[0][count:]

    def sync(self, handle: int) -> None:
        """Sync data, and the size with it."""
        os.fdatasync(handle)

    def sync_folder(self, path: Path) -> None:
        """Sync a folder."""
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def replace(self, path: Path, data: bytes) -> None:
        """Write beside, sync, rename, sync the folder."""
        beside = path.with_name(path.name + ".new")
        handle = self.open(beside)
        try:
            os.ftruncate(handle, 0)
            self.write(handle, [data], 0)
            os.fsync(handle)
        finally:
            os.close(handle)
        beside.replace(path)
        self.sync_folder(path.parent)
