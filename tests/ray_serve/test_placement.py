"""Who there is in a fleet and where requests go, without a cluster."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from vllm.exceptions import ConfigError
from vllm.ray_serve.arguments import FleetArgs
from vllm.ray_serve.placement import Fleet, find_fleet, open_fleet
from vllm.ray_serve.scaling import LoadPolicy
from vllm.v1.engine.data_parallel.directory import CacheShape
from vllm.v1.engine.data_parallel.router import Router, RouterSettings
from vllm.v1.engine.wire import CoreStatus

UNIT = 32


def make_fleet(num_places: int = 3) -> Fleet:
    fleet = Fleet(num_places)
    fleet.start(Router(RouterSettings(CacheShape(UNIT, (UNIT,)), num_places, 16, 1000, 32.0)))
    return fleet


def send(fleet: Fleet, name: str, hashes: list[int], wanted: int | None = None) -> str | None:
    fleet.expect(name, hashes, len(hashes) * UNIT + 1, wanted)
    return fleet.place(name, list(fleet.living()))


def test_a_tenants_requests_do_not_gather_on_a_replica() -> None:
    fleet = make_fleet()
    fleet.see(["x", "y"])
    places = []
    for number in range(4):
        fleet.expect(f"a{number}", [number], 33, 0, tenant="a")
        assert fleet.place(f"a{number}", ["x", "y"]) == "x"
    for number in range(10, 16):
        fleet.expect(f"b{number}", [number], 33, 1, tenant="b")
        assert fleet.place(f"b{number}", ["x", "y"]) == "y"
    for name, tenant in (("next of a", "a"), ("next of b", "b"), ("of nobody", None)):
        fleet.expect(name, [99], 33, None, tenant=tenant)
        places.append(fleet.place(name, ["x", "y"]))
        fleet.forget(name)
    assert places == ["y", "x", "x"]


def test_requests_go_where_their_prefix_is_and_not_to_who_leaves() -> None:
    fleet = make_fleet()
    assert send(fleet, "early", [1]) is None
    fleet.see(["x", "y"])
    assert fleet.living() == {"x": 0, "y": 1}
    told = CoreStatus(0, 0, 1000, stored={0: [1, 2, 3]})
    fleet.router.observe(1, told, 0.0)
    assert send(fleet, "a", [1, 2, 3, 4]) == "y"
    # It leaves, and finishes what it has; another one takes another rank meanwhile.
    fleet.see(["x", "z"])
    assert fleet.living() == {"x": 0, "z": 2}
    assert fleet.rank_of("y") == 1
    assert send(fleet, "b", [1, 2, 3, 4]) in ("x", "z")
    fleet.forget("a")
    assert fleet.rank_of("y") is None
    # Its rank is given again, and what it had cached is forgotten.
    fleet.see(["x", "z", "w"])
    assert fleet.rank_of("w") == 1
    fleet.expect("c", [1, 2, 3], 97, 1)
    assert fleet.place("c", ["x", "z", "w"]) == "w"
    assert fleet.router.foretold("c") == 0


def test_more_replicas_than_ranks_wait_for_one() -> None:
    fleet = make_fleet(2)
    fleet.see(["a", "b"])
    assert send(fleet, "q", [1], wanted=0) == "a"
    fleet.see(["b", "c"])
    assert fleet.living() == {"b": 1}
    fleet.forget("q")
    fleet.see(["b", "c"])
    assert fleet.living() == {"b": 1, "c": 0}


def test_a_request_that_is_refused_is_counted_once() -> None:
    fleet = make_fleet()
    fleet.see(["x", "y"])
    assert send(fleet, "a", [1]) == "x"
    assert fleet.place("a", ["y"]) in (None, "y")
    fleet.see(["y"])
    assert fleet.place("a", ["y"]) == "y"
    fleet.lose("y")
    assert fleet.living() == {}
    assert fleet.place("a", ["y"]) is None
    fleet.forget("a")
    assert fleet.place("a", ["y"]) is None


def test_a_replica_that_died_is_not_chosen_while_serve_still_lists_it() -> None:
    fleet = make_fleet()
    fleet.see(["x", "y"])
    fleet.router.observe(0, CoreStatus(0, 0, 1000, stored={0: [1, 2, 3]}), 0.0)
    assert send(fleet, "a", [1, 2, 3]) == fleet.find_place("a") == "x"
    fleet.lose("x")
    fleet.see(["x", "y"])
    assert fleet.place("a", ["x", "y"]) == fleet.find_place("a") == "y"
    # A new one takes its rank once Serve has one.
    fleet.see(["y", "z"])
    assert fleet.living() == {"y": 1, "z": 0}


def test_one_that_must_have_a_rank_waits_for_nobody_else() -> None:
    fleet = make_fleet()
    fleet.see(["x"])
    assert send(fleet, "a", [1], wanted=1) is None
    assert send(fleet, "b", [1], wanted=0) == "x"


def test_a_process_finds_its_fleet_by_name() -> None:
    fleet = open_fleet("some", 2)
    assert find_fleet("some") is fleet
    assert find_fleet("other") is None


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"replicas": 0}, "replicas"),
        ({"replicas": 3, "max_replicas": 2}, "must not be above the next"),
        ({"replica": 2}, "Extra inputs"),
        ({"target_requests": 0}, "greater than 0"),
        ({"num_cpus": "inf"}, "finite number"),
    ],
)
def test_wrong_arguments_are_told(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ValidationError, match=match):
        FleetArgs(**arguments)


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        ("-dp 2", "replicas=N"),
        ("--api-server-count 2", "not for a fleet"),
        ("--block-size 33", "block_size=33"),
        ("--port 9000", "--port is not for a fleet: Serve's own HTTP proxy"),
        ("--distributed-executor-backend ray", "one machine: leave it out"),
        ("--prefix-cache-dir {folder}", "--prefix-cache-dir or --kv-offloading-size is not for"),
        ("--no-such-flag 3", "unknown flag --no-such-flag"),
        ("--help", "vllm serve --help"),
        ("--tokenizer 'x", "cannot be parted: No closing quotation"),
    ],
)
def test_flags_that_do_not_fit_are_told(flags: str, match: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=match):
        FleetArgs(flags=flags.format(folder=tmp_path)).prepare()


def test_limits_of_tenants_are_parted_among_ingresses(tmp_path: Path) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_text("tenants: [{name: a, keys: [k], requests_per_minute: 2}]")
    FleetArgs(flags=f"--tenants {path}", ingress_replicas=2).prepare()
    with pytest.raises(ConfigError, match="'a' has requests_per_minute=2, and ingress_replicas=3"):
        FleetArgs(flags=f"--tenants {path}", ingress_replicas=3).prepare()


def test_all_replicas_share_a_seed_and_there_is_a_place_for_each() -> None:
    config, server = FleetArgs(replicas=2, max_replicas=5, flags="--max-num-seqs 7").prepare()
    assert config.parallel_config.data_parallel_size == 5
    # An actor sees its own devices alone, whatever its rank.
    assert replace(config.parallel_config, data_parallel_rank=3).first_device == 0
    assert config.cache_config.prefix_hash_seed is not None
    assert config.scheduler_config.max_num_seqs == 7
    assert server.api_keys == ()


class Situation:
    """What Serve says."""

    def __init__(self, current: int, requests: float, tokens: float) -> None:
        self.aggregated_metrics = {"requests": {"a": requests}, "prefill_tokens": {"a": tokens}}
        self.target_num_replicas = current
        self.capacity_adjusted_min_replicas, self.capacity_adjusted_max_replicas = 1, 6
        self.current_time: float | None = 0.0
        self.policy_state: dict[str, Any] = {}


def test_replicas_come_at_once_and_go_after_a_while() -> None:
    policy = LoadPolicy(8, 1000)
    assert policy(Situation(1, 20, 0))[0] == 3
    assert policy(Situation(1, 1, 4500))[0] == 5
    assert policy(Situation(1, 1000, 0))[0] == 6
    low = Situation(4, 2, 0)
    for moment, expected in ((0.0, 4), (59.0, 4), (61.0, 1)):
        low.current_time = moment
        number, low.policy_state = policy(low)
        assert number == expected
    # A load that comes back meanwhile starts the wait anew.
    low = Situation(4, 2, 0)
    _, state = policy(low)
    busy = Situation(4, 32, 0)
    busy.policy_state = state
    assert policy(busy) == (4, {})
