"""Workers and engine cores on the two nodes of a real Ray cluster."""

import os
import signal
from typing import Any

import psutil
import pytest

from tests.v1.engine.conftest import config
from tests.v1.engine.fakes import FAKE_CORE
from tests.v1.engine.test_core import request
from vllm import LLM, SamplingParams
from vllm.config.parallel import ParallelConfig
from vllm.exceptions import ConfigError
from vllm.v1.engine.data_parallel.ray_core import RayProcess
from vllm.v1.engine.process_client import ProcessCore
from vllm.v1.engine.wire import AddRequests, StepOutputs

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    # What Ray warns of, in its own modules, is its own.
    pytest.mark.filterwarnings("ignore"),
]
__all__ = ["config"]  # a fixture
PROMPTS = ["The access code of the archive is", "One two three four", "The harbour"]
PARAMS = SamplingParams(temperature=0, max_tokens=8)


def texts(llm: LLM) -> list[str]:
    return [output.outputs[0].text for output in llm.generate(PROMPTS, PARAMS)]


def find_nodes(ending: str) -> set[int]:
    """The raylets under which processes run whose command line ends so."""
    raylets = set()
    for process in psutil.Process().children(recursive=True):
        command = " ".join(process.cmdline())
        if ending in command:
            above = [parent for parent in process.parents() if "raylet" in parent.name()]
            raylets |= {parent.pid for parent in above[:1]}
    return raylets


def test_workers_stand_on_two_nodes(cluster: Any, alone: LLM) -> None:
    """Each node has room for one of two workers that take two CPUs of its three."""
    import ray

    blockers = [
        ray.util.placement_group([{"CPU": 2}] * 2, strategy="STRICT_SPREAD"),
    ]
    assert blockers[0].wait(120)
    try:
        llm = LLM(
            "deepseek-v4",
            block_size=32,
            tensor_parallel_size=2,
            distributed_executor_backend="ray",
        )
        assert texts(llm) == texts(alone)
        assert len(find_nodes("ray::RankActor")) == 2
        del llm
    finally:
        for blocker in blockers:
            ray.util.remove_placement_group(blocker)


def test_cores_stand_on_two_nodes(cluster: Any, alone: LLM) -> None:
    llm = LLM(
        "deepseek-v4",
        block_size=32,
        data_parallel_size=2,
        data_parallel_backend="ray",
        data_parallel_address="127.0.0.1",
    )
    assert texts(llm) == texts(alone)
    assert len(find_nodes("vllm.v1.engine.core_proc")) == 2


def launch(vllm_config: Any, **parallel: Any) -> ProcessCore:
    import ray

    vllm_config.parallel_config = ParallelConfig(
        data_parallel_size=2, data_parallel_backend="ray", **parallel
    )
    return ProcessCore(
        vllm_config, FAKE_CORE, tcp_host="127.0.0.1", spawn=lambda order: RayProcess(ray, order)
    )


def test_a_core_serves_stops_and_ends_with_its_actor(cluster: Any, config: Any) -> None:
    core = launch(config())
    core.wait_ready()
    core.send(AddRequests([request(max_tokens=5)]))
    tokens: list[int] = []
    while len(tokens) < 5:
        message = core.next_message()
        if isinstance(message, StepOutputs):
            tokens += [t for output in message.outputs.outputs for t in output.new_token_ids]
    core.shutdown()
    assert not psutil.pid_exists(core.pid)
    assert core.dead_error is None
    # With its actor, or its machine, a core ends.
    lost = launch(config())
    lost.wait_ready()
    process = psutil.Process(lost.pid)
    actor = process.parent()
    assert actor is not None
    os.kill(actor.pid, signal.SIGKILL)
    process.wait(120)
    while lost.dead_error is None:
        lost.next_message()
    lost.shutdown()


def test_a_cluster_without_room_is_told(
    cluster: Any, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_RAY_ROOM_TIMEOUT", "1")
    message = r"no room for engine core 0 of 2 with 64 workers: it takes 1 x \[CPU: 64\]"
    with pytest.raises(ConfigError, match=message):
        launch(config(), tensor_parallel_size=64)
