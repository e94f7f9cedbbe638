"""The worker's side: rows to the disk and back, whatever the disk does."""

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm.distributed.kv_transfer.handover.host_memory import HostMemory
from vllm.v1.core.geometry import GroupGeometry
from vllm.v1.core.pool.exports import PrefixBlocks
from vllm.v1.kv_offload.layout import LayerRows, ObjectLayout
from vllm.v1.kv_offload.orders import (
    ObjectOrder,
    OffloadOrders,
    OffloadReport,
    RestoreOrder,
    WriteOrder,
)
from vllm.v1.kv_offload.pool_rows import HostRows, StagedRows
from vllm.v1.kv_offload.store.cells import ObjectKind
from vllm.v1.kv_offload.store.file_calls import DiskFiles
from vllm.v1.kv_offload.store.records import Extent, ObjectKey
from vllm.v1.kv_offload.worker import OffloadWorker

NUM_BLOCKS, WIDTH = 24, 3
GROUPS = (
    GroupGeometry(0, is_window=False, block_size=8, ratio=2),
    GroupGeometry(1, is_window=True, block_size=4, keep=5),
)
LAYOUT = ObjectLayout(
    GROUPS,
    ((LayerRows(4, 4 * WIDTH), LayerRows(4, 4 * WIDTH)), (LayerRows(4, 4 * WIDTH),)),
    unit=4,
    lean=4,
    group_tokens=8,
)
SPECS: Any = [SimpleNamespace(layer_names=["a", "b"]), SimpleNamespace(layer_names=["c"])]


def make_pool(seed: int) -> dict[str, torch.Tensor]:
    """Three layers in rows of one pool, as engines lay them out."""
    generator = torch.Generator().manual_seed(seed)
    pool = torch.randn((NUM_BLOCKS, 40), generator=generator)
    flat = pool.view(-1)
    shape, stride = (NUM_BLOCKS, 4, WIDTH), (40, WIDTH, 1)
    return {
        "a": flat.as_strided(shape, stride, 0),
        "b": flat.as_strided(shape, stride, 16),
        "c": flat.as_strided(shape, stride, 0),
    }


# The state of a boundary at 12: dense rows of tokens 8 to 11, window rows from token 7 on.
STATE_BLOCKS = PrefixBlocks(12, 8, (1, 1), ((5,), (7, 8)))
ROWS_BLOCKS = PrefixBlocks(8, 0, (0, 0), ((4,), ()))


def extent_of(kind: ObjectKind, first: int, end: int, sequence: int) -> Extent:
    size = LAYOUT.object_bytes(kind, first, end)
    return Extent(ObjectKey(kind, bytes(16)), sequence, size, ((sequence * 4, 4),))


STATE = ObjectOrder(extent_of(ObjectKind.STATE, 8, 12, 1), 8, 12)
ROWS = ObjectOrder(extent_of(ObjectKind.ROWS, 0, 8, 2), 0, 8)


class FaultyFiles(DiskFiles):
    """A disk that fails, or hangs, in the calls that are named."""

    def __init__(self) -> None:
        self.failing: set[str] = set()
        self.error: Exception = OSError(5, "Input/output error")
        self.hanging = threading.Event()
        self.hanging.set()

    def _check(self, name: str) -> None:
        self.hanging.wait(120)
        if name in self.failing:
            raise self.error

    def read(self, handle, buffer, offset):
        self._check("read")
        return super().read(handle, buffer, offset)

    def write(self, handle, parts, offset):
        self._check("write")
        super().write(handle, parts, offset)

    def sync(self, handle):
        self._check("sync")
        super().sync(handle)


class Rig:
    def __init__(self, folder: Path, seed: int = 0) -> None:
        self.files = FaultyFiles()
        self.caches = make_pool(seed)
        self.folder = folder
        self.worker = OffloadWorker(LAYOUT, self.caches, SPECS, 0, self.files)

    def orders(self, **fields: Any) -> OffloadOrders:
        return OffloadOrders(folder=str(self.folder), slot_bytes=64, **fields)

    def write(self, target: ObjectOrder, blocks: PrefixBlocks) -> OffloadReport:
        orders = self.orders(
            writes=[WriteOrder(target.first, target.end, blocks, None, target.extent)]
        )
        self.worker.begin(orders)
        self.worker.take_rows(orders)
        return self.wait(lambda report: report.written or report.unwritten)

    def wait(self, is_done) -> OffloadReport:
        total, deadline = OffloadReport(), time.monotonic() + 20
        while not is_done(total):
            assert time.monotonic() < deadline
            if (report := self.worker.take_report()) is not None:
                total = total.aggregate(report)
            time.sleep(0.001)
        return total

    def restore(self, targets, blocks: PrefixBlocks, timeout_s: float = 20.0) -> bool:
        order = RestoreOrder("r", tuple(targets), blocks, timeout_s)
        self.worker.begin(self.orders(restores=[order]))
        deadline = time.monotonic() + 20
        while True:
            assert time.monotonic() < deadline
            if "r" in self.worker.collect():
                return True
            if "r" in self.worker.take_failed():
                return False
            time.sleep(0.001)


@pytest.fixture
def rigs(tmp_path):
    made = []
    (tmp_path / "rows.0").touch()

    def make(seed: int = 0) -> Rig:
        made.append(Rig(tmp_path, seed))
        return made[-1]

    yield make
    for rig in made:
        rig.files.hanging.set()
        rig.worker.shutdown()


def test_what_was_written_comes_back_where_it_is_asked_for(rigs):
    rig = rigs()
    assert rig.write(STATE, STATE_BLOCKS).written == {1: 1}
    assert rig.write(ROWS, ROWS_BLOCKS).written == {2: 1}
    expected = {name: view.clone() for name, view in rig.caches.items()}
    other = rigs(seed=1)
    before = {name: view.clone() for name, view in other.caches.items()}
    # Four tokens are there already; blocks lie elsewhere.
    blocks = PrefixBlocks(12, 4, (0, 1), ((14, 15), (17, 18)))
    assert other.restore([ROWS, STATE], blocks)
    for name in ("a", "b"):
        now = other.caches[name]
        assert torch.equal(now[14, :2], before[name][14, :2])
        assert torch.equal(now[14, 2:], expected[name][4, 2:])
        assert torch.equal(now[15, :2], expected[name][5, :2])
        assert torch.equal(now[15, 2:], before[name][15, 2:])
    for there, here in ((7, 17), (8, 18)):
        assert torch.equal(other.caches["c"][here], expected["c"][there])
    report = other.worker.take_report()
    assert report.read["disk"].num_bytes == STATE.extent.num_bytes + ROWS.extent.num_bytes


def test_rows_on_a_device_are_the_same_bytes(rigs):
    caches = make_pool(3)
    host = HostRows(LAYOUT, HostMemory(caches, SPECS, GROUPS))
    staged = StagedRows(LAYOUT, caches, SPECS)
    for target, blocks in ((STATE, STATE_BLOCKS), (ROWS, ROWS_BLOCKS)):
        regions = LAYOUT.list_object(target.extent.key.kind, target.first, target.end)
        parts = [bytearray(target.extent.num_bytes) for _ in range(2)]
        host.gather(regions, blocks, memoryview(parts[0]))
        staged.gather(regions, blocks, memoryview(parts[1]))
        assert parts[0] == parts[1]
        pools = [make_pool(4), make_pool(4)]
        partly = PrefixBlocks(blocks.num_tokens, 4, blocks.bases, blocks.block_ids)
        HostRows(LAYOUT, HostMemory(pools[0], SPECS, GROUPS)).scatter(
            regions, partly, memoryview(parts[0])
        )
        StagedRows(LAYOUT, pools[1], SPECS).scatter(regions, partly, memoryview(parts[0]))
        assert all(torch.equal(pools[0][name], pools[1][name]) for name in pools[0])


@pytest.mark.parametrize(("call", "is_unsynced"), [("write", False), ("sync", True)])
def test_a_disk_that_refuses_a_write(rigs, caplog, call, is_unsynced):
    rig = rigs()
    rig.files.failing = {call}
    assert rig.write(STATE, STATE_BLOCKS).unwritten == {1: 1}
    report = rig.write(STATE, STATE_BLOCKS)
    # A disk may refuse each of thousands of objects.
    assert sum("cannot be" in record.getMessage() for record in caplog.records) == 1
    assert (report.written, report.unwritten) == ({}, {1: 1})
    assert report.unsynced == ({1} if is_unsynced else set())
    rig.files.failing = set()
    assert rig.write(ROWS, ROWS_BLOCKS).written == {2: 1}


def test_a_disk_that_refuses_a_read_changes_nothing(rigs):
    rig = rigs()
    rig.write(STATE, STATE_BLOCKS)
    before = {name: view.clone() for name, view in rig.caches.items()}
    rig.files.failing = {"read"}
    assert not rig.restore([STATE], PrefixBlocks(12, 8, (1, 1), ((15,), (17, 18))))
    report = rig.worker.take_report()
    assert (report.num_failed_reads, report.failures) == (1, {"r": "restore_failed"})
    assert all(torch.equal(rig.caches[name], before[name]) for name in before)


def test_an_error_that_nobody_expects_ends_a_restore_at_once(rigs, caplog):
    rig = rigs()
    rig.write(STATE, STATE_BLOCKS)
    rig.files.failing, rig.files.error = {"read"}, ZeroDivisionError("a fault of ours")
    blocks = PrefixBlocks(12, 8, (1, 1), ((15,), (17, 18)))
    # The deadline is far behind the test's own.
    assert not rig.restore([STATE, STATE, STATE], blocks, timeout_s=6000)
    assert rig.worker.take_report().failures == {"r": "restore_failed"}
    rig.files.failing = set()
    assert rig.restore([STATE], blocks)
    # The readers tell the log after the step: they are waited for.
    rig.worker.shutdown()
    assert sum("ZeroDivisionError: a fault" in (r.exc_text or "") for r in caplog.records) == 1


def test_an_error_that_nobody_expects_is_a_batch_that_was_not_written(rigs):
    rig = rigs()
    rig.files.failing, rig.files.error = {"sync"}, ZeroDivisionError("a fault of ours")
    report = rig.write(STATE, STATE_BLOCKS)
    assert (report.unwritten, report.unsynced) == ({1: 1}, {1})
    rig.files.failing = set()
    assert rig.write(ROWS, ROWS_BLOCKS).written == {2: 1}


def test_bytes_that_are_not_the_ones_written_change_nothing(rigs):
    rig = rigs()
    rig.write(STATE, STATE_BLOCKS)
    before = {name: view.clone() for name, view in rig.caches.items()}
    path = rig.folder / "rows.0"
    data = bytearray(path.read_bytes())
    data[STATE.extent.slots[0][0] * 64 + 5] ^= 1
    path.write_bytes(data)
    assert not rig.restore([STATE], PrefixBlocks(12, 8, (1, 1), ((15,), (17, 18))))
    report = rig.worker.take_report()
    assert (report.corrupt, report.failures) == ({(False, 1)}, {"r": "corrupt"})
    assert all(torch.equal(rig.caches[name], before[name]) for name in before)


def test_a_disk_that_hangs_is_waited_for_until_the_deadline(rigs):
    rig = rigs()
    rig.write(STATE, STATE_BLOCKS)
    before = {name: view.clone() for name, view in rig.caches.items()}
    rig.files.hanging.clear()
    blocks = PrefixBlocks(12, 8, (1, 1), ((15,), (17, 18)))
    assert not rig.restore([STATE], blocks, timeout_s=0.05)
    # What the disk gives after all comes too late for blocks that may be another request's.
    rig.files.hanging.set()
    assert rig.restore([STATE], PrefixBlocks(12, 8, (1, 1), ((20,), (21, 22))))
    for name in before:
        for block_id in (15, 17, 18):
            assert torch.equal(rig.caches[name][block_id], before[name][block_id])


def test_a_restore_that_is_wanted_no_more(rigs):
    rig = rigs()
    rig.write(STATE, STATE_BLOCKS)
    rig.files.hanging.clear()
    order = RestoreOrder("r", (STATE,), PrefixBlocks(12, 8, (1, 1), ((15,), (17, 18))), 20.0)
    rig.worker.begin(rig.orders(restores=[order]))
    rig.worker.begin(rig.orders(cancelled=["r", "unknown"]))
    assert rig.worker.collect() == set()
    assert rig.worker.take_failed() == {"r"}


def test_a_file_that_cannot_be_opened_costs_no_step(rigs):
    rig = rigs()
    path = rig.folder / "rows.0"
    path.unlink()
    path.mkdir()
    assert rig.write(STATE, STATE_BLOCKS).unwritten == {1: 1}
    assert not rig.restore([STATE], PrefixBlocks(12, 8, (1, 1), ((15,), (17, 18))))
    path.rmdir()
    path.touch()
    assert rig.write(STATE, STATE_BLOCKS).written == {1: 1}


def test_a_row_group_has_one_size_wherever_it_stands():
    size = LAYOUT.group_tokens
    for first in range(0, 80 * size, size):
        regions = LAYOUT.list_object(ObjectKind.ROWS, first, first + size)
        told = LAYOUT.object_bytes(ObjectKind.ROWS, first, first + size)
        assert LAYOUT.count_bytes(regions) == told
