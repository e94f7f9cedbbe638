"""The web server's life: start, serve, drain, stop.

STARTING  everything but the probes answers 503, until the engine core is ready
READY     requests are served
DRAINING  SIGTERM or Ctrl-C: new requests get 503, running ones may finish; a second signal
          ends them
DEAD      the engine core died: every stream ends with an error, and the server exits with 1
"""

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import uvicorn
from fastapi import FastAPI

from vllm import envs
from vllm.config import VllmConfig
from vllm.entrypoints.batch.folder_lock import ALONE, BatchSeat
from vllm.entrypoints.batch.lifecycle import batches_stopped, start_batches
from vllm.entrypoints.openai.app import build_app, list_routes
from vllm.entrypoints.openai.client_metrics import ClientMetrics
from vllm.entrypoints.openai.context import ServingContext, make_served_model
from vllm.entrypoints.openai.listener import url_of
from vllm.entrypoints.openai.metrics_exchange import MetricsExchange
from vllm.entrypoints.openai.peer_servers import PeerServers
from vllm.entrypoints.openai.server_args import ServerArgs
from vllm.entrypoints.openai.state import ServerState
from vllm.entrypoints.openai.web_server import (
    SignalFreeServer,
    load_config,
    make_uvicorn_config,
    start_tls_refresh,
)
from vllm.entrypoints.pooling.find_plan import find_plan
from vllm.exceptions import ConfigError, ShuttingDownError
from vllm.logger import init_logger
from vllm.parser.registry import NONE, choose_parsers
from vllm.parser.written_calls import CALL_WRITERS
from vllm.tokenizers import Tokenizer, make_chat_encoder
from vllm.tokenizers.chat_encoder import NoChatEncoder, find_templates
from vllm.utils.large_blocks import return_large_blocks
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.client import AsyncEngineCoreHandle
from vllm.v1.engine.image_setup import make_image_input
from vllm.v1.engine.wire import KVCacheInfo, Ready
from vllm.v1.metrics.loggers import StatLogger
from vllm.v1.metrics.prometheus import add_process_metrics
from vllm.v1.metrics.prometheus_sink import SharedRegistry
from vllm.v1.metrics.sinks import make_sinks

logger = init_logger(__name__)

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# How often the engine core's health is looked at.
_WATCH_INTERVAL_S = 0.25
# For streams to carry their error to the client after they were ended.
_END_GRACE_S = 2.0
# A dead server answers 503 for this long, so that probes see why it goes.
_DEAD_GRACE_S = 1.0
_CLOSE_TIMEOUT_S = 3

T = TypeVar("T")


class HttpServer:
    """One server over one engine core.

    Owns: the application, uvicorn and the signal handlers, while it runs.

    Args:
        config: The engine's.
        args: The server's.
        core: A launched engine core, ready or not.
        listener: A listening socket.
        job: Run once the server is ready, which then stops; None: it serves until told to stop.
        exchange: Other server processes, whose metrics are shown too; None: there are none.
        peers: The same, for what one of them keeps.
        batch_seat: What this process has to do with batches, if there are any.
    """

    def __init__(
        self,
        config: VllmConfig,
        args: ServerArgs,
        core: AsyncEngineCoreHandle,
        listener: socket.socket,
        job: Callable[[], Awaitable[None]] | None = None,
        exchange: MetricsExchange | None = None,
        peers: PeerServers | None = None,
        batch_seat: BatchSeat = ALONE,
    ) -> None:
        self._config = config
        self._exchange = exchange
        self._peers = peers
        self._batch_seat = batch_seat
        self._args = args
        self._core = core
        self._listener = listener
        self._job = job
        self._registry = SharedRegistry()
        add_process_metrics(self._registry)
        self._stop = asyncio.Event()
        self._force = asyncio.Event()

    def run(self) -> int:
        """Serve until told to stop; return the exit code.

        Raises:
            VllmError: The engine core or the tokenizer cannot start.
        """
        uvicorn_config = make_uvicorn_config(
            _app_placeholder, self._args, close_timeout_s=_CLOSE_TIMEOUT_S
        )
        with asyncio.Runner(loop_factory=uvicorn_config.get_loop_factory()) as runner:
            return runner.run(self._main(uvicorn_config))

    async def _main(self, uvicorn_config: uvicorn.Config) -> int:
        state = ServerState()
        tenants = self._config.scheduler_config.tenants
        app = build_app(state, self._args, self._registry, tenants, self._batch_seat)
        if self._exchange is not None:
            app.state.exchange = self._exchange
            await self._exchange.start(self._registry)
        uvicorn_config.app = app
        load_config(uvicorn_config, self._args.operations.tls)
        server = SignalFreeServer(uvicorn_config)
        self._install_signal_handlers()
        serving = asyncio.create_task(server.serve([self._listener]))
        if self._peers is not None:
            app.state.peers = self._peers
            self._peers.start(app, app.state.diagnoses)
            app.state.diagnoses.set_peers(self._peers.find_fingerprint)
        # Should the web server fail by itself, there is nothing left to serve.
        serving.add_done_callback(lambda _: self._stop.set())
        refreshing = start_tls_refresh(uvicorn_config, self._args.operations.tls)
        engine: AsyncLLM | None = None
        try:
            engine = await self._start(app, state)
            if engine is None:
                return 0
            async with self._doing_job(), batches_stopped(app, self._stop):
                return await self._serve(state, engine)
        finally:
            if engine is not None:
                engine.shutdown()
            if refreshing is not None:
                refreshing.cancel()
            server.should_exit = True
            server.force_exit = self._force.is_set()
            await serving
            if self._exchange is not None:
                self._exchange.stop()
            if self._peers is not None:
                await self._peers.stop()

    @contextlib.asynccontextmanager
    async def _doing_job(self) -> AsyncIterator[None]:
        """Do the job beside the block, if there is one; its end and that of the serving coincide.

        Raises:
            Exception: What the job raised.
        """
        if self._job is None:
            yield
            return
        job = asyncio.ensure_future(self._job())
        job.add_done_callback(lambda _: self._stop.set())
        stopping = asyncio.create_task(self._stop.wait())
        stopping.add_done_callback(lambda _: job.cancel())
        try:
            yield
        finally:
            job.cancel()
            stopping.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await job

    def _install_signal_handlers(self) -> None:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._stop.is_set():
            logger.warning("[shutdown] second signal (%s): ending everything now", name)
            self._force.set()
        else:
            logger.info("[shutdown] %s received", name)
            self._stop.set()

    async def _start(self, app: FastAPI, state: ServerState) -> AsyncLLM | None:
        """Wait for the engine core and open the server; None when stopped before."""
        tls = self._args.operations.tls
        url = url_of(self._listener, self._args.host, "https" if tls.is_on else "http")
        if self._job is None:
            _log_routes(app)
            logger.info("Starting vLLM server on %s", url)
        finish = start_context(self._config, self._args, state, app.state.client_metrics)
        ready = await _unless(self._stop, in_daemon_thread(self._core.wait_ready))
        if ready is None:
            return None
        sinks = make_stat_sinks(self._config, self._registry, ready)
        engine = AsyncLLM(
            self._config,
            self._core,
            stat_loggers=sinks[0],
            further_stat_loggers=sinks[1:],
            tenant_share=1 / self._args.operations.api_server_count,
        )
        app.state.context = finish(engine)
        state.set_ready()
        start_batches(app)
        logger.info("Application startup complete.")
        if self._job is None:
            has_chats = not isinstance(app.state.context.chat_encoder, NoChatEncoder)
            logger.info("Try it: %s", curl_line(url, bool(self._args.api_keys), has_chats))
        return engine

    async def _serve(self, state: ServerState, engine: AsyncLLM) -> int:
        died = await _unless(self._stop, asyncio.ensure_future(_until_dead(engine)))
        if died is None:
            died = await self._drain(state, engine)
        if died is None:
            return 0
        logger.error("The engine is dead (%s): ending every stream and exiting", died)
        state.set_dead(f"The engine died while it answered this request: {died}")
        await state.wait_idle(_END_GRACE_S)
        await asyncio.sleep(_DEAD_GRACE_S)
        return 1

    async def _drain(self, state: ServerState, engine: AsyncLLM) -> str | None:
        """Let running requests finish; return why the engine died, if it does meanwhile."""
        timeout_s = self._args.shutdown_timeout_s
        state.start_drain()
        logger.info(
            "[shutdown] draining: %d open requests may finish within %g s",
            state.num_open_requests,
            timeout_s,
        )
        idle = asyncio.ensure_future(state.wait_idle(timeout_s))
        dead = asyncio.ensure_future(_until_dead(engine))
        forced = asyncio.ensure_future(self._force.wait())
        waiting: tuple[asyncio.Task[Any], ...] = (idle, dead, forced)
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        died = dead.result() if dead.done() else None
        is_idle = idle.done() and idle.result()
        for task in waiting:
            task.cancel()
        if died is None and not is_idle:
            logger.warning("[shutdown] ending %d open requests", state.num_open_requests)
            state.end_all(
                ShuttingDownError("The server shut down before this answer was complete.")
            )
            await state.wait_idle(_END_GRACE_S)
        logger.info("[shutdown] done")
        return died


def start_context(
    config: VllmConfig, args: ServerArgs, state: ServerState, metrics: ClientMetrics
) -> Callable[[AsyncLLM], ServingContext]:
    """Load what routes need beside the engine; return what makes it whole once the engine is up.

    Args:
        config: The engine's.
        args: The server's.
        state: Phase of the server.
        metrics: Of what clients send.
    """
    model = config.model_config
    tokenizer = Tokenizer.from_folder(model.tokenizer or model.path or model.model)
    # Looks at the whole vocabulary once: now, and not when the first long text comes.
    tokenizer.min_tokens("")
    templates = find_templates(model.hf_config, tokenizer, args.chat_template)
    parsers = choose_parsers(
        model.hf_config.get("model_type", ""),
        templates.for_tools if templates is not None else None,
        args.tool_call_parser,
        args.reasoning_parser,
    )
    encoder = make_chat_encoder(
        model.hf_config,
        tokenizer,
        args.chat_template,
        allows_special_tokens=args.allow_special_tokens_in_content,
        keeps_billing_line=args.keep_billing_line,
        write_calls=CALL_WRITERS.get(parsers.tools),
    )
    plan = find_plan(model, tokenizer)
    images = make_image_input(config, is_apart=envs.VLLM_ENABLE_V1_MULTIPROCESSING)
    if images.reader is not None:
        return_large_blocks()
    if encoder.ignores_tools and args.tool_call_parser not in (None, "", NONE):
        _check_described_tools(parsers.tools)

    def finish(engine: AsyncLLM) -> ServingContext:
        max_model_len = engine.kv_cache_info.max_model_len
        return ServingContext(
            served_model=make_served_model(
                config,
                max_model_len,
                args.generation_config,
                plan if args.pooling else None,
                has_chats=not isinstance(encoder, NoChatEncoder),
            ),
            tokenizer=tokenizer,
            chat_encoder=encoder,
            args=args,
            state=state,
            engine=engine,
            config=config,
            parsers=parsers,
            client_metrics=metrics,
            vectors=plan,
            images=images,
        )

    return finish


def _check_described_tools(parser: str) -> None:
    """Tell what becomes of tools that the chat template ignores.

    Raises:
        ConfigError: Nothing could tell the model of them.
    """
    if parser not in CALL_WRITERS:
        raise ConfigError(
            f"--tool-call-parser {parser}: the chat template never tells the model of its tools, "
            f"and the marks of {parser} are tokens of models whose templates do. Give such a "
            f"template with --chat-template, or one of {', '.join(CALL_WRITERS)}, or leave the "
            "flag out."
        )
    logger.warning(
        "The chat template ignores tools: they are described in the system text, in words of this "
        "server, and calls as --tool-call-parser %s reads them. A template that was trained with "
        "tools does better (--chat-template).",
        parser,
    )


def make_stat_sinks(
    config: VllmConfig, registry: SharedRegistry, ready: Ready
) -> list[list[StatLogger]]:
    """Return the sinks of each engine core's statistics."""
    tenants = config.scheduler_config.tenants
    sinks: list[list[StatLogger]] = []
    for index, kv_cache in enumerate(ready.kv_caches or [ready.kv_cache]):
        stats, others = make_sinks(
            registry,
            config.model_config.served_model_name,
            ready.kv_cache.max_model_len,
            config.observability_config,
            index,
            config.external_source,
            has_tiers=config.has_tiers,
            tenants=() if tenants is None else tenants.tenants,
        )
        stats.set_cache_config(cache_labels(config, kv_cache))
        sinks.append([stats, *others])
    return sinks


async def _app_placeholder(*_: object) -> None:
    """Replaced by the application, which needs a running loop to be built."""


async def _until_dead(engine: AsyncLLM) -> str:
    """Wait until the engine is dead and return why."""
    while not engine.errored:
        await asyncio.sleep(_WATCH_INTERVAL_S)
    return str(engine.dead_error)


async def _unless(stop: asyncio.Event, work: "asyncio.Future[T]") -> T | None:
    """Return the result of ``work``, or None when ``stop`` is set first."""
    stopped = asyncio.ensure_future(stop.wait())
    both: tuple[asyncio.Future[Any], ...] = (stopped, work)
    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if work.done():
        return work.result()
    work.cancel()
    return None


def in_daemon_thread(work: Callable[[], T]) -> "asyncio.Future[T]":
    """Run blocking work that may never end: unlike an executor's, this thread holds up no exit."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def deliver(result: T | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]  # no error: there is a result

    def run() -> None:
        result: T | None = None
        error: BaseException | None = None
        try:
            result = work()
        except Exception as raised:  # handed to whoever waits
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(deliver, result, error)

    threading.Thread(target=run, name="wait-for-engine", daemon=True).start()
    return future


def cache_labels(config: VllmConfig, kv_cache: KVCacheInfo) -> dict[str, object]:
    """Return the labels of ``vllm:cache_config_info``."""
    cache = config.cache_config
    return {
        "block_size": kv_cache.block_size,
        "num_gpu_blocks": kv_cache.num_blocks,
        "kv_cache_size_tokens": kv_cache.capacity_tokens,
        "kv_cache_memory_bytes": kv_cache.capacity_bytes,
        "hash_block_size": kv_cache.unit,
        "cache_hit_alignment_tokens": kv_cache.unit,
        "smallest_reusable_prefix_tokens": kv_cache.smallest_reusable_prefix,
        "enable_prefix_caching": cache.enable_prefix_caching,
        "prefix_caching_hash_algo": cache.prefix_caching_hash_algo,
        "gpu_memory_utilization": cache.gpu_memory_utilization,
        "cache_dtype": kv_cache.cache_dtype,
        "num_gpu_blocks_override": cache.num_gpu_blocks_override,
        "prefix_cache_retention_interval": kv_cache.retention_interval,
        "retention": kv_cache.retention,
    }


def curl_line(url: str, needs_key: bool, has_chats: bool = True) -> str:
    """Return a command that asks the server something, ready to be pasted.

    Args:
        url: Of the server.
        needs_key: Whether it asks for a key.
        has_chats: Whether the model has a chat format; a base model continues a text.
    """
    key = "-H 'Authorization: Bearer YOUR_KEY' " if needs_key else ""
    route, asked = "completions", '"prompt": "The capital of France is"'
    if has_chats:
        route, asked = "chat/completions", '"messages": [{"role": "user", "content": "Hello!"}]'
    return (
        f"curl {url}/v1/{route} -H 'Content-Type: application/json' {key}"
        f"-d '{{{asked}, \"max_tokens\": 32}}'"
    )


def _log_routes(app: FastAPI) -> None:
    paths = list_routes(app).items()
    listed = ", ".join(f"{'/'.join(methods)} {path}" for path, methods in paths)
    logger.info("Available routes: %s, GET /docs, GET /openapi.json", listed)
