"""The ingress's handle of replicas under faults: every request ends, and none is computed twice."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from tests.v1.engine.fakes import make_config
from vllm.config.parallel import ParallelConfig
from vllm.ray_serve import cores as cores_module
from vllm.ray_serve.cores import FleetCores
from vllm.ray_serve.placement import Fleet, Only, Place
from vllm.ray_serve.replica import News, Taken
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.wire import (
    AbortRequests,
    AddRequest,
    Codec,
    CoreStatus,
    Dead,
    GroupInfo,
    KVCacheInfo,
    Ready,
    RequestRejected,
    StepOutputs,
)
from vllm.v1.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
)

UNIT = 32
CODEC = Codec()
GROUP = GroupInfo("full attention", UNIT, 1, 1, event_step=UNIT)
INFO = KVCacheInfo(100, 3200, 1, 1.0, 4096, UNIT, UNIT, UNIT, "all", (GROUP,))
NUM_TOKENS = 4
FAULTS = ("died", "unavailable", "dead", "ended")


class Stream:
    """An answer as Serve streams it."""

    def __init__(self, items: AsyncIterator[Any]) -> None:
        self._items = items
        self.is_cancelled = False

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> Any:
        return await anext(self._items)

    def cancel(self) -> None:
        self.is_cancelled = True


class Engines:
    """Serve's handle of replicas that fail, by chance, before, between and after tokens.

    Owns: what each replica computed of each request.
    """

    def __init__(self, fleet: Fleet, rng: random.Random, rate: float) -> None:
        self._fleet, self._rng, self._rate = fleet, rng, rate
        self.names = [f"r{number}" for number in range(4)]
        self.num_made = len(self.names)
        self.num_faults = 0
        self.sent: Counter[str] = Counter()
        self.begun: dict[str, set[str]] = {}
        self.numbers: Counter[str] = Counter()
        self.generate = SimpleNamespace(remote=lambda place, data: Stream(self._run(place, data)))
        self.describe = SimpleNamespace(remote=self._describe)
        self.news = SimpleNamespace(remote=self._news)
        self.tell = SimpleNamespace(remote=self._tell)

    def options(self, stream: bool) -> "Engines":
        assert stream
        return self

    async def _describe(self, _to: Any) -> bytes:
        return CODEC.encode(Ready(1, INFO, 0.0, 0.0))

    async def _tell(self, _to: Only, _data: bytes) -> None:
        return None

    async def _news(self, to: Only, _listener: str) -> News:
        await asyncio.sleep(0.001)
        messages = []
        for _ in range(self._rng.randrange(3)):
            status = CoreStatus(0, 0, 100, number=self.numbers[to.replica], epoch=hash(to.replica))
            self.numbers[to.replica] += 1
            fate = self._rng.random()
            if fate < 0.8:
                messages.append(CODEC.encode(status))
            if fate < 0.1:
                messages.append(CODEC.encode(status))
            self.num_faults += fate > 0.8 or fate < 0.1
        self._rng.shuffle(messages)
        return News(to.replica, messages)

    def _fail(self, name: str) -> str | None:
        if self._rng.random() > self._rate:
            return None
        self.num_faults += 1
        fault = self._rng.choice(FAULTS)
        if fault in ("died", "dead") and name in self.names:
            # Serve finds out later, and starts another one.
            asyncio.get_running_loop().call_later(0.02, self._replace, name)
        return fault

    def _replace(self, name: str) -> None:
        if name in self.names:
            self.names.remove(name)
            self.names.append(f"r{self.num_made}")
            self.num_made += 1

    async def _run(self, place: Place, data: bytes) -> AsyncIterator[Any]:
        request = msgspec.msgpack.decode(data, type=EngineCoreRequest)
        name = None
        while name is None:
            self._fleet.see(self.names)
            name = self._fleet.place(place.request_id, self.names)
            await asyncio.sleep(0.001)
        yield Taken(name)
        for number in range(NUM_TOKENS):
            fault = self._fail(name)
            if fault == "died":
                raise ActorDiedError()
            if fault == "unavailable":
                raise ActorUnavailableError("away", None)
            if fault == "dead":
                yield CODEC.encode(Dead("its process was ended by signal 9"))
                return
            if fault == "ended":
                return
            self.sent[request.request_id] += 1
            self.begun.setdefault(request.request_id, set()).add(name)
            is_last = number == NUM_TOKENS - 1
            output = EngineCoreOutput(
                request.request_id, [number], finish_reason=FinishReason.STOP if is_last else None
            )
            yield CODEC.encode(StepOutputs(EngineCoreOutputs([output])))
            await asyncio.sleep(0)


@pytest.mark.slow
async def test_a_thousand_faults_leave_no_request_without_an_end(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores_module, "_WATCH_S", 0.005)
    rng = random.Random(8)
    config = make_config(tmp_path)
    config.parallel_config = ParallelConfig(data_parallel_size=6)
    fleet = Fleet(6)
    engines = Engines(fleet, rng, rate=0.08)
    handle = FleetCores(config, engines, fleet)
    await handle.start()
    fleet.see(engines.names)
    ended: dict[str, str] = {}
    tokens: Counter[str] = Counter()

    def take(message: Any) -> None:
        if isinstance(message, RequestRejected):
            assert message.request_id not in ended
            ended[message.request_id] = message.error.kind
        elif isinstance(message, StepOutputs):
            for output in message.outputs.outputs:
                assert output.request_id not in ended
                tokens[output.request_id] += len(output.new_token_ids)
                if output.finished:
                    ended[output.request_id] = "done"

    handle.subscribe(take)
    number = 0
    while engines.num_faults < 1000:
        for _ in range(20):
            prompt = [rng.randrange(3)] * (UNIT * rng.randint(1, 4) + 1)
            name = str(number)
            handle.send(AddRequest(EngineCoreRequest(name, prompt, SamplingParams(), 0.0)))
            if rng.random() < 0.05:
                handle.send(AbortRequests([name]))
                ended[name] = "aborted"
            number += 1
        await asyncio.sleep(0.01)
    async with asyncio.timeout(30):
        while handle._following:
            await asyncio.sleep(0.01)
    assert len(ended) == number
    kinds = Counter(ended.values())
    assert set(kinds) <= {"done", "aborted", "EngineCoreLostError"}
    assert kinds["done"] > 0.6 * number
    assert kinds["EngineCoreLostError"] > 10
    for name, outcome in ended.items():
        if outcome == "done":
            assert tokens[name] == NUM_TOKENS
        # Once a token came, nobody else computes it.
        assert len(engines.begun.get(name, ())) <= 1
    # Nothing is left behind: no load, no prompt.
    await asyncio.sleep(0.05)
    assert fleet.router._in_flight.num_requests.sum() == 0
    assert not fleet._prompts
    assert not fleet._num_open
    handle.shutdown()
    await asyncio.sleep(0.01)


@pytest.mark.parametrize("broken", ["living", "observe"])
async def test_a_fault_of_its_own_is_told(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """A front end that follows nobody any more says so: Serve starts another one."""
    monkeypatch.setattr(cores_module, "_WATCH_S", 0.005)
    config = make_config(tmp_path)
    config.parallel_config = ParallelConfig(data_parallel_size=6)
    fleet = Fleet(6)
    handle = FleetCores(config, Engines(fleet, random.Random(8), rate=0), fleet)
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
