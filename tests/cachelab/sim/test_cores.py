"""A chat through two simulated cores: prefix-aware sending beats taking turns."""

import json
from pathlib import Path

import pytest

from benchmarks.chat_trace import BLOCK, make_chat_trace
from tests.cachelab.sim.small_chat import LINES, SETTINGS, SHAPE
from vllm.benchmarks.datasets.lines import BadLines
from vllm.benchmarks.datasets.timed_trace import read_timed_trace
from vllm.cachelab.sim.clock import ClockedRun, SimResult
from vllm.cachelab.sim.cores import SimCores
from vllm.cachelab.sim.cost import CostModel
from vllm.cachelab.sim.engine import SimEngine
from vllm.cachelab.sim.loads import trace_load
from vllm.config.parallel import ParallelConfig


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory):
    path: Path = tmp_path_factory.mktemp("chat") / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    requests = read_timed_trace(path, block=BLOCK, bad=BadLines(path, True))
    assert len(requests) == len(LINES) > 30
    return requests


def run(trace, num_cores: int, policy: str = "prefix", limit: int | None = None) -> SimResult:
    parallel = ParallelConfig(data_parallel_size=num_cores, data_parallel_routing=policy)
    cores = SimCores(SETTINGS, parallel, decode_stride=16)
    load = trace_load(trace, BLOCK, cores.hash_unit)
    return cores.run(load, CostModel.published_a3(), limit)


def hits(result: SimResult) -> int:
    assert not [seen for seen in result.seen if seen.error]
    return sum(seen.usage.cached_tokens for seen in result.seen)


@pytest.mark.slow
def test_prefix_aware_sending_beats_taking_turns(trace) -> None:
    # All of it fits into either: what is missed was computed on the other core.
    best = hits(run(trace, 1))
    assert hits(run(trace, 2)) > 0.93 * best
    assert hits(run(trace, 2, "round-robin")) < 0.9 * best


@pytest.mark.slow
def test_one_core_is_what_the_single_engine_is(trace) -> None:
    engine = SimEngine(SETTINGS, decode_stride=16)
    load = trace_load(trace, BLOCK, engine.hash_unit)
    alone = ClockedRun(engine, CostModel.published_a3(), 2).run(load)
    cores = run(trace, 1, limit=2)
    assert [s.usage for s in cores.seen] == [s.usage for s in alone.seen]
    assert cores.duration_s == pytest.approx(alone.duration_s)


def test_traces_are_the_same_everywhere() -> None:
    lines = make_chat_trace(SHAPE, seed=4)
    assert lines == make_chat_trace(SHAPE, seed=4)
    assert lines != make_chat_trace(SHAPE, seed=5)
    assert all(line["input_length"] == BLOCK * len(line["hash_ids"]) for line in lines)
    times = [line["timestamp"] for line in lines]
    assert times == sorted(times)
