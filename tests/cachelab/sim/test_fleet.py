"""Many simulated servers: balancers compared, what was foretold, servers that come and go."""

import json
from pathlib import Path

import pytest

from benchmarks.chat_trace import BLOCK
from tests.cachelab.sim.small_chat import LINES, SETTINGS
from vllm.benchmarks.flags import BALANCERS, add_replay_flags
from vllm.benchmarks.fleet_replay import Bursts, FleetJob, format_fleet, make_fleet_job
from vllm.cachelab.sim.balancers import Sessions, SimpleBalancer, make_balancer
from vllm.cachelab.sim.cost import CostModel
from vllm.cachelab.sim.fleet import FleetResult, Losses, Restarts
from vllm.cachelab.sim.warm_up import WarmUp
from vllm.exceptions import ConfigError
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.data_parallel.directory import CacheShape
from vllm.v1.engine.data_parallel.router import RouterSettings


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("fleet") / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return path


def run(path: Path, balancer: str, **changes) -> FleetResult:
    job = FleetJob(path, SETTINGS, CostModel.published_a3(), 3, BLOCK, decode_stride=64, **changes)
    return job.run(balancer)


@pytest.mark.slow
def test_the_router_beats_taking_turns_and_foretells_hits(path: Path) -> None:
    ours, turns, joint = (run(path, name) for name in ("prefix", "round-robin", "joint"))
    for result in (ours, turns, joint):
        assert len(result.latency_s) == len(LINES)
        assert result.prompt_tokens == sum(line["input_length"] for line in LINES)
    assert turns.hit_rate < 0.9 * joint.hit_rate
    assert ours.hit_rate > 0.95 * joint.hit_rate
    # All fits: nothing is evicted, and what others compute is foretold to where prompts part.
    assert ours.outcomes == {"exact": len(LINES)}
    assert "| prefix |" in format_fleet({"prefix": ours}, 3)


@pytest.mark.slow
def test_servers_that_die_and_restart_lose_no_request(path: Path) -> None:
    result = run(
        path,
        "prefix",
        copies=2,
        speed=4.0,
        news_delay_s=0.2,
        losses=Losses(3, 2.1, 0.5),
        restarts=Restarts(9.0, 1.0),
        bursts=Bursts(3.0, 2.0, 10.0),
    )
    assert len(result.latency_s) + result.num_cut == 2 * len(LINES)
    assert result.num_retried + result.num_cut > 0
    # What one has computed just now the others hear of later, and the router says so.
    assert set(result.outcomes) <= {"exact", "waited", "late", "evicted"}
    assert result.hit_rate > 0.3


@pytest.mark.slow
def test_servers_that_pull_before_they_serve_hit_at_once(path: Path) -> None:
    def fresh(warm_up: WarmUp | None) -> tuple[float, FleetResult]:
        result = run(path, "prefix", restarts=Restarts(6.0, 1.0), warm_up=warm_up)
        assert len(result.latency_s) == len(LINES)
        assert result.fresh_hit_rate is not None
        return result.fresh_hit_rate, result

    cold, without = fresh(None)
    warm, pulled = fresh(WarmUp(10.0, 1e12, 1e10))
    assert without.pulled_bytes == 0
    assert pulled.pulled_bytes > 0
    assert pulled.pulled_s == pytest.approx(pulled.pulled_bytes / 1e10)
    assert warm > cold + 0.02
    assert pulled.hit_rate > without.hit_rate
    # What the router foretells holds for pulled prefixes too.
    assert pulled.outcomes["evicted"] == 0
    # The budget is kept, to a prompt of each server: any has more bytes than the smallest two.
    one_each, still_one, some = (
        fresh(WarmUp(10.0, num_bytes, 1e10))[1].pulled_bytes
        for num_bytes in (1.0, pulled.pulled_bytes / 100, pulled.pulled_bytes / 10)
    )
    assert one_each == still_one < pulled.pulled_bytes / 2
    assert one_each < some < pulled.pulled_bytes


@pytest.mark.slow
def test_there_may_be_more_servers_than_cores_of_one(path: Path) -> None:
    job = FleetJob(path, SETTINGS, CostModel.published_a3(), 70, BLOCK, limit=20, decode_stride=64)
    result = job.run("prefix")
    assert len(result.latency_s) == 20


def test_a_trace_out_of_order_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in (LINES[-1], LINES[0])))
    parser = FlexibleArgumentParser()
    add_replay_flags(parser)
    flags = [str(path), "--servers", "2", "--trace-block-size", str(BLOCK), "--pool-gib", "1"]
    with pytest.raises(ConfigError, match="request 2 comes before the one above it"):
        make_fleet_job(parser.parse_args(flags))


def test_a_budget_is_checked() -> None:
    with pytest.raises(ConfigError, match="--warm-up 0 1 1: all three must be above 0"):
        WarmUp(0, 1, 1)


@pytest.mark.parametrize("name", BALANCERS[:-1])
def test_balancers_pass_over_who_is_gone(name: str) -> None:
    settings = RouterSettings(CacheShape(32, (32,)), 3, 16, 100, 32.0)
    balancer = make_balancer(name, settings)
    balancer.lose(0)
    balancer.rest(2)
    for number in range(20):
        assert balancer.route(str(number), [number], 40, number) == 1
    balancer.revive(0)
    ranks = {balancer.route(f"b{n}", [n * 7919], 40, n * 104729) for n in range(40)}
    assert ranks == {0, 1}


def test_affinity_moves_only_who_lost_his_server() -> None:
    balancer = make_balancer("session", RouterSettings(CacheShape(32, (32,)), 8, 16, 100, 32.0))
    assert isinstance(balancer, SimpleBalancer)
    before = [balancer.by_hash(key) for key in range(200)]
    assert len(set(before)) == 8
    balancer.rest(3)
    after = [balancer.by_hash(key) for key in range(200)]
    assert all(a == b for a, b in zip(before, after, strict=True) if b != 3 and a != 3)
    assert 3 not in after


def test_a_conversation_is_known_by_where_it_ended() -> None:
    sessions = Sessions()
    first = sessions.find([1, 2, 3], 3)
    other = sessions.find([1, 2, 9, 10], 4)
    assert first != other
    assert sessions.find([1, 2, 3, 4, 5], 5) == first
    assert sessions.find([1, 2, 9, 10, 11], 5) == other
    assert sessions.find([1, 2, 7], 3) not in (first, other)
    assert sessions.find([], 0) == 3


def test_a_beginning_that_many_have_is_no_conversation() -> None:
    sessions = Sessions()
    alone = sessions.find([1, 2], 1)
    # Some ways to go on are answers anew; more are other people's prompts.
    assert [sessions.find([1, n, n + 10], 3) for n in (3, 4, 5)] == [alone] * 3
    others = [sessions.find([1, n, n + 10], 3) for n in (6, 7, 8)]
    assert len({alone, *others}) == 4
    assert sessions.find([1, 6, 16, 20], 4) == others[0]
    assert sessions.find([1, 2], 1) not in (alone, *others)


def test_bursts_keep_order_and_number() -> None:
    bursts = Bursts(4.0, 1.0, 10.0)
    moved = [bursts.move(i / 10) for i in range(300)]
    assert moved == sorted(moved)
    assert sum(time < 1.0 for time in moved) == 40
    assert 29.0 < moved[-1] < 30.0
    with pytest.raises(ConfigError, match="--burst 4 3 10"):
        Bursts(4.0, 3.0, 10.0)
