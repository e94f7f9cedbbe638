"""Cores on a cluster, with a stand-in for Ray: a real process behind a real TCP channel."""

import subprocess
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests.v1.engine.fakes import FAKE_CORE
from tests.v1.engine.test_core import request
from vllm.config.parallel import ParallelConfig
from vllm.exceptions import ConfigError
from vllm.v1.engine.data_parallel.ray_core import RayProcess
from vllm.v1.engine.process_client import ProcessCore, on_this_clock
from vllm.v1.engine.wire import AddRequest, StepOutputs
from vllm.v1.messages import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
)


class RayActorError(Exception):
    """An actor is gone."""


class FakeRay:
    """Runs actors in threads of this process."""

    def __init__(self, *, has_room: bool = True) -> None:
        self.has_room = has_room
        self.options: dict[str, Any] = {}
        self.killed = 0
        self.is_gone = False
        self._pool = ThreadPoolExecutor(1)
        self.exceptions = SimpleNamespace(
            RayActorError=RayActorError, GetTimeoutError=FutureTimeoutError
        )

    def remote(self, kind: type) -> Any:
        def options(**given: Any) -> Any:
            self.options = given
            return SimpleNamespace(remote=lambda *arguments: _Actor(self, kind, arguments))

        return SimpleNamespace(options=options)

    def get(self, future: "Future[Any]", timeout: float) -> Any:
        if self.is_gone:
            raise RayActorError("gone")
        return future.result(timeout if self.has_room else 0.05)

    def kill(self, _actor: Any, no_restart: bool) -> None:
        assert no_restart
        self.killed += 1

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 1.0}


class _Actor:
    def __init__(self, ray: FakeRay, kind: type, arguments: tuple[Any, ...]) -> None:
        self._ray = ray
        self._made = ray._pool.submit(kind, *arguments) if ray.has_room else Future()

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> "Future[Any]":
            if not self._ray.has_room:
                return Future()
            return self._ray._pool.submit(lambda: getattr(self._made.result(), name)(*arguments))

        return SimpleNamespace(remote=call)


def launch(ray: FakeRay, vllm_config: Any) -> ProcessCore:
    vllm_config.parallel_config = ParallelConfig(data_parallel_size=2, data_parallel_backend="ray")
    return ProcessCore(
        vllm_config, FAKE_CORE, tcp_host="127.0.0.1", spawn=lambda order: RayProcess(ray, order)
    )


@pytest.mark.slow
def test_a_core_on_the_cluster_serves_and_stops(config) -> None:
    ray = FakeRay()
    core = launch(ray, config())
    core.wait_ready()
    core.send(AddRequest(request(max_tokens=5)))
    tokens: list[int] = []
    while len(tokens) < 5:
        message = core.next_message()
        if isinstance(message, StepOutputs):
            tokens += [t for output in message.outputs.outputs for t in output.new_token_ids]
    assert (ray.options["num_cpus"], ray.options["scheduling_strategy"]) == (1, "SPREAD")
    core.shutdown()
    assert not psutil.pid_exists(core.pid)
    assert core.dead_error is None


@pytest.mark.slow
def test_a_machine_that_is_lost_takes_its_core_along(config) -> None:
    ray = FakeRay()
    core = launch(ray, config(step_s=0.01))
    core.wait_ready()
    process = psutil.Process(core.pid)
    host = core._process._actor._made.result()
    ray.is_gone = True
    while core.dead_error is None:
        core.next_message()
    assert "exited with status 1" in str(core.dead_error)
    process.kill()
    assert host.wait(60.0) == -9
    core.shutdown()


def test_a_cluster_without_room_is_told(config, monkeypatch) -> None:
    ray = FakeRay(has_room=False)
    with pytest.raises(ConfigError, match="no room for engine core 0 with 1 workers"):
        launch(ray, config())
    assert ray.killed == 1


def test_an_address_of_another_machine_is_told(config) -> None:
    with pytest.raises(ConfigError, match=r"data_parallel_address='192.0.2.77' is no address"):
        ProcessCore(config(), FAKE_CORE, tcp_host="192.0.2.77", spawn=lambda order: None)


def test_times_of_another_clock_become_ours() -> None:
    event = EngineCoreEvent(EngineCoreEventType.QUEUED, 9.0)
    outputs = EngineCoreOutputs([EngineCoreOutput("r", [1], events=[event])], timestamp=10.0)
    moved = on_this_clock(StepOutputs(outputs)).outputs
    assert moved.timestamp > 100.0
    assert moved.timestamp - moved.outputs[0].events[0].timestamp == pytest.approx(1.0)


def test_a_wait_that_ends_first_is_a_timeout(config) -> None:
    ray = FakeRay()
    process = object.__new__(RayProcess)
    process._ray, process._code = ray, None
    process._actor = SimpleNamespace(
        wait=SimpleNamespace(remote=lambda _t: ray._pool.submit(lambda: None))
    )
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
