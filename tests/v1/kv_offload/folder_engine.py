"""A folder with its store and the rows of one worker, as an engine has them, and known objects."""

from __future__ import annotations

import os
import random
from hashlib import sha256
from pathlib import Path

from vllm.v1.kv_offload.store.cells import ObjectKind
from vllm.v1.kv_offload.store.file_calls import DiskFiles
from vllm.v1.kv_offload.store.folder import CacheFolder, Identity, rows_path
from vllm.v1.kv_offload.store.object_store import ObjectStore
from vllm.v1.kv_offload.store.records import ObjectKey, ObjectSpec
from vllm.v1.kv_offload.store.rows_file import CorruptObjectError, RowsFile

LIMIT = 8 << 20
OBJECT = 140_000


def identity_of(name: str, size: int = OBJECT) -> Identity:
    return Identity({"weights": name}, 1, [size])


class Engine:
    """A folder, a store and the rows of one worker."""

    def __init__(self, root: Path, name: str = "a", limit: int = LIMIT, num_cores: int = 1) -> None:
        self.folder = CacheFolder(root, limit, num_cores=num_cores)
        self.store: ObjectStore = self.folder.open_store(identity_of(name))
        self.store.opening.load()
        self.store.writer.make_room()
        path = rows_path(root / identity_of(name).name, 0)
        self.handle = DiskFiles().open(path)
        self.rows = RowsFile(DiskFiles(), self.handle, self.store.shape.slot_bytes)

    def close(self) -> None:
        os.close(self.handle)
        self.folder.close()

    def write(self, number: int) -> bool:
        spec = ObjectSpec(key_of(number), number, OBJECT)
        (reservation,) = self.store.reserve([spec])
        if reservation is None:
            self.store.writer.make_room()
            (reservation,) = self.store.reserve([spec])
        if reservation is None:
            return False
        self.rows.write(reservation.extent, [content_of(number)])
        self.rows.sync()
        return bool(self.store.writer.commit([reservation]))

    def count_right(self) -> int:
        """Read all there is; nothing may be wrong and pass."""
        right = 0
        for entry in self.store.content.list_objects():
            try:
                data = self.rows.read(entry.extent)
            except CorruptObjectError:
                continue
            assert data == content_of(entry.position)
            right += 1
        return right


def key_of(number: int) -> ObjectKey:
    return ObjectKey.of(ObjectKind.ROWS, sha256(str(number).encode()).digest())


def content_of(number: int) -> bytes:
    return random.Random(number).randbytes(OBJECT)
