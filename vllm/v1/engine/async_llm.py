"""The asynchronous engine that servers use."""

import asyncio
import contextlib
import contextvars
import itertools
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import msgspec

from vllm import envs
from vllm.config import VllmConfig
from vllm.config.tenants import BATCH_TENANT
from vllm.exceptions import (
    QueueFullError,
    ShuttingDownError,
    TenantLimitError,
)
from vllm.inputs import PromptType
from vllm.logger import init_logger
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.admissions import Admissions
from vllm.v1.engine.client import STOP_TIMEOUT_S, AsyncEngineCoreHandle
from vllm.v1.engine.data_parallel.predictions import Prediction, Predictions
from vllm.v1.engine.engine_base import EngineBase
from vllm.v1.engine.image_prompts import scope_of
from vllm.v1.engine.input_processor import ParsedPrompt
from vllm.v1.engine.launch import launch_engine_core
from vllm.v1.engine.output_processor import ProcessedOutputs
from vllm.v1.engine.output_queue import OutputQueue
from vllm.v1.engine.questions import Question, Reply, ResetCache
from vllm.v1.engine.queue_limit import QueueLimit
from vllm.v1.engine.request_stream import RequestStream
from vllm.v1.engine.submission import CallPart, Submission
from vllm.v1.engine.tenant_limits import (
    TenantLimits,
    current_tenant,
    runs_in_background,
    tenant_salt,
)
from vllm.v1.engine.wire import (
    FromCore,
    StepOutputs,
)
from vllm.v1.messages import EngineCoreRequest, PrefillStats
from vllm.v1.metrics.iteration_stats import IterationStats
from vllm.v1.metrics.loggers import LoggingStatLogger, StatLogger
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.metrics.tracing import current_trace_headers
from vllm.v1.request_options import RequestOptions

if TYPE_CHECKING:
    from vllm.v1.engine.engine_args import AsyncEngineArgs

logger = init_logger(__name__)

# Texts longer than this are tokenized in a thread: 100,000 characters take about 50 ms.
_LONG_TEXT_CHARS = 8192


class AsyncLLM(EngineBase[AsyncEngineCoreHandle]):
    """Serves requests of one event loop from one engine core.

    Everything but the constructor, :attr:`errored`, :attr:`dead_error` and :meth:`shutdown` must be
    called in the event loop's thread.

    Owns: the loop that messages are handed to, beside what EngineBase owns.

    Args:
        vllm_config: What to run.
        handle: A core that :func:`launch_engine_core` started; None: one is started here.
        stat_loggers: Sinks of statistics besides the log line.
        further_stat_loggers: Those of the second engine core on, where there are several.
        tenant_share: The part of tenants' limits that holds here, where several processes serve.

    Raises:
        VllmError: The core cannot start.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        handle: AsyncEngineCoreHandle | None = None,
        *,
        stat_loggers: Sequence[StatLogger] = (),
        further_stat_loggers: Sequence[Sequence[StatLogger]] = (),
        tenant_share: float = 1.0,
    ) -> None:
        num_cores = vllm_config.parallel_config.data_parallel_size
        sinks = [list(stat_loggers), *map(list, further_stat_loggers)]
        sinks += [[] for _ in range(len(sinks), num_cores)]
        if vllm_config.observability_config.log_stats:
            for index, own in enumerate(sinks):
                own.append(LoggingStatLogger(index))
        core = handle if handle is not None else launch_engine_core(vllm_config)
        super().__init__(vllm_config, core, sinks[0], sinks[1:])
        self._queue_limit = QueueLimit.from_config(vllm_config.scheduler_config, num_cores)
        tenants = vllm_config.scheduler_config.tenants
        self._tenants = None if tenants is None else TenantLimits(tenants, tenant_share)
        self._admissions = Admissions()
        # Only a router in front of several cores foretells anything.
        self._predictions = Predictions() if num_cores > 1 else None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._log_timer: asyncio.TimerHandle | None = None
        self._idle = asyncio.Event()
        self._draining = False

    @classmethod
    def from_engine_args(
        cls, engine_args: "AsyncEngineArgs", *, stat_loggers: Sequence[StatLogger] = ()
    ) -> Self:
        """Build the engine that command-line style arguments describe."""
        return cls(engine_args.create_vllm_config(), stat_loggers=stat_loggers)

    # ---- requests ----------------------------------------------------------------------------

    async def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams,
        request_id: str,
        **options: Any,
    ) -> AsyncIterator[RequestOutput]:
        """Submit a request and yield its outputs as they come.

        Cancelling or closing the iterator aborts the request and frees its blocks. ``options`` are
        the fields of ``RequestOptions``: ``priority``, ``cache_salt``, ``trace_headers``, ...

        Raises:
            UserInputError: The request is wrong.
            QueueFullError: Too many requests wait.
            TenantLimitError: The tenant in whose name this is called exceeds a limit.
            ShuttingDownError: The engine drains.
            EngineDeadError: The core is dead, or died meanwhile.
        """
        stream = await self.add_request(request_id, prompt, sampling_params, **options)
        async with contextlib.aclosing(stream):
            async for output in stream:
                yield output

    async def add_request(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams,
        **options: Any,
    ) -> RequestStream:
        """Check and submit a request; return its stream. For callers that answer errors at once.

        Raises:
            As :meth:`generate`.
        """
        queue = OutputQueue(deltas=params.output_kind == RequestOutputKind.DELTA)
        given = Submission(request_id, prompt, params, queue, RequestOptions(**options))
        (leave,) = await self.submit_all([given])
        return RequestStream(request_id, queue, leave)

    async def submit_all(self, submissions: Sequence[Submission]) -> list[Callable[[], None]]:
        """Check requests and submit them together; outputs go to their sinks, in the event loop.

        Returns:
            For each, what to call to leave early: it aborts the request unless it has finished.
            Nothing else does, so a caller that loses interest must call it.

        Raises:
            As :meth:`generate`, for what is known at once, and then none of them runs; the sinks
            are told of the rest.
        """
        arrival_time = time.monotonic()
        self._check_open()
        parsed = [await self._parse(given) for given in submissions]
        # Again: tokenizing may have taken a while.
        self._check_open()
        added: list[list[EngineCoreRequest]] = []
        try:
            for given, prompt in zip(submissions, parsed, strict=True):
                request = self._admit(given, prompt, arrival_time)
                added.append(self._output_processor.add_request(request, prompt.text, given.sink))
        except BaseException:
            # The core has not heard of them.
            self._leave([child.request_id for children in added for child in children])
            raise
        self._bind_loop()
        self._idle.clear()
        self._send_requests(list(itertools.chain(*added)))
        ids = ([child.request_id for child in children] for children in added)
        return [_make_leaver(weakref.ref(self), child_ids) for child_ids in ids]

    async def _parse(self, given: Submission) -> ParsedPrompt:
        parse, prompt = self.input_processor.parse_prompt, given.prompt
        seeing = self._find_pictures(given)
        if seeing is not None:
            salt = given.options.cache_salt or seeing.fields.get("cache_salt")
            scope = scope_of(salt)
            read = await self.images.read(seeing.given, seeing.settings, scope)
            prompt = seeing.with_images(read, self.images.family, self.tokenizer)
        is_long = isinstance(prompt, str) and len(prompt) > _LONG_TEXT_CHARS
        return await asyncio.to_thread(parse, prompt) if is_long else parse(prompt)

    def _admit(
        self, given: Submission, prompt: ParsedPrompt, arrival_time: float
    ) -> EngineCoreRequest:
        """Check a request, and let it into the queue.

        Raises:
            UserInputError: It is wrong.
            QueueFullError: Too many wait.
            TenantLimitError: Its tenant exceeds a limit.
        """
        options, params = given.options, given.params
        request = self.input_processor.process(
            given.request_id,
            prompt,
            params,
            options.replace(trace_headers=options.trace_headers or current_trace_headers.get()),
            arrival_time=arrival_time,
        )
        part = given.part or CallPart(params.n, len(request.prompt_token_ids))
        try:
            if part.num_requests:
                waiting = self._output_processor.count_waiting_tokens
                self._queue_limit.admit_tokens(part.num_tokens, waiting)
                self._queue_limit.admit(part.num_requests, self._output_processor.num_unfinished)
        except QueueFullError as error:
            self._record(None, IterationStats(rejection_reason=error.limit))
            raise
        if self._tenants is not None:
            request = self._admit_tenant(self._tenants, request, part)
        return request

    def _admit_tenant(
        self, limits: TenantLimits, request: EngineCoreRequest, part: CallPart
    ) -> EngineCoreRequest:
        """Let a request, or a call of many, of the tenant in whose name this is called in.

        Raises:
            TenantLimitError: The tenant exceeds a limit.
        """
        tenant = limits.find(current_tenant.get())
        count_waiting = partial(self._output_processor.count_waiting_requests, tenant.name)
        try:
            if part.num_requests:
                num_new = part.num_requests // request.sampling_params.n
                limits.admit(tenant, part.num_tokens, count_waiting, num_new)
        except TenantLimitError as error:
            refused = [(tenant.name, error.limit)]
            self._record(
                None,
                IterationStats(rejection_reason=error.limit, tenant_rejections_iter=refused),
            )
            raise
        salt = tenant_salt(tenant, request.options.cache_salt)
        options = request.options.replace(cache_salt=salt)
        # What it may ask for is its owner's; when it runs is not.
        name = BATCH_TENANT if runs_in_background.get() else tenant.name
        return msgspec.structs.replace(request, tenant=name, options=options)

    def find_owner(self, cache_salt: str | None) -> tuple[str | None, str | None]:
        """Return in whose name, and under which salt, a request runs that comes in this call."""
        if self._tenants is None:
            return None, cache_salt
        tenant = self._tenants.find(current_tenant.get())
        return tenant.name, tenant_salt(tenant, cache_salt)

    def _record(
        self,
        scheduler_stats: SchedulerStats | None,
        stats: IterationStats | None,
        engine_index: int = 0,
    ) -> None:
        if self._tenants is not None and stats is not None:
            for finished in stats.finished_requests:
                if finished.tenant is not None:
                    self._tenants.note_output(finished.tenant, finished.num_generation_tokens)
        super()._record(scheduler_stats, stats, engine_index)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests by the ids that were given to them; unknown ones are ignored.

        Their streams get a last output with the reason "abort".
        """
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        self._end(lambda stats: self._output_processor.abort_requests(ids, stats))

    def _leave(self, child_ids: list[str]) -> None:
        """End answers whose reader has left; the collector may drop a stream in any thread."""

        def end() -> None:
            self._end(lambda stats: self._output_processor.abort_answers(child_ids, stats))

        loop = self._loop
        if loop is None or loop.is_closed() or loop is asyncio._get_running_loop():
            end()
        else:
            loop.call_soon_threadsafe(end)

    def _end(self, end: Callable[[IterationStats], ProcessedOutputs]) -> None:
        stats = IterationStats()
        result = end(stats)
        self._send_aborts(result.aborts)
        if result.aborts:
            logger.info("Aborted: %s.", ", ".join(result.aborts))
            self._record(None, stats)
        self._note_if_idle()

    # ---- messages from the core --------------------------------------------------------------

    def _bind_loop(self) -> None:
        """Hand the core's messages to the running event loop from now on."""
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        is_first = self._loop is None
        self._loop = loop
        if is_first:
            # The handle's thread must not keep the engine alive.
            self._core.subscribe(_make_dispatcher(weakref.ref(self)))
        if any(isinstance(sink, LoggingStatLogger) for sink in self._stat_loggers[0]):
            _schedule_log(self)

    def _on_message(self, message: FromCore) -> None:
        """Take in a message, in the event loop."""
        self._take_in(message)
        self._note_if_idle()

    def _on_step(self, message: StepOutputs) -> list[RequestOutput]:
        outputs = message.outputs
        self._queue_limit.observe(outputs.scheduler_stats, outputs.engine_index)
        self._admissions.note(outputs.outputs)
        if self._predictions is not None:
            self._predictions.note(outputs.outputs, outputs.engine_index)
        return super()._on_step(message)

    # ---- health ------------------------------------------------------------------------------

    @property
    def errored(self) -> bool:
        """Whether the core is dead."""
        return self._core.dead_error is not None

    @property
    def is_running(self) -> bool:
        """Whether the engine serves: neither dead nor shut down."""
        return self._finalizer.alive and not self.errored

    @property
    def is_draining(self) -> bool:
        """Whether new requests are refused."""
        return self._draining

    async def check_health(self) -> None:
        """Return while the core lives.

        Raises:
            EngineDeadError: It does not.
        """
        self._check_alive()

    def _check_open(self) -> None:
        self._check_alive()
        if self._draining or not self._finalizer.alive:
            raise ShuttingDownError("The server shuts down and takes no new requests: retry later.")

    # ---- the rest ----------------------------------------------------------------------------

    @property
    def num_unfinished_requests(self) -> int:
        """Answers in progress."""
        return self._output_processor.num_unfinished

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget every cached prefix; False while requests use it.

        Raises:
            EngineDeadError: The core is dead.
        """
        return await self.ask(ResetCache(reset_running_requests, reset_connector))

    async def ask(self, question: Question[Reply]) -> Reply:
        """Ask the core between two of its steps; where there are several, all of them.

        Raises:
            EngineDeadError: The core is dead.
            ShuttingDownError: The engine was shut down meanwhile.
            VllmError: The question is refused.
        """
        await self.check_health()
        self._bind_loop()
        return question.read(await asyncio.wrap_future(self._send_question(question)))

    def find_prediction(self, request_id: str) -> Prediction | None:
        """Return what was foretold of a request, by its response's id; None: nothing."""
        return None if self._predictions is None else self._predictions.find(request_id)

    def find_admission(self, request_id: str) -> PrefillStats | None:
        """Return how a request was admitted, by its response's id; None: it is unknown here."""
        return self._admissions.find(request_id)

    # ---- the end -----------------------------------------------------------------------------

    def _note_if_idle(self) -> None:
        if not self._output_processor.has_unfinished():
            self._idle.set()

    async def drain(self, timeout: float | None = None) -> bool:
        """Take no new requests and wait for the running ones.

        Args:
            timeout: Seconds after which what still runs is aborted; None: no limit.

        Returns:
            Whether all finished by themselves. Every stream has its last output, or an error, in
            either case.
        """
        self._draining = True
        self._note_if_idle()
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except TimeoutError:
            ids = self._output_processor.unfinished_ids()
            logger.warning("%d requests did not finish in time and are aborted.", len(ids))
            await self.abort(ids)
            return False
        return True

    def shutdown(self, timeout: float = STOP_TIMEOUT_S) -> None:
        """Stop the core at once. Requests in progress end with the reason "abort".

        Idempotent; also happens when the engine is collected or Python ends.
        """
        self._draining = True
        if self._log_timer is not None:
            self._log_timer.cancel()
        if self._finalizer.detach() is None:
            return
        if self._loop is not None and not self._loop.is_closed():
            ids = self._output_processor.unfinished_ids()
            self._output_processor.abort_requests(ids, None)
            self._note_if_idle()
        self._core.shutdown(timeout)
        self._calls.fail_all(ShuttingDownError("The engine was shut down before it answered."))


def _make_dispatcher(engine_ref: "weakref.ref[AsyncLLM]") -> Callable[[FromCore], None]:
    """Return what the handle's thread calls with each message."""

    def dispatch(message: FromCore) -> None:
        engine = engine_ref()
        loop = engine._loop if engine is not None else None
        if engine is None or loop is None:
            return
        # RuntimeError: the loop was closed, so nobody waits for this.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(engine._on_message, message)

    return dispatch


def _make_leaver(engine_ref: "weakref.ref[AsyncLLM]", child_ids: list[str]) -> Callable[[], None]:
    """Return what a stream calls when its reader leaves; a stream does not keep the engine."""

    def leave() -> None:
        engine = engine_ref()
        if engine is not None:
            engine._leave(child_ids)

    return leave


def _schedule_log(engine: AsyncLLM) -> None:
    loop = engine._loop
    if loop is not None and not loop.is_closed():
        # A context of its own: the lines are no part of the request that came first.
        engine._log_timer = loop.call_later(
            envs.VLLM_LOG_STATS_INTERVAL,
            _log_and_reschedule,
            weakref.ref(engine),
            context=contextvars.Context(),
        )


def _log_and_reschedule(engine_ref: "weakref.ref[AsyncLLM]") -> None:
    engine = engine_ref()
    if engine is not None and engine.is_running:
        engine.do_log_stats()
        _schedule_log(engine)
