"""A replica of the fleet: one engine core, in a process of its own beside the actor."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial, singledispatchmethod

import msgspec
import ray
from ray import serve

from vllm.config import VllmConfig
from vllm.exceptions import EngineDeadError
from vllm.logger import init_logger, setup_logging
from vllm.ray_serve.neighbours import Neighbours
from vllm.ray_serve.placement import Anyone, Only, Place, open_fleet
from vllm.v1.engine.client import AsyncEngineCoreHandle
from vllm.v1.engine.data_parallel.ranks import make_rank_config
from vllm.v1.engine.pending_calls import PendingCalls
from vllm.v1.engine.process_client import ProcessCore
from vllm.v1.engine.wire import (
    AbortRequests,
    AddRequests,
    Answer,
    Ask,
    Codec,
    CoreStatus,
    Dead,
    FromCore,
    Ready,
    RequestRejected,
    StepOutputs,
    TellAll,
)
from vllm.v1.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from vllm.v1.metrics.stats import PullStats, SchedulerStats

logger = init_logger(__name__)

# How long a question for updates waits for some.
_POLL_S = 1.0
# How long a request has nothing to say before it says that it is here.
_ALIVE_S = 5.0
# Messages kept for a front end that does not ask; it notices the gap.
_MAX_UPDATES = 4096
# A front end that has not asked for so long is gone.
_FORGET_S = 60.0


@dataclass(frozen=True, slots=True)
class Taken:
    """First word about a request: a replica has it. Said again where nothing else is for a while.

    Attributes:
        replica: Its unique id.
    """

    replica: str


@dataclass(frozen=True, slots=True)
class Updates:
    """What a replica says to a front end.

    Attributes:
        replica: Its unique id.
        messages: Encoded ``CoreStatus``.
    """

    replica: str
    messages: list[bytes]


@dataclass(slots=True)
class _Listener:
    waiting: deque[bytes] = field(default_factory=lambda: deque(maxlen=_MAX_UPDATES))
    is_new: asyncio.Event = field(default_factory=asyncio.Event)
    asked_at: float = 0.0


class EngineReplica:
    """Serves requests from its engine core, and tells front ends of its cache.

    Owns: the core's process, the requests' queues, who listens.

    Args:
        config: Of all replicas.
        core_factory: ``module:function`` that makes the core.
        fleet: Its name.
    """

    # None: replicas begin empty, or this one did not get that far.
    _neighbours: Neighbours | None = None

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: VllmConfig, core_factory: str, fleet: str
    ) -> None:
        context = serve.get_replica_context()
        observability = config.observability_config
        setup_logging(
            f"(Replica_{context.replica_id.unique_id[:6]}) ",
            log_format=observability.log_format,
            config_file=observability.logging_config,
        )
        rank = context.rank.rank % config.parallel_config.data_parallel_size
        own = make_rank_config(config, rank, ray.util.get_node_ip_address())
        # Known from here on: one that does not become ready is stopped all the same.
        self._core: AsyncEngineCoreHandle = ProcessCore(own, core_factory)
        ready = await asyncio.to_thread(self._core.wait_ready)
        self._begin(context.replica_id.unique_id, self._core, ready)
        if config.parallel_config.warm_pull_bytes:
            places = open_fleet(fleet, config.parallel_config.data_parallel_size)
            handle = serve.get_deployment_handle(context.deployment, context.app_name)
            self._neighbours = Neighbours(config.parallel_config, handle, places, self._name)
            # Serve sends requests here when this has ended.
            await self._neighbours.pull(partial(self.ask, Only(self._name)))

    def _begin(self, name: str, core: AsyncEngineCoreHandle, ready: Ready) -> None:
        """Take a core that serves; nothing here is Ray's."""
        self._name = name
        self._core = core
        self._ready = ready
        self._codec = Codec()
        self._queues: dict[str, asyncio.Queue[bytes]] = {}
        self._listeners: dict[str, _Listener] = {}
        self._calls = PendingCalls()
        self._backlog: dict[str, int] = {}
        # What was pulled, until a front end is told.
        self._pulled: PullStats | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def _bind(self) -> asyncio.AbstractEventLoop:
        """Hand the core's messages to the event loop that serves calls, from the first on."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._core.subscribe(self._hand_over)
        return self._loop

    # ---- calls -------------------------------------------------------------------------------

    async def describe(self, _to: Anyone) -> bytes:
        """Return what the core said when it was ready."""
        self._bind()
        return self._codec.encode(self._ready)

    async def generate(self, _place: Place, data: bytes) -> AsyncIterator[Taken | bytes]:
        """Run a request: yields who has it, then its outputs as encoded messages.

        Closing it aborts the request.
        """
        self._bind()
        request = msgspec.msgpack.decode(data, type=EngineCoreRequest)
        queue: asyncio.Queue[bytes] = asyncio.Queue()
        request_id = request.request_id
        self._queues[request_id] = queue
        self._backlog[request_id] = len(request.prompt_token_ids)
        try:
            self._check_alive()
            self._core.send(AddRequests([request]))
            yield Taken(self._name)
            while True:
                try:
                    async with asyncio.timeout(_ALIVE_S):
                        message = await queue.get()
                except TimeoutError:
                    yield Taken(self._name)
                    continue
                yield message
                if request_id not in self._queues:
                    while not queue.empty():
                        yield queue.get_nowait()
                    return
        finally:
            self._backlog.pop(request_id, None)
            if self._queues.pop(request_id, None) is not None:
                self._core.send(AbortRequests([request_id]))

    async def updates(self, to: Only, listener: str) -> Updates:
        """Return what is new for a front end; waits a moment where nothing is."""
        loop = self._bind()
        self._check_alive()
        if to.replica != self._name:
            return Updates(self._name, [])
        known = self._listeners.get(listener)
        if known is None:
            known = self._listeners[listener] = _Listener()
            self._core.send(TellAll())
        known.asked_at = loop.time()
        if not known.waiting:
            known.is_new.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(known.is_new.wait(), _POLL_S)
        messages = list(known.waiting)
        known.waiting.clear()
        known.asked_at = loop.time()
        return Updates(self._name, messages)

    async def tell(self, to: Only, data: bytes) -> None:
        """Hand the core a message that has no answer."""
        if to.replica == self._name:
            self._core.send(self._codec.decode_to_core(data))

    async def ask(self, to: Only, data: bytes) -> bytes | None:
        """Put a question to the core; None: it was for another replica."""
        self._bind()
        self._check_alive()
        question = self._codec.decode_to_core(data)
        if to.replica != self._name or not isinstance(question, Ask):
            return None
        kind, body = question.kind, question.body
        call = self._calls.open(lambda call_id: Ask(call_id, kind, body), self._core.send)
        answer = await asyncio.wrap_future(call)
        return self._codec.encode(answer)

    # ---- Serve's own questions ---------------------------------------------------------------

    def check_health(self) -> None:
        """Return while the core lives.

        Raises:
            EngineDeadError: It does not: Serve starts another replica.
        """
        self._check_alive()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return what the fleet's number follows."""
        return {
            "requests": float(len(self._queues)),
            "prefill_tokens": float(sum(self._backlog.values())),
        }

    async def __del__(self) -> None:
        """Hand on what was used most, when Serve stops this replica; requests have ended."""
        core = getattr(self, "_core", None)
        if core is None:
            return
        if self._neighbours is not None and core.dead_error is None:
            await self._neighbours.hand_on(partial(self.ask, Only(self._name)))
        await asyncio.to_thread(core.shutdown)

    def _check_alive(self) -> None:
        if self._core.dead_error is not None:
            raise EngineDeadError(str(self._core.dead_error))

    # ---- from the core -----------------------------------------------------------------------

    def _hand_over(self, message: FromCore) -> None:
        """Bring a message from the core's thread to the event loop."""
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._take, message)

    @singledispatchmethod
    def _take(self, message: FromCore) -> None:
        """Take in a message of the core; those of no method here are for nobody."""

    @_take.register
    def _take_refusal(self, message: RequestRejected) -> None:
        queue = self._queues.pop(message.request_id, None)
        if queue is not None:
            queue.put_nowait(self._codec.encode(message))

    @_take.register
    def _take_answer(self, message: Answer) -> None:
        self._calls.settle(message)

    @_take.register
    def _share_out(self, message: StepOutputs) -> None:
        """Send each request its part of a step; the statistics go along with the first."""
        outputs = message.outputs
        stats = outputs.scheduler_stats
        if stats is not None:
            # Pulls end when nobody is answered.
            self._pulled = stats.pulled = stats.pulled or self._pulled
        for output in outputs.outputs:
            queue = self._queues.get(output.request_id)
            if queue is None:
                continue
            if output.new_token_ids:
                self._backlog.pop(output.request_id, None)
            queue.put_nowait(self._codec.encode(_of_one(outputs, output, stats)))
            if stats is not None:
                stats = self._pulled = None
            if output.finished:
                del self._queues[output.request_id]

    @_take.register
    def _publish(self, message: CoreStatus) -> None:
        """Keep what is new for each front end, until it asks."""
        assert self._loop is not None
        data = self._codec.encode(message)
        now = self._loop.time()
        for name, listener in tuple(self._listeners.items()):
            if now - listener.asked_at > _FORGET_S:
                del self._listeners[name]
                continue
            listener.waiting.append(data)
            listener.is_new.set()

    @_take.register
    def _end_all(self, message: Dead) -> None:
        """Tell all who wait."""
        data = self._codec.encode(message)
        for queue in self._queues.values():
            queue.put_nowait(data)
        self._queues.clear()
        self._calls.fail_all(EngineDeadError(message.message))


def _of_one(
    outputs: EngineCoreOutputs, output: EngineCoreOutput, stats: SchedulerStats | None
) -> StepOutputs:
    return StepOutputs(
        EngineCoreOutputs([output], scheduler_stats=stats, timestamp=outputs.timestamp)
    )
