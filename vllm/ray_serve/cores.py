"""The fleet's replicas, as one handle of engine cores in front of the server's own application."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from functools import partial, singledispatchmethod
from typing import Any

import msgspec
from ray.exceptions import ActorDiedError, RayActorError, RayError, RayTaskError
from ray.serve.exceptions import RayServeException

from vllm.config import VllmConfig
from vllm.exceptions import EngineCoreLostError, EngineDeadError, EngineError, VllmError
from vllm.logger import init_logger
from vllm.ray_serve.placement import Anyone, Fleet, Only, Place
from vllm.ray_serve.replica import Taken, Updates
from vllm.v1.engine.client import STOP_TIMEOUT_S, MailboxHandle
from vllm.v1.engine.data_parallel.router import (
    Router,
    RouterSettings,
    make_prompt_hasher,
    with_hashes,
)
from vllm.v1.engine.data_parallel.short_hash import shorten_all
from vllm.v1.engine.process_client import on_this_clock
from vllm.v1.engine.questions import Question, merge_answers
from vllm.v1.engine.wire import (
    AbortRequests,
    AddRequests,
    Answer,
    Ask,
    Codec,
    CoreBack,
    CoreLost,
    CoreStatus,
    Dead,
    ErrorInfo,
    FromCore,
    Ready,
    RequestRejected,
    StepOutputs,
    TellAll,
    ToCore,
    WithdrawPrefixes,
)
from vllm.v1.messages import EngineCoreRequest

logger = init_logger(__name__)

# A replica that says nothing for so long is not believed to cache anything.
_SILENT_S = 5.0
# Who there is, is looked at so often.
_WATCH_S = 0.2
# No replica took a request for so long: the client is told instead of waiting for ever.
_PLACE_S = 60.0
# The actor of a request said nothing for so long: it hangs. Serve sees that, too, but lets it have
# what a replica that leaves may take to finish, before it ends it and so the request.
_MUTE_S = 30.0
# Replicas that may die under a request before it had a token.
_MAX_TRIES = 5
_ASK_S = 30.0


class _LostError(Exception):
    """The replica of a request is gone."""


class _CutError(Exception):
    """An answer ended before its end, for whatever reason; its replica may serve on."""


# What calls of replicas fail with: their own errors, their actors' and machines', Serve's.
_FAILURES = (RayError, RayServeException)


def _is_end(error: Exception) -> bool:
    """Whether a replica that failed so will never serve again."""
    if isinstance(error, RayTaskError):
        return isinstance(error.cause, EngineDeadError)
    return isinstance(error, ActorDiedError | _LostError)


async def _read(stream: AsyncIterator[Any]) -> Any:
    """Return the next item of an answer that is not over.

    Raises:
        _CutError: There is none.
    """
    try:
        async with asyncio.timeout(_MUTE_S):
            return await anext(stream)
    except StopAsyncIteration:
        raise _CutError("its answer ended early") from None
    except TimeoutError:
        raise _CutError(f"it said nothing for {_MUTE_S:g} s") from None


class FleetCores(MailboxHandle):
    """A handle of a fleet: requests go where Serve's request router sends them, questions to all.

    A request whose replica dies before it had a token is sent to another one; one that had gets an
    error, and is computed nowhere else. For one event loop.

    Owns: the tasks that follow requests and replicas, the questions that wait for answers.

    Args:
        config: Of all replicas.
        engines: Serve's handle of them.
        fleet: Who there is.
    """

    def __init__(self, config: VllmConfig, engines: Any, fleet: Fleet) -> None:
        super().__init__()
        self._config = config
        self._engines = engines
        self._fleet = fleet
        self._loop = asyncio.get_running_loop()
        self._codec = Codec()
        self._name = secrets.token_hex(8)
        self._following: dict[str, asyncio.Task[None]] = {}
        self._listening: dict[str, asyncio.Task[None]] = {}
        self._asking: set[asyncio.Task[None]] = set()
        self._ready: Ready | None = None
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Wait for the first replica, and follow all from then on."""
        data = await self._engines.describe.remote(Anyone())
        ready = self._codec.decode_from_core(data)
        assert isinstance(ready, Ready)
        self._hash_prompt = make_prompt_hasher(self._config, ready.kv_cache.unit)
        settings = RouterSettings.from_config(self._config, ready.kv_cache)
        self._fleet.start(Router(settings))
        self._ready = msgspec.structs.replace(
            ready, kv_caches=[ready.kv_cache] * settings.num_cores
        )
        self._watching = asyncio.create_task(self._watch())
        self._watching.add_done_callback(self._note_failure)

    def wait_ready(self) -> Ready:
        """Return what the first replica said; ``start`` comes first."""
        assert self._ready is not None
        return self._ready

    def living(self) -> Sequence[int]:
        """Return the ranks of the replicas that serve."""
        return self._fleet.router.living()

    def send(self, message: ToCore) -> None:
        """Send a message to the replicas that it concerns; refusals come back as messages."""
        self._loop.call_soon_threadsafe(self._send, message)

    def shutdown(self, timeout: float = STOP_TIMEOUT_S) -> None:
        """Follow nobody any more; the replicas are Serve's to stop."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        tasks = [*self._following.values(), *self._listening.values(), *self._asking]
        for task in (*tasks, *([self._watching] if self._watching else [])):
            task.cancel()

    def _note_failure(self, task: asyncio.Task[None]) -> None:
        """Follow the replicas no further without a word: nothing that this says would be true."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        logger.error("The fleet is not followed any more.", exc_info=error)
        if self._dead_error is None:
            self._dead_error = EngineDeadError(f"The fleet is not followed any more: {error!r}")
            self._mailbox.put(Dead(str(self._dead_error)))

    @singledispatchmethod
    def _send(self, message: ToCore) -> None:
        """Send a message; those of no method here are not for a fleet."""

    @_send.register
    def _send_requests(self, message: AddRequests) -> None:
        for request in message.requests:
            task = asyncio.create_task(self._follow(request))
            self._following[request.request_id] = task
            # Not in the task: one that is cancelled before it began runs no line.
            task.add_done_callback(partial(self._settle, request.request_id))

    @_send.register
    def _send_aborts(self, message: AbortRequests) -> None:
        for request_id in message.request_ids:
            followed = self._following.get(request_id)
            if followed is not None:
                followed.cancel()

    @_send.register
    def _send_withdrawal(self, message: WithdrawPrefixes) -> None:
        data = self._codec.encode(message)
        for name in self._fleet.living():
            self._spawn(self._tell(name, data))

    @_send.register
    def _send_question(self, message: Ask) -> None:
        by_rank = sorted((rank, name) for name, rank in self._fleet.living().items())
        try:
            names = [name for _, name in by_rank]
            names = names[:1] if Question.of(message).is_for_one else names
        except EngineError as error:
            self._mailbox.put(Answer(message.call_id, error=ErrorInfo.from_exception(error)))
            return
        self._spawn(self._ask(message, names))

    def _settle(self, request_id: str, task: asyncio.Task[None]) -> None:
        self._following.pop(request_id, None)
        self._fleet.forget(request_id)
        if not task.cancelled() and (error := task.exception()) is not None:
            # A bug of its own: whoever waits for the request shall not wait for ever.
            logger.error("Request %s is not followed any more.", request_id, exc_info=error)
            told = EngineError(f"The request could not be followed: {error!r}")
            self._mailbox.put(RequestRejected(request_id, ErrorInfo.from_exception(told)))

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    # ---- requests ----------------------------------------------------------------------------

    async def _follow(self, request: EngineCoreRequest) -> None:
        """See a request to its end, on one replica after another as long as it has no token."""
        request_id = request.request_id
        try:
            request = with_hashes(request, self._hash_prompt)
            wanted = request.options.data_parallel_rank
            if wanted is not None and wanted not in self.living():
                raise EngineCoreLostError(
                    f"No replica serves as rank {wanted}: choose among {list(self.living())}, or "
                    "leave X-data-parallel-rank out."
                )
            hashes = shorten_all(request.block_hashes)
            num_tokens = len(request.prompt_token_ids)
            self._fleet.expect(
                request_id, hashes, num_tokens, wanted, request.options.routing_key, request.tenant
            )
            for number in range(_MAX_TRIES):
                # Another name: the same replica may still be letting go of the last try.
                name = f"{request_id}-try{number + 1}" if number else request_id
                sent = msgspec.structs.replace(request, request_id=name)
                if await self._try(request_id, msgspec.msgpack.encode(sent)):
                    return
                logger.warning("Request %s is sent again: its replica is gone.", request_id)
            raise EngineCoreLostError(
                f"{_MAX_TRIES} replicas died under this request, one after another: send it again "
                "later."
            )
        except VllmError as error:
            self._mailbox.put(RequestRejected(request_id, ErrorInfo.from_exception(error)))

    async def _try(self, request_id: str, data: bytes) -> bool:
        """Run a request on one replica; returns whether that settled it.

        Raises:
            VllmError: It is settled by this.
        """
        stream = self._engines.options(stream=True).generate.remote(Place(request_id), data)
        taken: str | None = None
        has_token = False
        try:
            async with asyncio.timeout(_PLACE_S):
                first = await anext(stream, None)
            if first is None:
                raise _CutError("its answer ended before it began")
            assert isinstance(first, Taken)
            taken = first.replica
            while True:
                item = await _read(stream)
                if isinstance(item, Taken):
                    continue
                message = self._codec.decode_from_core(item)
                if isinstance(message, Dead):
                    raise _LostError(message.message)
                has_token |= isinstance(message, StepOutputs)
                if self._take(request_id, taken, message):
                    return True
        except TimeoutError as error:
            raise EngineCoreLostError(
                f"No replica took this request within {_PLACE_S:g} s: send it again later."
            ) from error
        except (*_FAILURES, _LostError, _CutError) as error:
            name = taken or self._fleet.find_place(request_id)
            logger.error("Replica %s of request %s failed: %s", name, request_id, error)
            if name is not None and _is_end(error):
                self._fleet.lose(name)
            elif not isinstance(error, RayActorError | _CutError):
                raise EngineCoreLostError(f"The replica failed: {error}") from error
            if has_token:
                raise EngineCoreLostError(
                    "The replica died while it answered this request, or its answer was cut off: "
                    "send it again, others serve on."
                ) from error
            return False
        finally:
            stream.cancel()

    def _take(self, request_id: str, name: str, message: FromCore) -> bool:
        """Take in a message about a request; returns whether it was the last."""
        if isinstance(message, RequestRejected):
            self._mailbox.put(RequestRejected(request_id, message.error))
            return True
        assert isinstance(message, StepOutputs)
        message = on_this_clock(message)
        outputs = message.outputs
        outputs.outputs[0].request_id = request_id
        outputs.engine_index = self._fleet.rank_of(name) or 0
        self._fleet.router.take_step(outputs.outputs)
        self._mailbox.put(message)
        return outputs.outputs[0].finished

    # ---- replicas ----------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Listen to every replica that serves."""
        known: dict[str, int] = {}
        while True:
            living = self._fleet.living()
            for name, rank in living.items():
                if name not in known:
                    listening = asyncio.create_task(self._listen(name, rank))
                    listening.add_done_callback(self._note_failure)
                    self._listening[name] = listening
                    self._mailbox.put(CoreBack(rank))
            for name, rank in known.items():
                if name not in living:
                    self._listening.pop(name).cancel()
                    self._mailbox.put(CoreLost(rank, f"replica {name} left"))
            known = living
            for rank in self._fleet.router.check_updates(self._loop.time()):
                for name in [name for name, r in living.items() if r == rank]:
                    self._spawn(self._tell(name, self._codec.encode(TellAll())))
            await asyncio.sleep(_WATCH_S)

    async def _listen(self, name: str, rank: int) -> None:
        """Take in the updates of a replica, as long as it serves."""
        router = self._fleet.router
        has_missed = False
        while True:
            try:
                async with asyncio.timeout(_SILENT_S):
                    updates: Updates = await self._engines.updates.remote(Only(name), self._name)
            except (TimeoutError, *_FAILURES) as error:
                # It may come to itself; until then nothing is believed of its cache.
                logger.warning("No updates of replica %s: %r", name, error)
                router.doubt(rank)
                # What the answer would have told is lost, and nothing that follows need show it.
                has_missed = True
                await asyncio.sleep(_WATCH_S)
                continue
            if updates.replica != name:
                router.doubt(rank)
                await asyncio.sleep(_WATCH_S)
                continue
            if has_missed:
                await self._tell(name, self._codec.encode(TellAll()))
                has_missed = False
            router.trust(rank)
            for data in updates.messages:
                message = self._codec.decode_from_core(data)
                assert isinstance(message, CoreStatus)
                if router.observe(rank, message, self._loop.time()):
                    await self._tell(name, self._codec.encode(TellAll()))

    async def _tell(self, name: str, data: bytes) -> None:
        try:
            async with asyncio.timeout(_SILENT_S):
                await self._engines.tell.remote(Only(name), data)
        except (TimeoutError, *_FAILURES) as error:
            logger.warning("Replica %s was not told: %r", name, error)

    # ---- questions ---------------------------------------------------------------------------

    async def _ask(self, message: Ask, names: Sequence[str]) -> None:
        data = self._codec.encode(message)
        answers = await asyncio.gather(*(self._ask_one(name, data) for name in names))
        found = [answer for answer in answers if answer is not None]
        self._mailbox.put(merge_answers(message, found))

    async def _ask_one(self, name: str, data: bytes) -> Answer | None:
        try:
            async with asyncio.timeout(_ASK_S):
                answer = await self._engines.ask.remote(Only(name), data)
        except (TimeoutError, *_FAILURES) as error:
            logger.warning("Replica %s does not answer: %r", name, error)
            return None
        if answer is None:
            return None
        message = self._codec.decode_from_core(answer)
        assert isinstance(message, Answer)
        return message
