"""A simulated disk that loses power at any call: what was not synced stays, goes, or is torn."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

SECTOR = 512


class PowerCutError(BaseException):
    """The power went. No error that a caller could handle."""


class _File:
    def __init__(self) -> None:
        self.cached = bytearray()
        self.durable = bytearray()
        self.is_entry_durable = False
        # Sectors written since the last sync, with all contents they had since.
        self.versions: dict[int, list[bytes]] = {}


class CrashDisk:
    """File calls over memory.

    Args:
        rng: Chooses what survives.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._files: dict[Path, _File] = {}
        self._handles: dict[int, _File] = {}
        self._next = 0
        self.calls_left: int | None = None
        self.num_syncs = 0
        self.skipped_syncs: set[Path] = set()
        self._paths: dict[int, Path] = {}
        self.fail: dict[tuple[str, Path], int] = {}
        # Called before each write: what another thread does meanwhile.
        self.meanwhile: Callable[[Path], None] = lambda path: None

    # ---- the interface -----------------------------------------------------------------------

    def open(self, path: Path, *, writable: bool = True) -> int:
        self._call("open", path)
        file = self._files.setdefault(path, _File())
        self._next += 1
        self._handles[self._next], self._paths[self._next] = file, path
        return self._next

    def close(self, handle: int) -> None:
        del self._handles[handle]

    def size(self, handle: int) -> int:
        return len(self._handles[handle].cached)

    def allocate(self, handle: int, end: int) -> None:
        self._call("allocate", self._paths[handle])
        file = self._handles[handle]
        file.cached.extend(bytes(max(0, end - len(file.cached))))

    def truncate(self, handle: int, end: int) -> None:
        self._call("truncate", self._paths[handle])
        del self._handles[handle].cached[end:]

    def read(self, handle: int, buffer: memoryview, offset: int) -> int:
        self._call("read", self._paths[handle])
        data = self._handles[handle].cached[offset : offset + len(buffer)]
        buffer[: len(data)] = data
        return len(data)

    def write(self, handle: int, parts: Sequence[bytes], offset: int) -> None:
        self.meanwhile(self._paths[handle])
        data = b"".join(bytes(part) for part in parts)
        try:
            self._call("write", self._paths[handle])
        except PowerCutError:
            # Some of it had reached the cache, whole sectors of which may reach the disk.
            cut = self._rng.randrange(len(data) + 1)
            self._write(handle, data[:cut], offset)
            raise
        self._write(handle, data, offset)

    def _write(self, handle: int, data: bytes, offset: int) -> None:
        file = self._handles[handle]
        end = offset + len(data)
        file.cached.extend(bytes(max(0, end - len(file.cached))))
        file.cached[offset:end] = data
        if data:
            for sector in range(offset // SECTOR, (end - 1) // SECTOR + 1):
                now = bytes(file.cached[sector * SECTOR : (sector + 1) * SECTOR])
                file.versions.setdefault(sector, []).append(now)

    def sync(self, handle: int) -> None:
        self._call("sync", self._paths[handle])
        self.num_syncs += 1
        if self._paths[handle] in self.skipped_syncs:
            return
        file = self._handles[handle]
        file.durable = bytearray(file.cached)
        file.versions = {}

    def sync_folder(self, path: Path) -> None:
        self._call("sync", path)
        for name, file in self._files.items():
            file.is_entry_durable |= name.parent == path

    def replace(self, path: Path, data: bytes) -> None:
        self._call("replace", path)
        file = self._files.setdefault(path, _File())
        file.cached, file.durable, file.versions = bytearray(data), bytearray(data), {}
        file.is_entry_durable = True

    # ---- faults ------------------------------------------------------------------------------

    def _call(self, kind: str, path: Path) -> None:
        if self.calls_left is not None:
            if self.calls_left == 0:
                raise PowerCutError
            self.calls_left -= 1
        left = self.fail.get((kind, path))
        if left is not None:
            self.fail[kind, path] = left - 1
            if left <= 0:
                if kind == "sync":
                    self._lose_dirty(path)
                raise OSError(5, "Input/output error")

    def _lose_dirty(self, path: Path) -> None:
        """After a failed sync the kernel takes dirty pages for clean: a retry succeeds falsely."""
        file = self._files[path]
        lost = [s for s in file.versions if self._rng.random() < 0.5]
        for sector in lost:
            low = sector * SECTOR
            file.cached[low : low + SECTOR] = file.durable[low : low + SECTOR].ljust(SECTOR, b"\0")
            del file.versions[sector]

    def power_cut(self) -> None:
        """Keep what was synced and, of the rest, any subset of sectors in any of their versions."""
        self.calls_left = None
        self._handles = {}
        keep = self._rng.choice((0.0, 0.2, 0.5, 0.8, 1.0))
        for path, file in list(self._files.items()):
            if not file.is_entry_durable and self._rng.random() > keep:
                del self._files[path]
                continue
            file.is_entry_durable = True
            content = bytearray(file.durable)
            if len(file.cached) != len(content) and self._rng.random() < keep:
                content.extend(bytes(max(0, len(file.cached) - len(content))))
                del content[len(file.cached) :]
            for sector, versions in file.versions.items():
                low = sector * SECTOR
                if self._rng.random() < keep and low < len(content):
                    new = self._rng.choice(versions)
                    high = min(len(content), low + len(new))
                    content[low:high] = new[: high - low]
            file.cached, file.durable, file.versions = content, bytearray(content), {}

    def flip_bit(self, path: Path) -> None:
        """Change one bit of a file, on the disk and in the cache."""
        file = self._files[path]
        bit = self._rng.randrange(len(file.cached) * 8)
        for content in (file.cached, file.durable):
            content[bit // 8] ^= 1 << bit % 8

    def content(self, path: Path) -> bytearray:
        """Return a file's bytes."""
        return self._files[path].cached
