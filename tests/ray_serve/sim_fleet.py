"""A fleet without Ray: the real ingress, router and replicas, over hosts and cores that fail.

Time is the event loop's (``tests.virtual_loop``). What Serve does is played here: it brings calls
to replicas, finds out late who is dead, and starts others.
"""

import asyncio
import random
from collections import Counter, OrderedDict, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any

from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    RayTaskError,
    TaskCancelledError,
)

from vllm.distributed.kv_events import (
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    NullEventPublisher,
)
from vllm.exceptions import EngineDeadError, VllmError
from vllm.ray_serve.placement import Anyone, Fleet, Only, Place
from vllm.ray_serve.replica import EngineReplica, Updates
from vllm.v1.engine.data_parallel.cache_changes import CacheChanges
from vllm.v1.engine.questions import answer_message
from vllm.v1.engine.wire import (
    AbortRequests,
    AddRequests,
    Ask,
    Dead,
    FromCore,
    GroupInfo,
    KVCacheInfo,
    Ready,
    StepOutputs,
    TellAll,
)
from vllm.v1.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    PrefillStats,
)

UNIT = 32
NUM_UNITS = 40
GROUP = GroupInfo("full attention", UNIT, 1, 1, event_step=UNIT)
INFO = KVCacheInfo(NUM_UNITS, NUM_UNITS * UNIT, 1, 1.0, 4096, UNIT, UNIT, UNIT, "all", (GROUP,))
NUM_TOKENS = 5
_PREFILL_S = 0.02
_DECODE_S = 0.05
# As Serve and the engine watch over what they started.
HEALTH_S = 10.0
HEARTBEAT_S = 8.0
_START_S = 2.0
_DRAIN_S = 600.0


def told_tokens(prompt: Sequence[int]) -> list[int]:
    """The answer of every core."""
    return [(sum(prompt) + number) % 997 for number in range(NUM_TOKENS)]


class SimCore:
    """An engine core that computes one prompt at a time and caches what was used last.

    Owns: what it caches, its requests.
    """

    def __init__(self, epoch: int) -> None:
        self.number = epoch
        self.dead_error: EngineDeadError | None = None
        self.is_frozen = False
        self.taken: list[str] = []
        self._changes = CacheChanges(NullEventPublisher(), epoch=epoch)
        self._held: OrderedDict[bytes, bytes | None] = OrderedDict()
        self._waiting: list[EngineCoreRequest] = []
        self._running: dict[str, asyncio.Task[None]] = {}
        self._say: Callable[[FromCore], None] = lambda message: None
        self._stepping: asyncio.Task[None] | None = None

    def subscribe(self, callback: Callable[[FromCore], None]) -> None:
        self._say = callback

    def shutdown(self, timeout: float = 5.0) -> None:
        self.die("it was stopped")

    def die(self, reason: str) -> None:
        """End, and let whoever listens know."""
        if self.dead_error is None:
            self.dead_error = EngineDeadError(reason)
            for task in self._tasks():
                task.cancel()
            self._say(Dead(reason))

    def freeze(self) -> None:
        """Do nothing any more."""
        self.is_frozen = True
        for task in self._tasks():
            task.cancel()

    def _tasks(self) -> list[asyncio.Task[None]]:
        return [*self._running.values(), *([self._stepping] if self._stepping else [])]

    def send(self, message: Any) -> None:
        if self.dead_error is not None or self.is_frozen:
            return
        if isinstance(message, AddRequests):
            self.taken += [request.request_id for request in message.requests]
            self._waiting += message.requests
            if self._stepping is None:
                self._stepping = asyncio.create_task(self._step())
        elif isinstance(message, AbortRequests):
            gone = message.request_ids
            self._waiting = [r for r in self._waiting if r.request_id not in gone]
            for name in gone:
                if name in self._running:
                    self._running.pop(name).cancel()
        elif isinstance(message, Ask):
            answer_message(message, self, self._say)  # type: ignore[arg-type]
        elif isinstance(message, TellAll):
            self._changes.tell_all()
            self._tell()

    def reset_prefix_cache(self, *_resets: bool) -> bool:
        """Forget what is held."""
        self._held.clear()
        return True

    def num_cached(self, hashes: Sequence[bytes], num_tokens: int) -> int:
        """What a prompt would hit now."""
        limit = min(len(hashes), (num_tokens - 1) // UNIT)
        missing = (i for i, key in enumerate(hashes[:limit]) if key not in self._held)
        return next(missing, limit) * UNIT

    async def _step(self) -> None:
        while self._waiting:
            request = self._waiting.pop(0)
            num_tokens = len(request.prompt_token_ids)
            hit = self.num_cached(request.block_hashes, num_tokens)
            stats = PrefillStats(num_tokens, hit, miss_tokens={"cold": num_tokens - hit})
            for key in request.block_hashes[: hit // UNIT]:
                self._held.move_to_end(key)
            self._tell()
            await asyncio.sleep(_PREFILL_S * (1 + (num_tokens - hit) / UNIT))
            self._keep(request.block_hashes)
            self._tell()
            answering = asyncio.create_task(self._answer(request, stats))
            self._running[request.request_id] = answering
        self._stepping = None

    def _keep(self, hashes: Sequence[bytes]) -> None:
        parent: bytes | None = None
        events: list[Any] = []
        for key in hashes:
            if key not in self._held:
                event = BlockStored([key], parent, [], UNIT, None, None, None, group_idx=0)
                events.append(event)
                self._held[key] = parent
            parent = key
        while len(self._held) > NUM_UNITS:
            key, _ = self._held.popitem(last=False)
            events.append(BlockRemoved([key], None, group_idx=0))
        self._changes.publish(KVEventBatch(0.0, events))

    def speak(self) -> None:
        """Say something that changes nothing."""
        self._changes.publish(KVEventBatch(0.0, [BlockRemoved([b"-" * 32], None, group_idx=0)]))
        self._tell()

    def _tell(self) -> None:
        unused = NUM_UNITS - len(self._held)
        status = self._changes.take(len(self._running), len(self._waiting), unused)
        if status is not None:
            self._say(status)

    async def _answer(self, request: EngineCoreRequest, stats: PrefillStats | None) -> None:
        tokens = told_tokens(request.prompt_token_ids)
        for number, token in enumerate(tokens):
            is_last = number == len(tokens) - 1
            reason = FinishReason.STOP if is_last else None
            output = EngineCoreOutput(
                request.request_id, [token], finish_reason=reason, prefill_stats=stats
            )
            stats = None
            if is_last:
                del self._running[request.request_id]
                self._tell()
            self._say(StepOutputs(EngineCoreOutputs([output])))
            await asyncio.sleep(_DECODE_S)


class SimReplica(EngineReplica):
    """The real replica, over such a core."""

    def __init__(self, name: str, core: SimCore) -> None:
        self._begin(name, core, Ready(1, INFO, 0.0, 0.0))  # type: ignore[arg-type]

    def __del__(self) -> None:  # type: ignore[override]
        """Nothing that would have to be awaited."""


class Host:
    """The process of a replica, and how calls reach it.

    Owns: the replica, the calls that run there.
    """

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.core = SimCore(number)
        self.replica = SimReplica(name, self.core)
        self.is_dead = False
        self._is_awake = asyncio.Event()
        self._is_awake.set()
        self.is_reached = asyncio.Event()
        self.is_reached.set()
        # In order of their coming, as sets of tasks have none that is the same in all runs.
        self._calls: dict[asyncio.Task[Any], None] = {}
        # Faults of the updates channel that are due.
        self.update_faults: list[str] = []
        # Streams that fail at their next item.
        self.stream_faults: list[str] = []

    def kill(self) -> None:
        self.is_dead = True
        self.core.freeze()
        for call in [*self._calls]:
            call.cancel()

    def freeze(self, seconds: float | None) -> None:
        """Let no call get any further, for a while or for ever."""
        self._is_awake.clear()
        if seconds is not None:
            asyncio.get_running_loop().call_later(seconds, self._is_awake.set)

    def part(self, seconds: float) -> None:
        """Let no updates through."""
        self.is_reached.clear()
        asyncio.get_running_loop().call_later(seconds, self.is_reached.set)

    async def gate(self) -> None:
        if self.is_dead:
            raise ActorDiedError()
        await self._is_awake.wait()
        await asyncio.sleep(0.001)

    async def call(self, work: Callable[[], Awaitable[Any]]) -> Any:
        """Run a call of the replica; it ends with the process."""

        async def run() -> Any:
            await self.gate()
            result = await work()
            await self.gate()
            return result

        if self.is_dead:
            raise ActorDiedError()
        task = asyncio.create_task(run())
        self._calls[task] = None
        try:
            return await task
        except asyncio.CancelledError:
            task.cancel()
            if self.is_dead:
                raise ActorDiedError() from None
            raise
        except VllmError as error:
            raise RayTaskError("call", "", error) from None
        finally:
            self._calls.pop(task, None)


class Stream:
    """An answer as Serve streams it: a task brings the items."""

    def __init__(self, items: AsyncIterator[Any]) -> None:
        self._queue: asyncio.Queue[Any] = asyncio.Queue()
        self._task = asyncio.create_task(self._pump(items))

    async def _pump(self, items: AsyncIterator[Any]) -> None:
        try:
            async for item in items:
                self._queue.put_nowait(item)
            self._queue.put_nowait(StopAsyncIteration())
        except Exception as error:
            self._queue.put_nowait(error)

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> Any:
        item = await self._queue.get()
        if isinstance(item, Exception):
            raise item
        return item

    def cancel(self) -> None:
        self._task.cancel()


class SimServe:
    """Serve's handle of the replicas, and its controller.

    Owns: the hosts; which of them Serve believes to serve.

    Args:
        fleet: What the request router carries.
        rng: Of faults.
        num_replicas: That shall serve.
    """

    def __init__(self, fleet: Fleet, rng: random.Random, num_replicas: int) -> None:
        self._fleet, self._rng = fleet, rng
        self.hosts: dict[str, Host] = {}
        self.listed: list[str] = []
        self.num_faults = 0
        self.kinds: Counter[str] = Counter()
        self._num_made = 0
        for _ in range(num_replicas):
            self.listed.append(self._make().name)
        self.generate = SimpleNamespace(remote=lambda place, data: Stream(self._run(place, data)))
        self.describe = SimpleNamespace(remote=self._describe)
        self.updates = SimpleNamespace(remote=self._updates)
        self.tell = SimpleNamespace(remote=self._tell)
        self.ask = SimpleNamespace(remote=self._ask)

    def options(self, stream: bool) -> "SimServe":
        assert stream
        return self

    def _make(self) -> Host:
        host = Host(f"r{self._num_made}", self._num_made)
        self.hosts[host.name] = host
        self._num_made += 1
        return host

    def see(self) -> None:
        """Let the request router know who serves."""
        self._fleet.see(self.listed)

    # ---- calls -------------------------------------------------------------------------------

    async def _find(self, to: Only | Anyone) -> Host:
        while not self.listed:
            await asyncio.sleep(0.05)
        if isinstance(to, Only) and to.replica in self.listed:
            return self.hosts[to.replica]
        return self.hosts[self._rng.choice(self.listed)]

    async def _describe(self, to: Anyone) -> bytes:
        host = await self._find(to)
        return await host.call(lambda: host.replica.describe(to))  # type: ignore[no-any-return]

    async def _tell(self, to: Only, data: bytes) -> None:
        host = await self._find(to)
        await host.call(lambda: host.replica.tell(to, data))

    async def _ask(self, to: Only, data: bytes) -> bytes | None:
        host = await self._find(to)
        return await host.call(lambda: host.replica.ask(to, data))  # type: ignore[no-any-return]

    async def _updates(self, to: Only, listener: str) -> Updates:
        host = await self._find(to)
        updates: Updates = await host.call(lambda: host.replica.updates(to, listener))
        messages = updates.messages
        while host.update_faults and messages:
            fault = host.update_faults.pop()
            place = self._rng.randrange(len(messages))
            if fault == "lose":
                del messages[place]
            elif fault == "double":
                messages.insert(self._rng.randint(0, len(messages)), messages[place])
            else:
                self._rng.shuffle(messages)
        await host.is_reached.wait()
        return Updates(updates.replica, messages)

    async def _run(self, place: Place, data: bytes) -> AsyncIterator[Any]:
        name = None
        while name is None:
            self.see()
            name = self._fleet.place(place.request_id, self.listed)
            if name is None:
                await asyncio.sleep(0.05)
        assert name in self.listed
        host = self.hosts[name]
        items = host.replica.generate(place, data)
        try:
            while True:
                try:
                    item = await host.call(items.__anext__)
                except StopAsyncIteration:
                    return
                fault = host.stream_faults.pop() if host.stream_faults else None
                if fault == "unavailable":
                    raise ActorUnavailableError("away", None)
                if fault == "cancelled":
                    raise TaskCancelledError()
                if fault == "ended":
                    return
                yield item
        finally:
            # As Ray ends the task whose reader is gone, where there still is one.
            if not host.is_dead:
                await items.aclose()  # type: ignore[attr-defined]

    # ---- the controller ----------------------------------------------------------------------

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_later(seconds, action)

    def _replace(self, host: Host) -> None:
        """End one; if it served, start another."""
        host.kill()
        self._unlist(host)

    def _unlist(self, host: Host) -> None:
        """If one serves, let it serve no more, and start another."""
        if host.name in self.listed:
            self.listed.remove(host.name)
            self._later(_START_S, lambda: self.listed.append(self._make().name))
            self._later(_START_S + 0.01, self.see)
            self.see()

    def freeze(self, host: Host) -> None:
        """Let one hang for good; Serve ends it when it could have finished what it has."""
        host.freeze(None)
        self._later(HEALTH_S, lambda: self._unlist(host))
        self._later(HEALTH_S + _DRAIN_S, host.kill)

    def fail(self, kind: str) -> None:
        """Inject a fault into a replica that serves."""
        living = [n for n in self.listed if not self.hosts[n].is_dead]
        if not living:
            return
        self.num_faults += 1
        self.kinds[kind] += 1
        host = self.hosts[self._rng.choice(living)]
        if kind == "actor dies":
            host.kill()
            self._later(self._rng.uniform(0, 1), lambda: self._replace(host))
        elif kind == "core dies":
            host.core.die("its process was ended by signal 9")
            self._later(self._rng.uniform(0, 2), lambda: self._replace(host))
        elif kind == "core freezes":
            host.core.freeze()
            self._later(HEARTBEAT_S, lambda: host.core.die("no sign of life"))
            self._later(HEARTBEAT_S + 1, lambda: self._replace(host))
        elif kind == "actor freezes":
            self.freeze(host)
        elif kind == "actor pauses":
            host.freeze(self._rng.uniform(0.1, 8))
        elif kind == "partition":
            host.part(self._rng.uniform(0.5, 15))
        elif kind in ("lose", "double", "shuffle"):
            host.update_faults.append(kind)
        elif kind in ("unavailable", "ended", "cancelled"):
            host.stream_faults.append(kind)
        else:
            assert kind == "leaves"
            self.listed.remove(host.name)
            self._later(_START_S, lambda: self.listed.append(self._make().name))
            self.see()

    def calm(self) -> None:
        """Let go of faults that found nothing to befall yet."""
        for host in self.hosts.values():
            host.update_faults.clear()
            host.stream_faults.clear()
        # Who misses the last word notices at the next one.
        for name in self.listed:
            self.hosts[name].core.speak()

    def holders_of(self) -> dict[str, list[str]]:
        """Which replicas took each request, in order of their making."""
        taken: dict[str, list[str]] = defaultdict(list)
        for host in self.hosts.values():
            for request_id in host.core.taken:
                taken[request_id.partition("-")[0]].append(host.name)
        return taken
