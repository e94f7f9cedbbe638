"""Lookups before the index is read: what is found is right, and nothing is written too early."""

import os
import shutil
import threading

import numpy as np
import pytest

from tests.v1.kv_offload.folder_engine import key_of
from vllm.v1.kv_offload.store.cell_table import CellTable
from vllm.v1.kv_offload.store.cells import CELL, CELL_BYTES, PAGE_BYTES, ObjectKind
from vllm.v1.kv_offload.store.file_calls import DiskFiles
from vllm.v1.kv_offload.store.folder import CacheFolder, Identity, rows_path, shape_store
from vllm.v1.kv_offload.store.keeper import StoreKeeper
from vllm.v1.kv_offload.store.opening import IndexUnreadError
from vllm.v1.kv_offload.store.records import Extent, ObjectKey, ObjectSpec, Reservation
from vllm.v1.kv_offload.store.rows_file import RowsFile

LIMIT = 16 << 20
SIZE = 4000
NUM_OBJECTS = 200
IDENTITY = Identity({"weights": "a"}, 1, [SIZE])
# Parts of the pass are larger; what lookups read, single pages here and there, is not.
PART_BYTES = 40 * PAGE_BYTES
TIMEOUT_S = 60


class GatedFiles(DiskFiles):
    """Lets one part of the index be read for each permit, or fails from some part on."""

    def __init__(self) -> None:
        self.permits = threading.Semaphore(0)
        self.error: Exception | None = None

    def read(self, handle, buffer, offset):
        if len(buffer) > PART_BYTES:
            assert self.permits.acquire(timeout=TIMEOUT_S)
            if self.error is not None:
                raise self.error
        return super().read(handle, buffer, offset)


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    root = tmp_path_factory.mktemp("index") / "cache"
    folder = CacheFolder(root, LIMIT)
    store = folder.open_store(IDENTITY)
    store.opening.load()
    store.writer.make_room()
    assert store.shape.index_bytes > 4 * PART_BYTES
    handle = os.open(rows_path(root / IDENTITY.name, 0), os.O_RDWR)
    rows = RowsFile(DiskFiles(), handle, store.shape.slot_bytes)
    for low in range(0, NUM_OBJECTS, 20):
        specs = [ObjectSpec(key_of(n), n, SIZE) for n in range(low, low + 20)]
        reserved = store.reserve(specs)
        for reservation in reserved:
            rows.write(reservation.extent, [bytes([reservation.spec.position]) * SIZE])
        assert len(store.writer.commit(reserved)) == 20
        store.writer.make_room()
    os.close(handle)
    folder.close()
    return root


class Start:
    """A start over a folder whose index is read by permit."""

    def __init__(self, root) -> None:
        self.files = GatedFiles()
        self.woken = threading.Event()
        self.keeper = StoreKeeper(
            lambda: CacheFolder(root, LIMIT, files=self.files), lambda note, stop: IDENTITY
        )
        self.keeper.bind_wake(self.woken.set)
        self.wait(lambda: self.keeper.store is not None and not self.keeper.is_opening)
        self.store = self.keeper.store

    def wait(self, is_so) -> None:
        while not is_so():
            assert self.woken.wait(TIMEOUT_S)
            self.woken.clear()

    def find(self, numbers):
        """Look objects up until the disk's thread, let go on by one part, has read their pages."""
        found, permits = [], [1]

        def ask():
            try:
                found[:] = self.store.find([key_of(n) for n in numbers])
            except IndexUnreadError:
                # Not before it is known what is wanted.
                if permits:
                    self.files.permits.release(permits.pop())
                return False
            return True

        self.wait(ask)
        return found

    def end(self) -> None:
        for _ in range(100):
            self.files.permits.release()
        self.keeper.close()


@pytest.fixture
def start(template):
    started = Start(template)
    yield started
    started.end()


def test_what_is_looked_up_is_found_before_the_rest_is_read(start):
    store = start.store
    with pytest.raises(IndexUnreadError):
        store.find([key_of(n) for n in range(NUM_OBJECTS)])
    found = start.find(range(NUM_OBJECTS))
    assert [entry.position for entry in found] == list(range(NUM_OBJECTS))
    # Nothing may be written: nobody knows which slots are free.
    assert not store.state.is_ready
    assert store.contains([key_of(0), key_of(999)]) == [False, False]
    assert store.reserve([ObjectSpec(key_of(999), 1, SIZE)]) == [None]
    # A use and a fault that are seen now are not forgotten.
    assert store.pin(found[:2])
    store.unpin(found[:2])
    store.report_corrupt(found[2])
    assert store.find([key_of(2)]) == [None]
    for _ in range(100):
        start.files.permits.release()
    start.wait(lambda: store.state.is_ready)
    assert store.find([key_of(1), key_of(2)])[1] is None
    assert len(store.content.list_objects()) == NUM_OBJECTS - 1
    assert store.content.find_faults() == []
    uses = {
        entry.position: store.state.entries.table.cells["last_use"][entry.cell]
        for entry in found[:4]
    }
    assert uses[0] == uses[1] > uses[3]
    assert store.counts.corrupt == 1


@pytest.mark.parametrize(
    "error", [OSError(5, "Input/output error"), ZeroDivisionError("a fault of ours")]
)
def test_an_index_that_cannot_be_read_to_its_end_still_serves_what_was_read(start, error):
    found = start.find(range(10))
    start.files.error = error
    start.files.permits.release()
    start.wait(lambda: not start.store.state.is_writable)
    assert start.store.find([key_of(n) for n in range(10)]) == found
    # What could not be read is a miss, and nobody waits for it.
    missing = start.store.find([key_of(n) for n in range(NUM_OBJECTS)])
    assert 10 <= sum(entry is not None for entry in missing) < NUM_OBJECTS
    assert start.store.reserve([ObjectSpec(key_of(999), 1, SIZE)]) == [None]
    assert not start.store.state.is_ready
    start.store.writer.commit(())


def test_nobody_waits_for_a_thread_that_failed_unexpectedly(tmp_path, caplog):
    def find_identity(note, stop):
        raise ZeroDivisionError("a fault of ours")

    keeper = StoreKeeper(lambda: CacheFolder(tmp_path / "cache", LIMIT), find_identity)
    woken = threading.Event()
    keeper.bind_wake(woken.set)
    while keeper.is_opening:
        assert woken.wait(TIMEOUT_S)
        woken.clear()
    assert keeper.store is None
    assert not keeper.clear()
    keeper.close()
    assert sum("ZeroDivisionError" in (r.exc_text or "") for r in caplog.records) == 1


def test_a_damaged_cell_is_not_found_early(template, tmp_path):
    copied = tmp_path / "cache"
    shutil.copytree(template, copied)
    folder = CacheFolder(copied, LIMIT)
    store = folder.open_store(IDENTITY)
    store.opening.load()
    (victim,) = store.find([key_of(7)])
    folder.close()
    with (copied / IDENTITY.name / "index").open("r+b") as file:
        file.seek(victim.cell * CELL_BYTES + 60)
        file.write(b"\xff")
    started = Start(copied)
    assert started.find([7, 8])[0] is None
    for _ in range(100):
        started.files.permits.release()
    started.wait(lambda: started.store.state.is_ready)
    assert started.store.counts.damaged_cells == 1
    started.end()


def test_an_index_of_about_the_right_size_stays(template, tmp_path):
    """Without a set limit every start finds another one, by what is free."""
    there = shape_store(IDENTITY, LIMIT, 4096).num_pages
    for share in (0.6, 0.9, 1.0, 1.1, 1.9):
        shape = shape_store(IDENTITY, int(LIMIT * share), 4096, there)
        assert shape.num_pages == there
        assert shape.index_bytes + shape.max_slots * shape.slot_bytes <= LIMIT * share
    for share in (0.4, 2.5):
        assert shape_store(IDENTITY, int(LIMIT * share), 4096, there).num_pages != there


def test_many_cells_find_their_pages():
    folder_shape = shape_store(IDENTITY, LIMIT, 4096)
    table = CellTable(folder_shape.num_pages, 7)
    rng_keys = [key_of(n) for n in range(folder_shape.num_pages * 14)]
    cells = [
        table.make_cell(Reservation(ObjectSpec(key, n, SIZE), Extent(key, n + 1, SIZE, ((n, 1),))))
        for n, key in enumerate(rng_keys)
    ]
    table.take_cells(np.frombuffer(b"".join(cells), CELL))
    found = table.find(rng_keys)
    # A few keys are looked for in another way than many.
    some = [*rng_keys[:20], ObjectKey(ObjectKind.STATE, rng_keys[0].digest)]
    assert [table.find([key])[0] for key in some] == [*found[:20], -1]
    assert table.find(some) == [*found[:20], -1]
    assert min(found) >= 0
    assert [table.describe(cell).position for cell in found] == list(range(len(rng_keys)))
    assert len(set(found)) == len(found)
