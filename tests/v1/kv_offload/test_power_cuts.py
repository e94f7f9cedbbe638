"""Power cuts at random calls, with sectors lost and reordered; and protocols that are broken."""

import pytest

from tests.v1.kv_offload.store_driver import INDEX, ROWS, StoreDriver
from vllm.v1.kv_offload.store.evictions import Evictions
from vllm.v1.kv_offload.store.rows_file import RowsFile

CUTS = 12


def run(driver: StoreDriver, cuts: int = CUTS) -> StoreDriver:
    for _ in range(cuts):
        driver.cut(num_steps=12)
    return driver


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(25))
def test_what_was_acknowledged_survives_any_cut(seed):
    driver = run(StoreDriver(seed))
    assert driver.num_acknowledged > 0
    assert driver.num_checked > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_a_flipped_bit_costs_one_object_at_most_and_is_never_read(seed):
    driver = StoreDriver(seed)
    for _ in range(40):
        driver.step()
    for _ in range(30):
        assert driver.flip() <= 1
        driver.write_batch(2)


class _ReusesEarly(Evictions):
    """Frees the slots of what it gives up before that is on the disk."""

    def evict(self, cell):
        count = super().evict(cell)
        self._state.room.give_back(self._state.entries.dying[cell])
        self._state.entries.dying[cell] = ()
        return count


class _ReusesEarlyDriver(StoreDriver):
    def open(self):
        super().open()
        self.store.writer._evictions = _ReusesEarly(self.store.state)


class _TrustingRows(RowsFile):
    """Reads without looking at the seal."""

    def _is_sealed(self, payload, seal, extent):
        return True


class _TrustingDriver(StoreDriver):
    rows_class = _TrustingRows


class _NoSyncDriver(StoreDriver):
    path = ROWS

    def open(self):
        self.disk.skipped_syncs = set()
        super().open()
        self.disk.skipped_syncs = {self.path}


class _NoIndexSyncDriver(_NoSyncDriver):
    path = INDEX


@pytest.mark.slow
@pytest.mark.parametrize(
    "broken", [_ReusesEarlyDriver, _NoSyncDriver, _NoIndexSyncDriver], ids=lambda c: c.__name__
)
def test_a_broken_order_of_writes_is_found(broken):
    def sweep():
        for seed in range(30):
            run(broken(seed))

    with pytest.raises(Exception, match=r"acknowledged|wrong bytes|not what was written|slot"):
        sweep()


@pytest.mark.slow
def test_reading_without_seals_is_found():
    def sweep():
        for seed in range(20):
            driver = _TrustingDriver(seed)
            for _ in range(40):
                driver.step()
            for _ in range(20):
                driver.flip()

    with pytest.raises(AssertionError, match="wrong bytes"):
        sweep()
