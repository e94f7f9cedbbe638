"""Room on a cluster: what fits, how long one waits, and what is told."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from vllm.exceptions import ConfigError
from vllm.utils import ray_room
from vllm.utils.ray_room import Asked, RoomWatch, needs_of

ASKED = Asked("3 workers", {"CPU": 2.0, "GPU": 0.0}, 3, "lower --tensor-parallel-size")
MACHINES = [
    {"NodeID": "a", "Alive": True, "Resources": {"CPU": 4.0, "memory": 1e9}},
    {"NodeID": "b", "Alive": True, "Resources": {"CPU": 1.0}},
    {"NodeID": "c", "Alive": False, "Resources": {"CPU": 64.0}},
]
RAY = SimpleNamespace(nodes=lambda: MACHINES, available_resources=lambda: {"CPU": 3.0})


@pytest.mark.parametrize(
    ("machines", "fits"),
    [
        ([{"CPU": 6.0}], True),
        # Each takes its CPUs of one machine.
        ([{"CPU": 3.0}, {"CPU": 3.0}], False),
        ([{"CPU": 4.0}, {"CPU": 2.0}], True),
        ([], False),
    ],
)
def test_what_one_takes_is_on_one_machine(machines: list[dict[str, float]], fits: bool) -> None:
    assert ASKED.fits(machines) == fits


def test_parts_of_a_cpu_are_counted_as_they_are_meant() -> None:
    assert Asked("", {"CPU": 0.1}, 3, "").fits([{"CPU": 0.3}])
    assert Asked("", {"CPU": 0.0}, 99, "").fits([{}])


def test_where_ray_knows_no_device_a_worker_takes_a_cpu() -> None:
    assert needs_of(2, "") == needs_of(2, "CPU") == {"CPU": 2.0}
    assert needs_of(2, "NPU") == {"CPU": 2.0, "NPU": 2.0}


class Clock:
    """Time that passes when it is told."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setenv("VLLM_RAY_ROOM_TIMEOUT", "40")
    monkeypatch.setattr(ray_room, "may_grow", lambda _: False)
    return Clock()


def test_it_ends_in_time_and_names_what_is_asked_and_what_there_is(clock: Clock) -> None:
    watch = RoomWatch(RAY, ASKED, clock=clock)
    for clock.now in (0.0, 20.0, 31.0, 39.0):
        watch.check()
    clock.now = 40.0
    with pytest.raises(ConfigError) as raised:
        watch.check()
    assert str(raised.value) == (
        "The Ray cluster has no room for 3 workers: it takes 3 x [CPU: 2], each on one machine. "
        "The cluster's machines have 1 x [CPU: 1], 1 x [CPU: 4], of which [CPU: 3] is free "
        "altogether. Add machines (`ray start --address ...`), end what else runs there, or lower "
        "--tensor-parallel-size."
    )


def test_where_machines_may_come_it_waits_on_and_says_so(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ray_room, "may_grow", lambda _: True)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    watch = RoomWatch(RAY, ASKED, clock=clock)
    for clock.now in map(float, range(125)):
        watch.check()
    assert [record.message.rpartition("lower ")[2] for record in caplog.records] == [
        f"--tensor-parallel-size. Waiting for {seconds} s so far, since an autoscaler may bring "
        "machines."
        for seconds in (30, 60, 90, 120)
    ]


def test_what_has_a_place_waits_for_something_else(clock: Clock) -> None:
    placed = [True, False]
    watch = RoomWatch(RAY, ASKED, lambda: placed.pop(0), clock=clock)
    clock.now = 40.0
    watch.check()
    # It was lost again: from then on it is counted anew.
    clock.now = 65.0
    watch.check()
    clock.now = 80.0
    with pytest.raises(ConfigError, match="no room"):
        watch.check()


@pytest.mark.parametrize(
    ("types", "grows"),
    [({"a": "node_a", "b": "node_b"}, False), ({"a": "ray.head.default"}, True), (None, False)],
)
def test_an_autoscaler_names_the_types_of_its_machines(
    types: Any, grows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = f'{{"autoscaler_report": {{"node_type_mapping": {_json(types)}}}}}'
    told = {ray_room._AUTOSCALER_STATE: state.encode()}
    kv = SimpleNamespace(_internal_kv_get=told.get)
    ray = SimpleNamespace(experimental=SimpleNamespace(internal_kv=kv))
    monkeypatch.setattr("ray.autoscaler.v2.utils.is_autoscaler_v2", lambda: False)
    assert ray_room.may_grow(ray) == grows
    monkeypatch.setattr("ray.autoscaler.v2.utils.is_autoscaler_v2", lambda: True)
    assert ray_room.may_grow(ray)


def _json(types: dict[str, str] | None) -> str:
    return "null" if types is None else str(types).replace("'", '"')
