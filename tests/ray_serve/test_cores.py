"""The ingress's handle of replicas: faults of its own; those of others are in test_faults.py."""

import asyncio
import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest

from tests.ray_serve.sim_fleet import SimServe
from tests.v1.engine.fakes import make_config
from vllm.config.parallel import ParallelConfig
from vllm.exceptions import UserInputError
from vllm.ray_serve import cores as cores_module
from vllm.ray_serve.cores import FleetCores
from vllm.ray_serve.ingress import Ingress
from vllm.ray_serve.placement import Fleet
from vllm.ray_serve.replica import EngineReplica
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.pending_calls import PendingCalls
from vllm.v1.engine.questions import Question, ResetCache
from vllm.v1.engine.wire import AddRequests, Answer, Dead, RequestRejected
from vllm.v1.messages import EngineCoreRequest


@pytest.mark.parametrize("broken", ["living", "observe"])
async def test_a_fault_of_its_own_is_told(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """A front end that follows nobody any more says so: Serve starts another one."""
    monkeypatch.setattr(cores_module, "_WATCH_S", 0.005)
    config = make_config(tmp_path)
    config.parallel_config = ParallelConfig(data_parallel_size=6)
    fleet = Fleet(6)
    handle = FleetCores(config, SimServe(fleet, random.Random(8), 1), fleet)
    await handle.start()
    told: list[Any] = []
    handle.subscribe(told.append)
    fleet.see(["r0"])

    def fail(*_: Any) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(fleet if broken == "living" else fleet.router, broken, fail)
    async with asyncio.timeout(30):
        while handle.dead_error is None:
            await asyncio.sleep(0.005)
    assert [m.message for m in told if isinstance(m, Dead)] == [
        "The fleet is not followed any more: KeyError('a bug')"
    ]
    handle.shutdown()
    await asyncio.sleep(0.01)


async def test_a_fault_of_its_own_ends_the_request(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path)
    config.parallel_config = ParallelConfig(data_parallel_size=6)
    fleet = Fleet(6)
    handle = FleetCores(config, SimServe(fleet, random.Random(8), 1), fleet)
    await handle.start()
    told: list[Any] = []
    handle.subscribe(told.append)
    fleet.see(["r0"])

    def fail(*_: Any) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(fleet, "expect", fail)
    handle.send(AddRequests([EngineCoreRequest("a", [1, 2], SamplingParams(), 0.0)]))
    async with asyncio.timeout(30):
        while not any(isinstance(message, RequestRejected) for message in told):
            await asyncio.sleep(0.005)
    (rejected,) = [message for message in told if isinstance(message, RequestRejected)]
    assert (rejected.request_id, rejected.error.kind) == ("a", "EngineError")
    handle.shutdown()
    await asyncio.sleep(0.01)


class AskNumbers(Question[list[int]], frozen=True):
    """Which replicas there are; the first of a fleet refuses if it is told to."""

    refuses: bool = False

    def answer(self, core: Any, tell: Callable[[list[int]], None]) -> None:
        if self.refuses and core.number == 0:
            raise UserInputError("not this one", "refuses")
        tell([core.number])

    def merge(self, replies: Sequence[list[int]]) -> list[int]:
        return [number for reply in replies for number in reply]


class AskFirst(Question[list[int]], frozen=True):
    """The same of one."""

    is_for_one: ClassVar[bool] = True

    def answer(self, core: Any, tell: Callable[[list[int]], None]) -> None:
        tell([core.number])

    def merge(self, replies: Sequence[list[int]]) -> list[int]:
        return AskNumbers().merge(replies)


async def test_questions_go_to_every_replica_that_serves(tmp_path: Any) -> None:
    config = make_config(tmp_path)
    config.parallel_config = ParallelConfig(data_parallel_size=6)
    fleet = Fleet(6)
    serve = SimServe(fleet, random.Random(8), 3)
    handle = FleetCores(config, serve, fleet)
    await handle.start()
    calls = PendingCalls()

    def take(message: Any) -> None:
        if isinstance(message, Answer):
            calls.settle(message)

    handle.subscribe(take)
    serve.see()

    async def ask(question: Question[Any]) -> Any:
        call = calls.open(question.to_message, handle.send)
        return question.read(await asyncio.wait_for(asyncio.wrap_future(call), 30))

    assert await ask(AskNumbers()) == [0, 1, 2]
    assert await ask(AskFirst()) == [0]
    assert await ask(ResetCache()) is True
    with pytest.raises(UserInputError, match="not this one"):
        await ask(AskNumbers(refuses=True))
    # One that is gone owes nothing; of none there is what nobody has.
    serve.hosts["r1"].kill()
    assert await ask(AskNumbers()) == [0, 2]
    fleet.see([])
    assert await ask(AskNumbers()) == []
    assert await ask(ResetCache()) is False
    handle.shutdown()
    await asyncio.sleep(0.01)


async def test_what_never_served_is_stopped_without_a_fault() -> None:
    """Serve stops replicas and ingresses whose start failed, too."""
    stopped: list[bool] = []
    core = SimpleNamespace(dead_error=None, shutdown=lambda: stopped.append(True))
    # No objects of these classes: they would be stopped once more when they are collected.
    replica = SimpleNamespace(_core=core, _neighbours=EngineReplica._neighbours)
    await EngineReplica.__del__(cast(Any, replica))
    assert stopped == [True]
    await Ingress.__del__(cast(Any, SimpleNamespace()))
