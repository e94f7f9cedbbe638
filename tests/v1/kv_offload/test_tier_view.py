"""What people see of the tiers."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm.v1.kv_offload.orders import Moved, OffloadReport
from vllm.v1.kv_offload.reports import TierCounts
from vllm.v1.kv_offload.store.store_state import StoreCounts
from vllm.v1.kv_offload.tier_view import TierView, find_disk_state, view_tier


def store(**changes: Any) -> Any:
    objects = {"rows": 3, "state": 2}
    content = SimpleNamespace(
        capacity_bytes=100, used_bytes=60, live_bytes=50, num_objects=lambda: objects
    )
    state = SimpleNamespace(is_writable=changes.pop("is_writable", True))
    counts = changes.pop("counts", StoreCounts())
    return SimpleNamespace(**changes, content=content, state=state, counts=counts)


def keeper(**changes: Any) -> Any:
    known = {"is_opening": False, "is_digesting": False, "store": store()}
    return SimpleNamespace(**known | changes)


@pytest.mark.parametrize(
    ("changes", "asked", "state"),
    [
        ({"is_opening": True}, {}, "opening"),
        ({"is_opening": True, "is_digesting": True}, {}, "reading_weights"),
        ({"is_digesting": True}, {}, "ready"),
        ({"store": None}, {"is_unreadable": True}, "off"),
        ({}, {"is_unreadable": True}, "reads_paused"),
        ({"store": store(is_writable=False)}, {}, "writes_stopped"),
        ({"store": store(is_writable=False)}, {"read_only": True}, "read_only"),
    ],
)
def test_states_of_the_disk(changes: dict[str, Any], asked: dict[str, bool], state: str) -> None:
    given = {"is_unreadable": False, "read_only": False, **asked}
    assert find_disk_state(keeper(**changes), **given) == state


def test_bytes_are_of_all_workers() -> None:
    counts = TierCounts()
    counts.note_moves(OffloadReport(read={"disk": Moved(7, 0.5)}, wrote={"disk": Moved(9, 0.5)}))
    counts.hits["disk"] = counts.queries["disk"] = 4
    disk = store()
    totals = counts.look({"host": None, "disk": disk})
    seen = view_tier("disk", "ready", 1000, disk, 2, totals)
    assert seen == TierView("ready", 1000, 120, 100, {"rows": 3, "state": 2}, 4, 4, 7, 9)
    nothing = view_tier("host", "ready", 10, None, 2, totals)
    assert nothing == TierView("ready", 10, 0, 0, {}, 0, 0, 0, 0)


def test_nothing_is_told_of_a_step_in_which_nothing_happened() -> None:
    counts, done = TierCounts(), StoreCounts()
    disk = store(counts=done)
    assert counts.take({"host": None, "disk": disk}) is not None
    assert counts.take({"host": None, "disk": disk}) is None
    # What only the tier itself says: an entry more, a smaller one.
    done.committed += 1
    report = counts.take({"host": None, "disk": disk})
    assert report is not None
    assert report.stores == {"stored": 1}
    disk.content.live_bytes += 1
    assert counts.take({"host": None, "disk": disk}) is not None
    counts.note_moves(OffloadReport())
    assert counts.take({"host": None, "disk": disk}) is None
    counts.note_moves(OffloadReport(wrote={"disk": Moved(1, 0.5)}))
    assert counts.take({"host": None, "disk": disk}) is not None
    counts.look({"host": None, "disk": disk})
    assert counts.take({"host": None, "disk": disk}) is not None


def test_looking_takes_nothing_from_a_report() -> None:
    """The same counts with looks in between and without, and their sums since the start."""
    told: dict[bool, list[Any]] = {False: [], True: []}
    for looks in (False, True):
        counts, done = TierCounts(), StoreCounts()
        stores = {"host": None, "disk": store(counts=done)}
        for step in range(6):
            done.committed += step
            counts.restores["restored"] += 1
            counts.num_corrupt += step == 3
            counts.note_moves(OffloadReport(read={"disk": Moved(10, 0.5)}))
            if looks and step in (0, 1, 4):
                assert counts.look(stores).restores == {"restored": step + 1}
            if step % 2:
                told[looks].append(counts.take(stores))
        sums = counts.look(stores)
        assert (sums.stores, sums.restores) == ({"stored": 15}, {"restored": 6})
        assert (sums.num_corrupt, sums.read_bytes, sums.live_bytes) == (
            1,
            {"disk": 60},
            {"disk": 50},
        )
    assert told[True] == told[False]
    assert [report.stores["stored"] for report in told[True]] == [1, 5, 9]
