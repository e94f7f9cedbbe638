"""Objects in host memory: slots, seals and an order of giving up as on a disk, without files.

The scheduler's side keeps the index, the workers the bytes. Neither outlives the process, so
nothing is synced, and an object is there as soon as the step has run that wrote it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from time import monotonic

from vllm.v1.kv_offload.store.file_calls import Buffer
from vllm.v1.kv_offload.store.folder import Identity, choose_slot_bytes, shape_store
from vllm.v1.kv_offload.store.object_store import ObjectStore

_INDEX = 0


class HostFile:
    """File calls on one buffer in memory; of a store's index, which is in memory anyway, none.

    Args:
        buffer: The bytes; None: it only has a size.
        size: Bytes.
    """

    def __init__(self, buffer: memoryview | None, size: int) -> None:
        self._buffer = buffer
        self._size = size

    def open(self, path: Path, *, writable: bool = True) -> int:
        """Refuse: there are no paths in memory."""
        raise OSError(f"{path} is no file in memory")

    def close(self, handle: int) -> None:
        """Nothing to close."""

    def size(self, handle: int) -> int:
        """Return the size of the rows; the index is empty."""
        return 0 if handle == _INDEX else self._size

    def allocate(self, handle: int, end: int) -> None:
        """Nothing: all of it is there from the start."""

    def truncate(self, handle: int, end: int) -> None:
        """Nothing: it never shrinks."""

    def read(self, handle: int, buffer: memoryview, offset: int) -> int:
        """Copy bytes out."""
        if self._buffer is None:
            return 0
        part = self._buffer[offset : offset + len(buffer)]
        buffer[: len(part)] = part
        return len(part)

    def write(self, handle: int, parts: Sequence[Buffer], offset: int) -> None:
        """Copy bytes in."""
        if self._buffer is None:
            return
        for part in parts:
            view = memoryview(part).cast("B")
            self._buffer[offset : offset + len(view)] = view
            offset += len(view)

    def sync(self, handle: int) -> None:
        """Nothing: it does not outlive the process."""

    def sync_folder(self, path: Path) -> None:
        """Nothing."""

    def replace(self, path: Path, data: bytes) -> None:
        """Refuse: there are no paths in memory."""
        raise OSError(f"{path} is no file in memory")


def host_slot_bytes(object_bytes: Sequence[int]) -> int:
    """Return the bytes of a slot, which both sides agree on."""
    return choose_slot_bytes(object_bytes)


def make_host_store(
    object_bytes: Sequence[int], num_workers: int, max_bytes: int
) -> ObjectStore | None:
    """Return an empty store; None if it is too small for four objects.

    Args:
        object_bytes: Sizes of usual objects at a worker, the commonest first.
        num_workers: Workers, each with its rows.
        max_bytes: What all of it may take.
    """
    identity = Identity({}, num_workers, object_bytes)
    slot_bytes = host_slot_bytes(object_bytes)
    shape = shape_store(identity, max_bytes, slot_bytes)
    if shape.max_slots * slot_bytes < 4 * max(object_bytes):
        return None
    size = shape.max_slots * slot_bytes
    rows = range(_INDEX + 1, _INDEX + 1 + num_workers)
    store = ObjectStore(HostFile(None, size), _INDEX, rows, shape, lambda wanted: wanted, monotonic)
    store.opening.load()
    return store
