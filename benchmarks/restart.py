"""How long a start takes until prefixes on the disk can be found, by the size of the index.

    python -m benchmarks.restart [--cells 10000 100000 1000000] [--repeats 5]

Fills an index with entries of 128 KiB of rows each (the rows file is sparse: no row is read), drops
it from the page cache, opens the folder in a thread as an engine core does, and looks up the 64 row
groups of a prompt until they are found. Prints one line: medians of milliseconds by the clock and
of a processor, until the first hit and until all is read, when writing may begin; and for how long
a thread that asks for nothing had to wait meanwhile at worst (the interpreter's lock).
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
import time
from hashlib import sha256
from pathlib import Path

import numpy as np

from benchmarks.result import print_result
from vllm.v1.kv_offload.store.cell_table import CellTable
from vllm.v1.kv_offload.store.cells import CELL, ObjectKind
from vllm.v1.kv_offload.store.folder import CacheFolder, Identity, rows_path
from vllm.v1.kv_offload.store.keeper import StoreKeeper
from vllm.v1.kv_offload.store.opening import IndexUnreadError
from vllm.v1.kv_offload.store.records import Extent, ObjectKey, ObjectSpec, Reservation

_OBJECT_BYTES = 128 << 10
_PROMPT_GROUPS = 64
_SPARE = 1.5
_TICK_S = 0.0005


def _key(number: int) -> ObjectKey:
    return ObjectKey.of(ObjectKind.ROWS, sha256(str(number).encode()).digest())


def fill(root: Path, identity: Identity, num_cells: int, max_bytes: int) -> None:
    """Make a folder whose index has so many entries."""
    folder = CacheFolder(root, max_bytes)
    shape = folder.open_store(identity).shape
    folder.close()
    table = CellTable(shape.num_pages, shape.seed)
    slots = -(-(_OBJECT_BYTES + 16) // shape.slot_bytes)
    cells = np.zeros(num_cells, CELL)
    for number in range(num_cells):
        key = _key(number)
        extent = Extent(key, number + 1, _OBJECT_BYTES, ((number * slots, slots),))
        spec = ObjectSpec(key, 768, _OBJECT_BYTES)
        (cells[number],) = np.frombuffer(table.make_cell(Reservation(spec, extent)), CELL)
    table.take_cells(cells)
    path = root / identity.name
    (path / "index").write_bytes(table.raw)
    os.truncate(rows_path(path, 0), num_cells * slots * shape.slot_bytes)


def start(root: Path, identity: Identity, max_bytes: int) -> dict[str, float]:
    """Return the seconds of one start, until the first hit and until all is read."""
    handle = os.open(root / identity.name / "index", os.O_RDWR)
    os.fsync(handle)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(handle)
    keys = [_key(number) for number in range(_PROMPT_GROUPS)]
    woken = threading.Event()
    began, busy = time.perf_counter(), time.process_time()
    keeper = StoreKeeper(lambda: CacheFolder(root, max_bytes), lambda note, stop: identity)
    keeper.bind_wake(woken.set)
    while not _is_found(keeper, keys):
        woken.wait()
        woken.clear()
    hit, hit_busy = time.perf_counter(), time.process_time()
    longest = 0.0
    while keeper.store is None or not keeper.store.state.is_ready:
        before = time.perf_counter()
        time.sleep(_TICK_S)
        longest = max(longest, time.perf_counter() - before - _TICK_S)
    ready, ready_busy = time.perf_counter(), time.process_time()
    keeper.close()
    return {
        "first_hit_ms": (hit - began) * 1e3,
        "first_hit_processor_ms": (hit_busy - busy) * 1e3,
        "all_read_ms": (ready - began) * 1e3,
        "all_read_processor_ms": (ready_busy - busy) * 1e3,
        "longest_wait_ms": longest * 1e3,
    }


def _is_found(keeper: StoreKeeper, keys: list[ObjectKey]) -> bool:
    if keeper.store is None:
        return False
    try:
        return all(keeper.store.find(keys))
    except IndexUnreadError:
        return False


def main() -> None:
    """Measure each size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    identity = Identity({"weights": "none"}, 1, [_OBJECT_BYTES])
    values: dict[str, dict[str, float]] = {}
    for num_cells in arguments.cells:
        max_bytes = int(num_cells * _OBJECT_BYTES * _SPARE) + (64 << 20)
        with tempfile.TemporaryDirectory() as place:
            root = Path(place) / "cache"
            fill(root, identity, num_cells, max_bytes)
            starts = [start(root, identity, max_bytes) for _ in range(arguments.repeats)]
        values[str(num_cells)] = {
            name: round(statistics.median(each[name] for each in starts), 1) for name in starts[0]
        }
    load = round(os.getloadavg()[0], 1)
    print_result("restart", {"repeats": arguments.repeats, "load": load}, values)


if __name__ == "__main__":
    main()
