"""Objects' bytes in slots of one preallocated file, each sealed by a digest.

An object is its bytes and a seal of 16: xxh3_128 of them, of its name and of the sequence of its
write. Slots that were given to another object, that were never written, or that lost a sector
do not pass, whoever wrote them. It detects accidents: who can write the folder can forge.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import xxhash

from vllm.exceptions import VllmError
from vllm.v1.kv_offload.store.file_calls import Buffer, FileCalls
from vllm.v1.kv_offload.store.records import Extent

SEAL_BYTES = 16


class CorruptObjectError(VllmError):
    """An object's bytes are not those that were written."""


def make_seal(parts: Sequence[Buffer], extent: Extent) -> bytes:
    """Return the seal of an object."""
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part)
    digest.update(struct.pack("<16sBQ", extent.key.digest, int(extent.key.kind), extent.sequence))
    return digest.digest()


class Bounce:
    """Memory to read one object after another into: new memory costs as much as reading.

    Owns: the memory. For one thread.
    """

    def __init__(self) -> None:
        self._memory = memoryview(b"")

    def take(self, num_bytes: int) -> memoryview:
        """Return memory, whose content stands until the next call."""
        if len(self._memory) < num_bytes:
            self._memory = memoryview(bytearray(num_bytes))
        return self._memory[:num_bytes]


class RowsFile:
    """The rows of one worker.

    Owns: nothing; its opener closes the handle.

    Args:
        files: File calls.
        handle: Of the file.
        slot_bytes: Bytes of a slot.
    """

    def __init__(self, files: FileCalls, handle: int, slot_bytes: int) -> None:
        self._files = files
        self._handle = handle
        self.slot_bytes = slot_bytes

    def write(self, extent: Extent, parts: Sequence[Buffer]) -> None:
        """Write an object of ``extent.num_bytes`` and its seal; ``sync`` makes it last.

        Raises:
            OSError: The file system refused; nothing of the object may be used.
        """
        assert sum(len(part) for part in parts) == extent.num_bytes
        pieces = [memoryview(part) for part in (*parts, make_seal(parts, extent))]
        for offset, length in self._runs(extent):
            taken: list[memoryview] = []
            while length and pieces:
                piece = pieces[0][:length]
                taken.append(piece)
                length -= len(piece)
                if len(piece) == len(pieces[0]):
                    del pieces[0]
                else:
                    pieces[0] = pieces[0][len(piece) :]
            self._files.write(self._handle, taken, offset)

    def sync(self) -> None:
        """Return when all written objects would survive a power cut.

        Raises:
            OSError: They might not, even if another call succeeds.
        """
        self._files.sync(self._handle)

    def read(self, extent: Extent, bounce: Bounce | None = None) -> memoryview:
        """Return an object's bytes, verified.

        Args:
            extent: Where it is.
            bounce: Memory to read into; None: new memory.

        Raises:
            CorruptObjectError: They are not those that were written.
            OSError: The file cannot be read.
        """
        total = extent.num_bytes + SEAL_BYTES
        data = memoryview(bytearray(total)) if bounce is None else bounce.take(total)
        done = 0
        for offset, length in self._runs(extent):
            part = data[done : done + length]
            done += self._files.read(self._handle, part, offset)
        payload = data[: extent.num_bytes]
        if done != total or not self._is_sealed(payload, data[extent.num_bytes :], extent):
            raise CorruptObjectError(
                f"The object at slot {extent.slots[0][0]} is not what was written there."
            )
        return payload

    def _is_sealed(self, payload: memoryview, seal: memoryview, extent: Extent) -> bool:
        return bytes(seal) == make_seal([payload], extent)

    def _runs(self, extent: Extent) -> Iterator[tuple[int, int]]:
        """Iterate over (offset, length) of an object's pieces in the file."""
        left = extent.num_bytes + SEAL_BYTES
        for slot, count in extent.slots:
            length = min(left, count * self.slot_bytes)
            yield slot * self.slot_bytes, length
            left -= length
