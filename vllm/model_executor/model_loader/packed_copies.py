"""Packed matrices in files, from which the next start takes them in place of packing anew.

    pieces    the memory of the matrices' tensors, each at a multiple of 64 bytes
    index     JSON: of each matrix what it is, where its tensors lie, the xxh3_64 of their bytes
    footer    where the index lies, its xxh3_128

A file is written whole under another name and then renamed: of two that write at once, one does. It
is named by the checkpoint's digest, by what packed it and by the matrices in it, so that a start
that needs more (a block that drafts) adds a second file of those alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import struct
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
import xxhash

from vllm.exceptions import CheckpointError
from vllm.logger import init_logger
from vllm.model_executor.layers.quantization.panels import (
    GroupValues,
    PackedRows,
    PanelParts,
)
from vllm.utils.own_files import open_own

logger = init_logger(__name__)

_SUFFIX = ".panels"
# Of a file that is being written, locked by who writes it.
_PART_SUFFIX = ".part"
_MAGIC = b"panels 1"
# Magic, where the index begins, how many bytes it has, its digest.
_FOOTER = struct.Struct("<8sQQ16s")
_ALIGNMENT = 64
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.int32,
        torch.int8,
        torch.uint8,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
    )
}


@dataclass(frozen=True, slots=True)
class _Entry:
    """A matrix as an index describes it, and the file that holds it."""

    said: dict[str, Any]
    file: _MappedCopies


class PackedCopies:
    """The packed matrices of one checkpoint in a folder.

    Args:
        folder: Where the files are; it exists.
        checkpoint: A digest of the checkpoint's files.
        maker: What packed them: the files of others are not read.
        num_threads: Threads that check the bytes.

    A matrix is there once it was checked: bytes that nobody asks for, as of drafts in a start
    without them, are not read.

    Owns: the mappings of the files, until they are closed.
    """

    def __init__(self, folder: Path, checkpoint: str, maker: str, num_threads: int) -> None:
        self._folder, self._stem = folder, f"{checkpoint}-"
        self._name = f"{checkpoint}-{maker}-"
        self._num_threads = num_threads
        self._unchecked: dict[str, _Entry] = {}
        self._entries: dict[str, _Entry] = {}
        for path in sorted(folder.glob(f"{self._name}*{_SUFFIX}")):
            self._open(path)

    def check(self, names: Iterable[str]) -> None:
        """Compare matrices with their checksums; a file in which one is damaged is removed."""
        wanted = {name: self._unchecked[name] for name in names if name in self._unchecked}
        with ThreadPoolExecutor(max(1, self._num_threads)) as pool:
            sound = list(pool.map(lambda own: own.file.is_sound(own.said), wanted.values()))
        damaged: dict[Path, list[str]] = {}
        for (name, own), is_sound in zip(wanted.items(), sound, strict=True):
            if not is_sound:
                damaged.setdefault(own.file.path, []).append(name)
        for path, bad in damaged.items():
            _remove(path, f"{len(bad)} matrices are damaged, the first {bad[0]}")
        for name, own in wanted.items():
            if own.file.path not in damaged:
                self._entries[name] = self._unchecked.pop(name)
        taken = Counter(own.file.path for own in wanted.values())
        for path in taken.keys() - damaged.keys():
            logger.info("%d packed matrices are taken from %s", taken[path], path)
        self._unchecked = {
            name: own for name, own in self._unchecked.items() if own.file.path not in damaged
        }

    def has(self, name: str, num_rows: int, num_columns: int) -> bool:
        """Whether there is a matrix, checked already, of a name and of some sizes."""
        entry = self._entries.get(name)
        return entry is not None and entry.said["size"] == [num_rows, num_columns]

    def read(self, name: str, inputs: Any) -> PackedRows:
        """Return a matrix that is there, with what its products' inputs are rounded to."""
        entry = self._entries[name]
        return PackedRows.of_parts(entry.file.read(entry.said), inputs)

    def write(self, matrices: Sequence[tuple[str, PackedRows]]) -> None:
        """Write matrices into a file of their own, if there is room, and drop those it replaces.

        What prevents it is said in the log: the matrices are in memory all the same.
        """
        names = xxhash.xxh3_64_hexdigest("\n".join(name for name, _ in matrices).encode())
        path = self._folder / f"{self._name}{names}{_SUFFIX}"
        try:
            num_bytes = _write_file(path, matrices)
        except OSError as error:
            logger.warning(
                "The packed weights cannot be kept in %s (%s): the next start packs them again",
                self._folder,
                error,
            )
            return
        if num_bytes is None:
            logger.info("Another process keeps the packed weights, or kept them: %s", path)
            return
        logger.info(
            "%d packed matrices (%.2f GB) are kept in %s for the next start",
            len(matrices),
            num_bytes / 1e9,
            path,
        )
        for other in self._folder.glob(f"{self._stem}*{_SUFFIX}"):
            if not other.name.startswith(self._name):
                logger.info("%s, which another version packed, is removed", other)
                with contextlib.suppress(OSError):
                    other.unlink()
        for part in self._folder.glob(f"{self._stem}*{_PART_SUFFIX}"):
            _remove_unfinished(part)

    def _open(self, path: Path) -> None:
        """Take what a file says it holds; one that is cut short is removed.

        One that cannot be read now may be sound: it is left as it is.
        """
        try:
            file = _MappedCopies(path)
            index = file.read_index()
        except OSError as error:
            logger.warning("%s is not used: %s", path, error)
            return
        except CheckpointError as error:
            _remove(path, str(error))
            return
        self._unchecked |= {name: _Entry(said, file) for name, said in index.items()}


class _MappedCopies:
    """One file, mapped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with os.fdopen(open_own(path, writable=False), "rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            if size < _FOOTER.size:
                raise CheckpointError(f"it ends after {size:,} bytes")
            # Private, as torch wants memory it could write; nobody does, so none is set aside.
            flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
            self._memory = mmap.mmap(opened.fileno(), size, flags=flags)
        self._bytes = memoryview(self._memory)

    def read_index(self) -> dict[str, dict[str, Any]]:
        """Return what the file holds, by name.

        Raises:
            CheckpointError: It is cut short or damaged.
        """
        magic, start, length, digest = _FOOTER.unpack(self._bytes[-_FOOTER.size :])
        if magic != _MAGIC or start + length + _FOOTER.size != len(self._bytes):
            raise CheckpointError("it does not end as a whole one does")
        raw = bytes(self._bytes[start : start + length])
        if xxhash.xxh3_128_digest(raw) != digest:
            raise CheckpointError("its index is damaged")
        index: dict[str, dict[str, Any]] = json.loads(raw)
        return index

    def is_sound(self, said: dict[str, Any]) -> bool:
        """Whether a matrix's bytes are those that were written."""
        digest: str = said["xxh3"]
        return _digest_pieces(self._bytes[at : at + n] for at, n in said["pieces"]) == digest

    def read(self, said: dict[str, Any]) -> PanelParts:
        """Return a matrix that looks into the file."""
        pieces = {
            at: torch.frombuffer(self._memory, dtype=torch.uint8, count=size, offset=at)
            for at, size in said["pieces"]
        }
        scales = _read_numbers(said["scales"], pieces)
        assert scales is not None, "there are always scales"
        num_rows, num_columns = said["size"]
        return PanelParts(
            said["kind"],
            num_rows,
            num_columns,
            said["group"],
            _view(said["codes"], pieces),
            scales,
            _read_numbers(said["offsets"], pieces),
            None if said["order"] is None else _view(said["order"], pieces),
        )


class _Layout:
    """Where in a file the matrices' memory is to lie.

    Attributes:
        index: As in the file.
        pieces: Place -> bytes.
        end: Behind the last of them.
    """

    def __init__(self, matrices: Sequence[tuple[str, PackedRows]]) -> None:
        self.index: dict[str, dict[str, Any]] = {}
        self.pieces: dict[int, memoryview] = {}
        self.end = 0
        for name, packed in matrices:
            self.index[name] = self._describe(packed.parts)

    def _describe(self, parts: PanelParts) -> dict[str, Any]:
        # Tensors may be views of one another: what they share is there once.
        found: dict[int, int] = {}

        def place(tensor: torch.Tensor | None) -> list[Any] | None:
            if tensor is None:
                return None
            storage = tensor.untyped_storage()
            at = found.get(storage.data_ptr())
            if at is None:
                at = found[storage.data_ptr()] = self.end
                whole = torch.empty(0, dtype=torch.uint8).set_(storage)
                self.pieces[at] = whole.numpy().data
                self.end = -(-(at + storage.nbytes()) // _ALIGNMENT) * _ALIGNMENT
            dtype = str(tensor.dtype).removeprefix("torch.")
            return [at, tensor.storage_offset(), dtype, list(tensor.shape), list(tensor.stride())]

        def place_numbers(own: GroupValues | None) -> dict[str, Any] | None:
            if own is None:
                return None
            return {
                "values": place(own.values),
                "factors": place(own.factors),
                "steps": place(own.steps),
                "rest": [own.fan, own.part, own.step],
            }

        said: dict[str, Any] = {
            "kind": parts.kind,
            "size": [parts.num_rows, parts.num_columns],
            "group": parts.group,
            "codes": place(parts.codes),
            "scales": place_numbers(parts.scales),
            "offsets": place_numbers(parts.offsets),
            "order": place(parts.order),
        }
        said["pieces"] = [[at, len(self.pieces[at])] for at in found.values()]
        said["xxh3"] = _digest_pieces(self.pieces[at] for at in found.values())
        return said


def fingerprint(matrices: Sequence[tuple[str, PackedRows]]) -> str:
    """Return what differs if matrices differ in one bit, or in how they lie."""
    return xxhash.xxh3_64_hexdigest(json.dumps(_Layout(matrices).index).encode())


def _view(own: list[Any], pieces: dict[int, torch.Tensor]) -> torch.Tensor:
    at, offset, dtype, shape, strides = own
    return torch.as_strided(pieces[at].view(_DTYPES[dtype]), shape, strides, offset)


def _read_numbers(
    own: dict[str, Any] | None, pieces: dict[int, torch.Tensor]
) -> GroupValues | None:
    if own is None:
        return None
    factors, steps = (
        None if own[part] is None else _view(own[part], pieces) for part in ("factors", "steps")
    )
    fan, part, step = own["rest"]
    return GroupValues(_view(own["values"], pieces), factors, fan, steps, part, step)


def _digest_pieces(pieces: Iterable[memoryview]) -> str:
    digest = xxhash.xxh3_64()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def _remove(path: Path, reason: str) -> None:
    logger.warning("%s is not used, and is written anew: %s", path, reason)
    with contextlib.suppress(OSError):
        path.unlink()


def _remove_unfinished(part: Path) -> None:
    """Remove what somebody left who was killed; one that is being written stays."""
    with contextlib.suppress(OSError), os.fdopen(open_own(part), "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_still_at(part, file.fileno()):
            logger.info("%s, which was never finished, is removed", part)
            part.unlink()


def _is_still_at(path: Path, handle: int) -> bool:
    """Whether a file that was opened has not been renamed or removed since."""
    return path.exists() and os.path.samestat(os.fstat(handle), path.stat())


def _write_file(path: Path, matrices: Sequence[tuple[str, PackedRows]]) -> int | None:
    """Write a file whole and return its bytes; None: another process does, or did.

    Raises:
        OSError: It cannot be written, for want of room or rights.
    """
    part = path.with_suffix(_PART_SUFFIX)
    handle = open_own(part)
    with os.fdopen(handle, "r+b") as file:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        # Whoever held the lock before may have renamed the file that was opened here.
        if not _is_still_at(part, handle):
            return None
        if path.exists():
            part.unlink()
            return None
        try:
            return _fill(file, part, path, _Layout(matrices))
        except OSError:
            part.unlink()
            raise


def _fill(file: BinaryIO, part: Path, path: Path, layout: _Layout) -> int:
    index = json.dumps(layout.index, separators=(",", ":")).encode()
    num_bytes = layout.end + len(index) + _FOOTER.size
    os.ftruncate(file.fileno(), 0)
    # All room at once: a disk that is too small says so before minutes of writing.
    os.posix_fallocate(file.fileno(), 0, num_bytes)
    for at, piece in layout.pieces.items():
        file.seek(at)
        file.write(piece)
    file.seek(layout.end)
    file.write(index)
    file.write(_FOOTER.pack(_MAGIC, layout.end, len(index), xxhash.xxh3_128_digest(index)))
    file.flush()
    os.fsync(file.fileno())
    part.rename(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    return num_bytes
