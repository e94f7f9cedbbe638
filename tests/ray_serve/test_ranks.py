"""Ranks as actors of a real Ray cluster: orders, errors, beats and deaths, without a model."""

import os
import pickle
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from vllm.config import ModelConfig, ParallelConfig, VllmConfig
from vllm.exceptions import CheckpointError, ConfigError, EngineDeadError
from vllm.utils.ray_cluster import describe_environment
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor import ray_ranks
from vllm.v1.executor.messages import Answer, Failure, LoadModel, MeasureMemory, RunStep
from vllm.v1.executor.ray_actor import NodeInfo
from vllm.v1.executor.ray_ranks import RayRanks

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    # What Ray warns of, in its own modules, is its own.
    pytest.mark.filterwarnings("ignore"),
]
STEP = RunStep(SchedulerOutput.make_empty())


class Rank:
    """In place of what loads torch: measures, fails to load, and in a step waits for ever."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def carry_out(self, order: bytes) -> Answer | Failure:
        match pickle.loads(order):
            case MeasureMemory():
                return Answer((self._rank, os.getenv("VLLM_NATIVE"), os.getenv("VLLM_API_KEY")))
            case LoadModel():
                return Failure("CheckpointError", "no such file")
        if self._rank:
            threading.Event().wait()
        return Answer(None)

    def beat(self) -> float:
        return 1.0

    def live(self) -> None:
        threading.Event().wait()

    def describe_node(self) -> NodeInfo:
        return NodeInfo("n", "127.0.0.1", 4000, describe_environment("127.0.0.1"))


@pytest.fixture
def ray(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, on a cluster that is as free afterwards as before."""
    import ray

    monkeypatch.setattr(ray_ranks, "RankActor", Rank)
    monkeypatch.setenv("VLLM_NATIVE", "0")
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    yield ray
    groups = ray.util.placement_group_table().values()
    assert all(group["state"] == "REMOVED" for group in groups)


def start(ray: Any, timeout_s: float = 60.0, num_ranks: int = 2) -> RayRanks:
    parallel = ParallelConfig(tensor_parallel_size=num_ranks)
    return RayRanks(ray, VllmConfig(ModelConfig("m"), parallel_config=parallel), timeout_s)


def are_gone(ranks: RayRanks, ray: Any) -> bool:
    gone, _ = ray.wait(ranks._lives, num_returns=2, timeout=60)
    return len(gone) == 2


def test_orders_go_to_all_and_an_error_keeps_its_class_and_ends_all(ray: Any) -> None:
    ranks = start(ray)
    assert ranks.order([MeasureMemory(), MeasureMemory()]) == [(0, "0", None), (1, "0", None)]
    assert [place.local_size for place in ranks.places] == [2, 2]
    assert ranks.find_fault() is None
    with pytest.raises(CheckpointError, match="no such file"):
        ranks.order([LoadModel(), LoadModel()])
    assert are_gone(ranks, ray)
    ranks.close()


def test_an_actor_that_dies_is_found_and_told(ray: Any) -> None:
    ranks = start(ray)
    ray.kill(ranks._actors[1])
    deadline = time.monotonic() + 60
    while (fault := ranks.find_fault()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert fault == "rank 1's actor is gone"
    with pytest.raises(EngineDeadError, match="rank 1's actor is gone"):
        ranks.order([STEP, STEP])


def test_ranks_that_all_wait_are_given_up(ray: Any) -> None:
    ranks = start(ray, 0.4)
    with pytest.raises(EngineDeadError, match=r"no rank computed for 0\.3 s, while 1 owed"):
        ranks.order([STEP, STEP])
    assert are_gone(ranks, ray)


def test_a_cluster_without_room_is_refused(ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_RAY_ROOM_TIMEOUT", "0.5")
    message = (
        r"no room for 64 workers: it takes 64 x \[CPU: 1\].* have 2 x \[CPU: 3\].* or lower "
        "--tensor-parallel-size"
    )
    with pytest.raises(ConfigError, match=message):
        start(ray, num_ranks=64)
