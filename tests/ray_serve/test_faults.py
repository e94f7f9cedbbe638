"""A thousand faults: every request ends, none is computed twice, and what is believed is true."""

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.ray_serve import sim_fleet
from tests.ray_serve.sim_fleet import UNIT, SimServe, told_tokens
from tests.v1.engine.fakes import make_config
from tests.virtual_loop import run_virtually
from vllm.config.parallel import ParallelConfig
from vllm.ray_serve.cores import FleetCores
from vllm.ray_serve.placement import Fleet
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.data_parallel.short_hash import shorten
from vllm.v1.engine.wire import AbortRequests, AddRequests, RequestRejected, StepOutputs
from vllm.v1.messages import EngineCoreRequest

FAULTS = (
    "actor dies",
    "core dies",
    "core freezes",
    "actor freezes",
    "actor pauses",
    "partition",
    *("lose", "double", "shuffle", "unavailable", "ended", "cancelled") * 2,
    "leaves",
)
NUM_FAULTS = 144
NUM_NEWS_FAULTS = 12
# Nothing is said of tokens that were on their way when their replica was given up.
OUTCOMES = {"exact", "waited", "evicted", "late", "unsure", ""}


class Clients:
    """Conversations that go on, whatever happens to their turns.

    Owns: what was sent, and what came of it.
    """

    def __init__(self, handle: FleetCores, serve: SimServe, rng: random.Random) -> None:
        self._handle, self._serve, self._rng = handle, serve, rng
        self.prompts: dict[str, list[int]] = {}
        self.sent_at: dict[str, float] = {}
        self.ended: dict[str, str] = {}
        self.longest_s = 0.0
        self.tokens: dict[str, list[int]] = {}
        self.begun_by: dict[str, list[str]] = {}
        self.outcomes: Counter[str] = Counter()
        self._histories = [[n] * UNIT for n in range(6)]
        handle.subscribe(self._take)

    def hash_prompt(self, request: EngineCoreRequest) -> list[bytes]:
        """Hash as the front end does; its seed is drawn."""
        assert self._handle._hash_prompt is not None
        return list(self._handle._hash_prompt(request))

    def send(self) -> str:
        """Send the next turn of a conversation."""
        number = self._rng.randrange(len(self._histories))
        prompt = self._histories[number] + [len(self.prompts)] * self._rng.randint(1, 2 * UNIT)
        self._histories[number] = prompt if len(prompt) < 8 * UNIT else prompt[:UNIT]
        name = f"q{len(self.prompts)}"
        self.prompts[name], self.tokens[name] = prompt, []
        self.sent_at[name] = self._handle._loop.time()
        self._handle.send(AddRequests([EngineCoreRequest(name, prompt, SamplingParams(), 0.0)]))
        return name

    def abort(self, name: str) -> None:
        """Let go of a request."""
        if name not in self.ended:
            self._handle.send(AbortRequests([name]))
            self._end(name, "aborted")

    def _end(self, name: str, outcome: str) -> None:
        assert name not in self.ended, "it ended twice"
        self.ended[name] = outcome
        self.longest_s = max(self.longest_s, self._handle._loop.time() - self.sent_at[name])

    def _take(self, message: Any) -> None:
        if isinstance(message, RequestRejected):
            if self.ended.get(message.request_id) != "aborted":
                self._end(message.request_id, message.error.kind)
        elif isinstance(message, StepOutputs):
            for output in message.outputs.outputs:
                name = output.request_id
                if self.ended.get(name) == "aborted":
                    continue
                assert name not in self.ended, "a token came after the end"
                # Who had it when its first byte went out.
                if name not in self.begun_by:
                    self.begun_by[name] = self._serve.holders_of()[name]
                self.tokens[name] += output.new_token_ids
                if output.prefill_stats is not None:
                    self.outcomes[output.prefill_stats.prediction] += 1
                if output.finished:
                    self._end(name, "done")


async def live_through_faults(config: Any, seed: int, num_faults: int) -> Clients:
    rng = random.Random(seed)
    fleet = Fleet(8)
    serve = SimServe(fleet, rng, 4)
    handle = FleetCores(config, serve, fleet)
    await handle.start()
    serve.see()
    clients = Clients(handle, serve, rng)
    while serve.num_faults < num_faults:
        name = clients.send()
        await asyncio.sleep(rng.expovariate(8))
        if rng.random() < 0.05:
            clients.abort(name)
        if rng.random() < 0.6:
            serve.fail(rng.choice(FAULTS))
    await asyncio.sleep(20)
    # Then nobody dies, so that what was not heard of a replica is not forgotten with it.
    for number in range(NUM_NEWS_FAULTS):
        clients.send()
        serve.fail(("lose", "shuffle", "double")[number % 3])
        await asyncio.sleep(0.7)
    for _ in range(4000):
        if not clients.prompts.keys() - clients.ended.keys():
            break
        await asyncio.sleep(0.1)
    assert not clients.prompts.keys() - clients.ended.keys(), "they hang"
    await asyncio.sleep(20)
    # Quiet again: everything is known, and comes as it was foretold.
    serve.calm()
    await asyncio.sleep(5)
    check_beliefs(clients, serve, fleet)
    before = Counter(clients.outcomes)
    for _ in range(6):
        name = clients.send()
        while name not in clients.ended:
            await asyncio.sleep(0.1)
        assert clients.ended[name] == "done"
        await asyncio.sleep(0.3)
    assert clients.outcomes - before == {"exact": 6}
    check_rest(fleet, serve)
    assert handle.dead_error is None
    handle.shutdown()
    await asyncio.sleep(1)
    return clients


def check_beliefs(clients: Clients, serve: SimServe, fleet: Fleet) -> None:
    """What the router believes of each replica is what that one has."""
    hash_prompt = clients.hash_prompt
    num_cached = 0
    assert sorted(fleet.living()) == sorted(serve.listed)
    assert len(serve.listed) == 4
    for prompt in [*clients.prompts.values()][-20:]:
        request = EngineCoreRequest("probe", prompt, SamplingParams(), 0.0)
        hashes = hash_prompt(request)
        for name, rank in fleet.living().items():
            core = serve.hosts[name].core
            shorts = [shorten(block_hash) for block_hash in hashes]
            fleet.router.route_prompt("probe", shorts, len(prompt), rank)
            foretold = fleet.router.foretold("probe")
            assert foretold == core.num_cached(hashes, len(prompt))
            num_cached += foretold
            fleet.router.end("probe")
    assert num_cached > 20 * UNIT


def check_rest(fleet: Fleet, serve: SimServe) -> None:
    """Nothing is left behind: no load, no prompt, no queue."""
    assert fleet.router._in_flight.num_requests.sum() == 0
    assert not fleet._prompts
    assert not fleet._num_open
    for name in serve.listed:
        replica = serve.hosts[name].replica
        assert not replica._queues
        assert not replica._backlog


@pytest.mark.parametrize("seed", range(7))
def test_every_request_ends_and_none_is_computed_twice(tmp_path: Path, seed: int) -> None:
    config = make_config(tmp_path)
    config.parallel_config = ParallelConfig(data_parallel_size=8)
    clients = run_virtually(live_through_faults(config, seed, NUM_FAULTS))
    kinds = Counter(clients.ended.values())
    assert set(kinds) <= {"done", "aborted", "EngineCoreLostError"}
    assert kinds["done"] > 0.5 * len(clients.ended)
    assert set(clients.outcomes) <= OUTCOMES
    assert clients.outcomes[""] < 0.06 * len(clients.ended)
    # None hangs: who was told nothing was told so after a minute, or what its replicas took to die.
    assert clients.longest_s < 120
    taken = clients._serve.holders_of()
    for name, outcome in clients.ended.items():
        tokens = told_tokens(clients.prompts[name])
        got = clients.tokens[name]
        assert got == tokens[: len(got)]
        assert (got == tokens) == (outcome == "done")
        if name in clients.begun_by:
            assert taken[name] == clients.begun_by[name], "another one took it after its first byte"


async def ask_one(config: Any, wait_for_token: bool, freezes: bool) -> tuple[Clients, str]:
    """Send a request, and let the actor that has it hang."""
    fleet = Fleet(8)
    serve = SimServe(fleet, random.Random(1), 2)
    handle = FleetCores(config, serve, fleet)
    await handle.start()
    serve.see()
    clients = Clients(handle, serve, random.Random(1))
    name = clients.send()
    while not (clients.tokens[name] if wait_for_token else serve.holders_of()[name]):
        await asyncio.sleep(0.001)
    if freezes:
        (holder,) = serve.holders_of()[name]
        serve.freeze(serve.hosts[holder])
    while name not in clients.ended:
        await asyncio.sleep(0.1)
    handle.shutdown()
    await asyncio.sleep(1)
    return clients, name


@pytest.mark.parametrize(("has_token", "outcome"), [(True, "EngineCoreLostError"), (False, "done")])
def test_a_request_leaves_an_actor_that_hangs(
    tmp_path: Path, has_token: bool, outcome: str
) -> None:
    """Serve waits for such an actor as long as for one that finishes what it has."""
    config = make_config(tmp_path)
    config.parallel_config = ParallelConfig(data_parallel_size=8)
    clients, name = run_virtually(ask_one(config, has_token, True))
    assert clients.ended[name] == outcome
    assert clients.longest_s < 60
    assert len(clients._serve.holders_of()[name]) == 1 + (not has_token)


def test_a_request_stays_where_it_only_takes_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sim_fleet, "_PREFILL_S", 300.0)
    config = make_config(tmp_path)
    config.parallel_config = ParallelConfig(data_parallel_size=8)
    clients, name = run_virtually(ask_one(config, False, False))
    assert clients.ended[name] == "done"
    assert clients.longest_s > 300
    assert len(clients._serve.holders_of()[name]) == 1
