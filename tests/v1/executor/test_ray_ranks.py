"""Ranks as Ray actors, Ray itself apart: orders, beats, deaths, and where ranks stand."""

import pickle
import threading
from typing import Any

import pytest

from tests.v1.executor.fake_ray import FakeRay
from vllm.config import ModelConfig, ParallelConfig, VllmConfig
from vllm.exceptions import CheckpointError, ConfigError, EngineDeadError
from vllm.utils.ray_cluster import describe_environment
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor.messages import Answer, Failure, LoadModel, MeasureMemory, RunStep
from vllm.v1.executor.ray_actor import NodeInfo
from vllm.v1.executor.ray_ranks import RayRanks, find_places, start_ray_ranks

CONFIG = VllmConfig(
    model_config=ModelConfig("m"), parallel_config=ParallelConfig(tensor_parallel_size=2)
)
STEP = RunStep(SchedulerOutput.make_empty())


class Rank:
    """What an actor runs: measures, fails to load, and in a step waits for ever."""

    def __init__(self, rank: int, ended: threading.Event) -> None:
        self._rank, self._ended = rank, ended

    def carry_out(self, order: bytes) -> Answer | Failure:
        match pickle.loads(order):
            case MeasureMemory():
                return Answer(100 + self._rank)
            case LoadModel():
                return Failure("CheckpointError", "no such file")
        if self._rank:
            self._ended.wait(120)
        return Answer(None)

    def beat(self) -> float:
        return 1.0

    def live(self) -> None:
        self._ended.wait(120)

    def describe_node(self) -> NodeInfo:
        return NodeInfo("n", "10.0.0.1", 4000, describe_environment("10.0.0.1"))


@pytest.fixture
def ray() -> Any:
    ended = threading.Event()
    fake = FakeRay(lambda rank: Rank(rank, ended))
    yield fake
    ended.set()
    for actor in fake.actors:
        actor.die()


def test_orders_go_to_all_and_answers_come_in_rank_order(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_NATIVE", "0")
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    ranks = RayRanks(ray, CONFIG, 60.0)
    passed = ray.options[1]["runtime_env"]["env_vars"]
    assert passed["VLLM_NATIVE"] == "0"
    assert "VLLM_API_KEY" not in passed
    assert ray.bundles == [{"CPU": 1.0}] * 2
    assert ranks.order([MeasureMemory(), MeasureMemory()]) == [100, 101]
    assert ranks.find_fault() is None
    ranks.close()
    ranks.close()
    assert all(actor.is_dead for actor in ray.actors)
    assert ray.num_groups == 0


def test_an_error_keeps_its_class_and_ends_all(ray: FakeRay) -> None:
    ranks = RayRanks(ray, CONFIG, 60.0)
    with pytest.raises(CheckpointError, match="no such file"):
        ranks.order([LoadModel(), LoadModel()])
    assert all(actor.is_dead for actor in ray.actors)


@pytest.mark.slow
def test_ranks_that_all_wait_are_given_up(ray: FakeRay) -> None:
    ranks = RayRanks(ray, CONFIG, 0.4)
    with pytest.raises(EngineDeadError, match=r"no rank computed for 0\.3 s, while 1 owed"):
        ranks.order([STEP, STEP])
    assert all(actor.is_dead for actor in ray.actors)


def test_an_actor_that_dies_is_told(ray: FakeRay) -> None:
    ranks = RayRanks(ray, CONFIG, 60.0)
    threading.Timer(0.05, ray.actors[1].die).start()
    with pytest.raises(EngineDeadError, match="rank 1's actor is gone"):
        ranks.order([STEP, STEP])


def test_an_idle_actor_that_dies_is_found(ray: FakeRay) -> None:
    ranks = RayRanks(ray, CONFIG, 60.0)
    ray.actors[1].die()
    assert ranks.find_fault() == "rank 1's actor is gone"


def test_a_cluster_without_room_is_refused() -> None:
    ray = FakeRay(lambda rank: Rank(rank, threading.Event()), has_room=False)
    with pytest.raises(ConfigError, match="no room for 2 workers with"):
        RayRanks(ray, CONFIG, 60.0)
    assert ray.num_groups == 0


def test_places_follow_machines() -> None:
    nodes = [
        NodeInfo("a", "10.0.0.1", 4000, describe_environment("10.0.0.1")),
        NodeInfo("b", "10.0.0.2", 5000, describe_environment("10.0.0.2")),
    ]
    places = find_places([nodes[0], nodes[0], nodes[1]])
    assert [place.local_size for place in places] == [2, 2, 1]
    assert {place.rendezvous for place in places} == {"tcp://10.0.0.1:4000"}
    assert [(place.rank, place.size) for place in places] == [(0, 3), (1, 3), (2, 3)]


def test_without_ray_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.utils.ray_cluster.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'vllm\[ray\]', or use mp"):
        start_ray_ranks(CONFIG)
