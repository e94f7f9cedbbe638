"""How long a start takes until prefixes on the disk can be found, by the size of the index.

    python -m benchmarks.restart [--cells 10000 100000 1000000] [--repeats 3]

Fills an index with entries of 128 KiB of rows each (the rows file is sparse: no row is read), drops
it from the page cache, opens the folder as a server does, and looks up the 64 row groups of a
prompt. Prints one JSON line for each size: milliseconds of the fastest start.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from hashlib import sha256
from pathlib import Path

import numpy as np

from vllm.v1.kv_offload.cell_table import CellTable
from vllm.v1.kv_offload.cells import ObjectKind
from vllm.v1.kv_offload.folder import CacheFolder, Identity, rows_path
from vllm.v1.kv_offload.records import Extent, ObjectKey, ObjectSpec, Reservation

_OBJECT_BYTES = 128 << 10
_PROMPT_GROUPS = 64
_SPARE = 1.5


def _key(number: int) -> ObjectKey:
    return ObjectKey.of(ObjectKind.ROWS, sha256(str(number).encode()).digest())


def fill(root: Path, identity: Identity, num_cells: int, max_bytes: int) -> None:
    """Make a folder whose index has so many entries."""
    folder = CacheFolder(root, max_bytes)
    shape = folder.open_store(identity).shape
    folder.close()
    table = CellTable(shape.num_pages, shape.seed)
    slots = -(-(_OBJECT_BYTES + 16) // shape.slot_bytes)
    for number in range(num_cells):
        key = _key(number)
        index = table.choose_cell(key, ())
        assert index is not None
        extent = Extent(key, number + 1, _OBJECT_BYTES, ((number * slots, slots),))
        table.put(index, table.make_cell(Reservation(ObjectSpec(key, 768, _OBJECT_BYTES), extent)))
    path = root / identity.name
    (path / "index").write_bytes(table.raw)
    os.truncate(rows_path(path, 0), num_cells * slots * shape.slot_bytes)


def start(root: Path, identity: Identity, max_bytes: int) -> tuple[float, float, float]:
    """Return the seconds until the store is open, how many of a processor, and of a lookup."""
    handle = os.open(root / identity.name / "index", os.O_RDWR)
    os.fsync(handle)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(handle)
    began, busy = time.perf_counter(), time.thread_time()
    folder = CacheFolder(root, max_bytes)
    store = folder.open_store(identity)
    store.load()
    opened, busy = time.perf_counter(), time.thread_time() - busy
    found = store.find([_key(number) for number in range(_PROMPT_GROUPS)])
    looked_up = time.perf_counter()
    assert all(found)
    folder.close()
    return opened - began, busy, looked_up - opened


def main() -> None:
    """Measure each size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    identity = Identity({"weights": "none"}, 1, [_OBJECT_BYTES])
    for num_cells in arguments.cells:
        max_bytes = int(num_cells * _OBJECT_BYTES * _SPARE) + (64 << 20)
        with tempfile.TemporaryDirectory() as place:
            root = Path(place) / "cache"
            fill(root, identity, num_cells, max_bytes)
            times = (
                np.array([start(root, identity, max_bytes) for _ in range(arguments.repeats)]) * 1e3
            )
        opened, busy, looked_up = times.min(axis=0).round(2).tolist()
        print(
            json.dumps(
                {
                    "cells": num_cells,
                    "open_ms": opened,
                    "open_processor_ms": busy,
                    "lookup_ms": looked_up,
                }
            )
        )


if __name__ == "__main__":
    main()
