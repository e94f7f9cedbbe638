"""The order of giving up against one that is made anew for each victim."""

import random

import numpy as np
import pytest

from vllm.v1.kv_offload.store.cells import CELL
from vllm.v1.kv_offload.store.eviction_order import EvictionOrder


def _first(cells, pinned):
    """Superseded ones, then the least recently used, of equal ones the deepest."""
    there = [i for i in np.flatnonzero(cells["checksum"]).tolist() if i not in pinned]
    return min(
        there,
        key=lambda i: (
            -int(cells["superseded"][i]),
            int(cells["last_use"][i]),
            -int(cells["position"][i]),
        ),
        default=None,
    )


@pytest.mark.parametrize("seed", range(6))
def test_each_victim_is_the_first_of_all(seed):
    rng = random.Random(seed)
    cells = np.zeros(48, CELL)
    order = EvictionOrder(cells)
    # No two entries share a position: the first is always one alone.
    positions = rng.sample(range(10_000), 1_000)
    count = 0

    def put(index):
        nonlocal count
        count += rng.randrange(2)
        cells[index] = np.zeros((), CELL)
        cells["checksum"][index], cells["last_use"][index] = 1, count
        cells["position"][index] = positions.pop()

    for index in range(30):
        put(index)
    cells["superseded"][5] = 1
    order.begin(np.flatnonzero(cells["checksum"]))
    num_taken = 0
    for _ in range(600):
        choice = rng.random()
        used = np.flatnonzero(cells["checksum"]).tolist()
        empty = np.flatnonzero(cells["checksum"] == 0).tolist()
        if choice < 0.35 and empty:
            index = rng.choice(empty)
            put(index)
            order.enter(index)
        elif choice < 0.6 and used:
            count += 1
            for index in rng.sample(used, min(len(used), 3)):
                cells["last_use"][index], cells["superseded"][index] = count, 0
        elif choice < 0.7 and used:
            index = rng.choice(used)
            cells["superseded"][index] = 1
            order.enter(index)
        else:
            pinned = set(rng.sample(used, min(len(used), rng.choice((0, 0, 4)))))
            index = order.take(pinned)
            assert index == _first(cells, pinned)
            if index is not None:
                cells[index] = np.zeros((), CELL)
                num_taken += 1
    assert num_taken > 100


class _CountedLooks(EvictionOrder):
    """Counts how often an entry is looked at."""

    num_looks = 0

    def _score(self, index):
        self.num_looks += 1
        return super()._score(index)


def test_a_victim_costs_what_changed_since_and_not_the_whole_index():
    cells = np.zeros(20_000, CELL)
    cells["checksum"], cells["last_use"] = 1, np.arange(20_000)
    order = _CountedLooks(cells)
    order.begin(np.arange(20_000))
    for number in range(5_000):
        index = order.take(())
        assert index == number
        cells[index] = np.zeros((), CELL)
        cells["checksum"][index], cells["last_use"][index] = 1, 20_000 + number
        order.enter(index)
    # Each is looked at when it comes and when it goes.
    assert order.num_looks <= 4 * 5_000
