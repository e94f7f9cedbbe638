"""The store over a disk that fails: what is acknowledged stays, all else is as if never written."""

import pytest

from tests.v1.kv_offload.store_driver import INDEX, ROWS, SHAPE, StoreDriver, key_of
from vllm.v1.kv_offload.lookups.rates import Rates
from vllm.v1.kv_offload.store.cells import MAX_EXTENTS
from vllm.v1.kv_offload.store.free_slots import FreeSlots
from vllm.v1.kv_offload.store.records import ObjectSpec


def _fill(driver):
    """Write until the file is as large as it gets, and full."""
    while not driver.store.counts.evicted:
        driver.write_batch(2)
        driver.store.writer.make_room()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("call", "path"), [("write", ROWS), ("sync", ROWS), ("sync", INDEX), ("write", INDEX)]
)
def test_a_failed_call_costs_its_batch_alone(seed, call, path):
    driver = StoreDriver(seed)
    for _ in range(20):
        driver.step()
    before = {entry.extent for entry in driver.store.content.list_objects()}
    driver.disk.fail = {(call, path): 0}
    driver.write_batch(3)
    driver.disk.fail = {}
    evicted = driver.store.counts.evicted
    after = {entry.extent for entry in driver.store.content.list_objects()}
    assert after <= before
    assert driver.store.state.is_writable
    driver.time += 1000
    for _ in range(20):
        driver.step()
    driver.check_all()
    assert driver.num_acknowledged > 0
    assert evicted >= len(before - after)
    # A retired slot is nobody's until the next start, when all is well again.
    driver.cut(num_steps=2)


def test_two_failed_syncs_in_a_minute_end_writing():
    driver = StoreDriver(1)
    _fill(driver)
    driver.disk.fail = {("sync", ROWS): 0}
    while driver.store.state.is_writable:
        assert driver.write_batch(2) == []
        driver.store.writer.make_room()
    driver.disk.fail = {}
    assert driver.write_batch(2) == []
    driver.check_all()
    assert len(driver.store.content.list_objects()) > 0


def test_slots_come_from_one_run_or_from_eight():
    free = FreeSlots()
    free.add(0, 100)
    taken = [free.take(5) for _ in range(20)]
    assert [extents[0] for extents in taken] == [(5 * i, 5) for i in range(20)]
    for extents in taken[::2]:
        free.add_all(extents)
    assert free.num_free == 50
    found = free.take(38)
    assert found is not None
    assert len(found) == MAX_EXTENTS
    assert free.take(13) is None
    free.add_all(found)
    for extents in taken[1::2]:
        free.add_all(extents)
    assert free.runs() == [(0, 100)]


def test_superseded_entries_go_first_then_the_longest_unused_then_the_deepest():
    driver = StoreDriver(2)
    _fill(driver)
    objects = driver.store.content.list_objects()
    driver.store.pin(objects[:3])
    driver.store.unpin(objects[:3])
    driver.store.pass_by([objects[5].extent.key])
    table = driver.store.state.entries.table
    order = []
    while (index := table.next_victim(())) is not None:
        order.append(table.describe(index))
        table.remove(index)
    assert order[0] == objects[5]
    assert len(order) == len(objects)
    last = order[-3:]
    assert {entry.extent for entry in last} == {entry.extent for entry in objects[:3]}
    assert [e.position for e in last] == sorted((e.position for e in last), reverse=True)


def test_a_pinned_object_is_not_given_up():
    driver = StoreDriver(3)
    _fill(driver)
    kept = driver.store.content.list_objects()[:3]
    assert driver.store.pin(kept)
    before = driver.store.counts.evicted
    for _ in range(40):
        driver.write_batch(2)
        driver.store.writer.make_room()
    assert driver.store.counts.evicted > before + 10
    assert {entry.extent for entry in kept} <= {
        e.extent for e in driver.store.content.list_objects()
    }
    driver.store.unpin(kept)
    assert driver.store.writer.clear()
    assert driver.store.content.list_objects() == []
    assert not driver.store.pin(kept)
    assert driver.store.content.find_faults() == []


def test_room_that_nobody_was_refused_is_made_by_the_commit_that_comes():
    driver = StoreDriver(4)
    _fill(driver)
    begun = driver.begin_batch(1)
    assert begun
    store, syncs = driver.store, driver.disk.num_syncs
    evicted = store.counts.evicted
    store.want_room(SHAPE.max_slots * SHAPE.slot_bytes)
    store.writer.make_room(may_wait=True)
    assert (driver.disk.num_syncs, store.counts.evicted) == (syncs, evicted)
    assert store.writer.commit(begun) == begun
    assert driver.disk.num_syncs == syncs + 1
    assert store.counts.evicted > evicted
    # Who was refused does not wait for others.
    numbers = iter(range(100, 200))
    while (begun := store.reserve([ObjectSpec(key_of(next(numbers)), 1, 2000)])) != [None]:
        pass
    syncs = driver.disk.num_syncs
    store.writer.make_room(may_wait=True)
    assert driver.disk.num_syncs > syncs
    assert store.reserve([ObjectSpec(key_of(200), 1, 2000)]) != [None]


def test_restoring_pays_where_computing_is_slow():
    rates = Rates()
    assert rates.compute_s(0, 1000) is None
    rates.note_step(0, 512, 0.05)
    assert rates.compute_s(0, 512) == pytest.approx(0.05)
    rates.note_step(4000, 512, 0.1)
    assert rates.compute_s(0, 1) == pytest.approx(0.05 / 512)
    assert rates.compute_s(4096, 5120) == pytest.approx(0.2)
    computing = rates.compute_s(0, 512)
    assert rates.cost_s(1 << 20, 512, 512) < computing
    assert rates.cost_s(1 << 30, 512, 512) > computing
    assert rates.cost_s(1 << 20, 512, 512, num_queued=1 << 30) > computing
    for _ in range(100):
        rates.note_restore(1 << 20, 0.003 + (1 << 20) / 2e9)
    assert rates.bytes_per_s == pytest.approx(2e9, rel=0.01)
