"""The engine core's process: what runs beside the step loop, and how it all starts and ends.

    main thread       builds the core, then CoreLoop.run()
    input thread      reads the channel, hashes prompts, hands messages to the loop
    heartbeat thread  sends the loop's progress; ends the process when the front end is gone
    lifeline thread   blocks on stdin, whose end means the front end is gone; even of a stopped one

This module imports neither torch nor the core: heartbeats start before those load.
"""

import contextlib
import fcntl
import importlib
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from vllm.config import VllmConfig
from vllm.exceptions import VllmError
from vllm.logger import init_logger, setup_logging
from vllm.platforms.resolve import get_current_platform
from vllm.utils.collector import lasting_imports
from vllm.utils.liveness import beat_interval_s
from vllm.v1.engine.channel import Channel, Endpoints
from vllm.v1.engine.core_loop import CoreLoop, Progress, SteppedCore
from vllm.v1.engine.heartbeat import Pulse
from vllm.v1.engine.wire import Codec, Dead, ErrorInfo, FromCore, Ready, StartFailed

logger = init_logger(__name__)

_INPUT_POLL_S = 60.0
_EXIT_STATUS_ORPHANED = 3
# What nobody waits for yet is loaded after the front end's start, which needs the cores itself.
_WARM_UP_DELAY_S = 1.5

CoreFactory = Callable[[VllmConfig], SteppedCore]


@dataclass(frozen=True, slots=True)
class LaunchOrder:
    """Everything a core process needs to start; pickled into its stdin.

    Attributes:
        core_factory: ``module:function``, a CoreFactory.
        heartbeat_timeout_s: Seconds of silence that the front end takes for death.
        launched_at: The front end's monotonic clock at the launch.
        more_endpoints: Those of further front ends, which share the core.
    """

    vllm_config: VllmConfig
    endpoints: Endpoints
    core_factory: str
    heartbeat_timeout_s: float
    launched_at: float
    more_endpoints: tuple[Endpoints, ...] = ()


def main() -> None:
    """Run an engine core until the front end stops it or goes away."""
    # The front end decides when to stop: process managers signal every process at once, and a
    # draining server still needs its engine.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    order: LaunchOrder = pickle.load(sys.stdin.buffer)
    observability = order.vllm_config.observability_config
    setup_logging(
        "(EngineCore) ",
        log_format=observability.log_format,
        config_file=observability.logging_config,
    )
    _set_process_title("VLLM:EngineCore")
    process = EngineCoreProc(order)
    sys.exit(process.run())


def load_factory(path: str) -> CoreFactory:
    """Import the function that ``module:function`` names."""
    # First: a platform's plug-in may have to say how torch meets its device.
    get_current_platform()
    module, _, name = path.partition(":")
    factory: CoreFactory = getattr(importlib.import_module(module), name)
    return factory


class EngineCoreProc:
    """One engine core and the threads around its loop.

    Owns: this process's end of the channel.
    """

    def __init__(self, order: LaunchOrder) -> None:
        self._order = order
        self._codec = Codec()
        endpoints = (order.endpoints, *order.more_endpoints)
        self._channels = [Channel.connect(each) for each in endpoints]
        self._progress = Progress()
        self._pulse = Pulse(self._progress, order.heartbeat_timeout_s)
        self._stopping = threading.Event()
        self._parent_pid = os.getppid()
        self._core: SteppedCore | None = None

    def run(self) -> int:
        """Build the core and serve; return the process's exit status."""
        threading.Thread(target=self._await_orphaning, name="lifeline", daemon=True).start()
        beats = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        beats.start()
        core = self._build()
        status = 1 if core is None else self._serve(core)
        self._stopping.set()
        beats.join()
        for channel in self._channels:
            channel.close_sender()
        return status

    def _build(self) -> SteppedCore | None:
        try:
            with lasting_imports():
                make_core = load_factory(self._order.core_factory)
            core = make_core(self._order.vllm_config)
            kv_cache = core.get_kv_cache_info()
        except Exception as error:  # a process edge: the front end raises it again
            if not isinstance(error, VllmError):
                logger.exception("The engine core failed to start.")
            self._emit(StartFailed(ErrorInfo.from_exception(error)))
            return None
        start_s = time.monotonic() - self._order.launched_at
        self._emit(Ready(os.getpid(), kv_cache, core.load_s, start_s))
        return core

    def _serve(self, core: SteppedCore) -> int:
        self._core = core
        several = len(self._channels) > 1
        loop = CoreLoop(core, self._emit, self._progress, self._emit_to if several else None)
        for client in range(len(self._channels)):
            threading.Thread(
                target=self._read, args=(loop, client), name="input", daemon=True
            ).start()
        loop.submit_warm_up(_WARM_UP_DELAY_S)
        try:
            loop.run()
        except Exception as error:  # a process edge: nothing can be trusted after this
            logger.exception("The engine core died: %s.", core.describe_state())
            self._emit(Dead(f"{type(error).__name__}: {error}"))
            return 1
        core.shutdown()
        return 0

    def _emit(self, message: FromCore) -> None:
        data = self._codec.encode(message)
        for channel in self._channels:
            channel.send(data)

    def _emit_to(self, client: int, message: FromCore) -> None:
        self._channels[client].send(self._codec.encode(message))

    def _read(self, loop: CoreLoop, client: int) -> None:
        """Hand messages to the loop; the process ends with this thread still waiting."""
        while True:
            data = self._channels[client].receive(_INPUT_POLL_S)
            if data is None:
                continue
            try:
                loop.submit(self._codec.decode_to_core(data), client)
            except Exception as error:  # a process edge: a core that went deaf must not live on
                logger.exception("The engine core cannot take a message.")
                self._end(f"{type(error).__name__}: {error}")

    def _end(self, reason: str) -> None:
        """Say why and end the process, from any thread."""
        self._emit(Dead(reason))
        for channel in self._channels:
            channel.close_sender()
        os._exit(1)

    def _beat(self) -> None:
        while not self._stopping.wait(beat_interval_s(self._order.heartbeat_timeout_s)):
            self._emit(self._pulse.take_beat())
            self._check_workers()
            # The lifeline stays open in a child that the front end forked.
            if os.getppid() != self._parent_pid:
                self._exit_as_orphan()

    def _check_workers(self) -> None:
        """End the process if a worker is gone: without work no step would find out."""
        fault = None if self._core is None else self._core.find_fault()
        if fault is not None and not self._stopping.is_set():
            logger.error("The engine core cannot go on: %s.", fault)
            self._end(fault)

    def _await_orphaning(self) -> None:
        _resume_at_end(0)
        # Raw reads: a buffered one would hold a lock that interpreter shutdown wants.
        while os.read(0, 1024):
            pass
        self._exit_as_orphan()

    def _exit_as_orphan(self) -> None:
        """End at once, whatever the main thread is in, a step that hangs included."""
        self._order.endpoints.remove_folder()
        os._exit(_EXIT_STATUS_ORPHANED)


def _resume_at_end(lifeline: int) -> None:
    """Have the kernel resume this process when its lifeline ends, should it be stopped then.

    Nobody else would: who watched over it is gone, and its memory stays taken. Linux only.
    """
    if sys.platform == "linux":
        # Other files than pipes have no such signals.
        with contextlib.suppress(OSError):
            fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
            fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGCONT)
            flags = fcntl.fcntl(lifeline, fcntl.F_GETFL)
            fcntl.fcntl(lifeline, fcntl.F_SETFL, flags | os.O_ASYNC)


def _set_process_title(title: str) -> None:
    """Name the process for ps and top, where that is possible (15 characters show)."""
    try:
        with open("/proc/self/comm", "w", encoding="ascii") as comm:
            comm.write(title[:15])
    except OSError:
        logger.debug("The process cannot be renamed here.")
