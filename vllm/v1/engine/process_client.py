"""The engine core in its own process, as the front end sees it."""

import atexit
import json
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import IO, Protocol

import msgspec
import zmq

from vllm import envs
from vllm.config import VllmConfig
from vllm.exceptions import EngineDeadError
from vllm.logger import init_logger
from vllm.platforms.host_cpus import count_usable_cores
from vllm.utils.liveness import beat_interval_s
from vllm.v1.engine.channel import Channel, Endpoints
from vllm.v1.engine.client import STOP_TIMEOUT_S, MailboxHandle, expect_ready
from vllm.v1.engine.core_proc import LaunchOrder
from vllm.v1.engine.heartbeat import HeartbeatMonitor
from vllm.v1.engine.wire import (
    Codec,
    Dead,
    FromCore,
    Heartbeat,
    Ready,
    Shutdown,
    StepOutputs,
    ToCore,
)
from vllm.v1.messages import EngineCoreEvent

logger = init_logger(__name__)

# A fresh interpreter, not multiprocessing: no re-import of the user's script, no fork of threads.
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from vllm.v1.engine.core_proc import main; main()"
)
# Without pidfd (old kernels, other systems) the exit of the core is looked for this often.
_EXIT_POLL_S = 0.25
# The last words of a core that exited may still be in ZMQ's thread.
_LAST_WORDS_S = 0.2
_CONNECT_S = 5.0


class CoreProcess(Protocol):
    """What is asked of a core's process; ``subprocess.Popen`` is one."""

    pid: int
    stdin: IO[bytes] | None

    def poll(self) -> int | None:
        """Return the exit status; None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; TimeoutExpired when it takes longer."""

    def kill(self) -> None:
        """End it by force."""


class ProcessCore(MailboxHandle):
    """An engine core process: started at once, waited for later.

    Owns: the process, the channel, and the thread that reads from it.

    Args:
        vllm_config: Sent to the process; the copy there is the one that profiling completes.
        core_factory: ``module:function`` that makes the core there, see ``core_proc``.
        use_tcp: Do not try Unix sockets.
        more_endpoints: Of further front ends, which share the core.
        tcp_host: An address of this machine, for a core on another; None: it is on this one.
        spawn: Starts the core; None: as a process of this machine.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        core_factory: str,
        *,
        use_tcp: bool = False,
        more_endpoints: tuple[Endpoints, ...] = (),
        tcp_host: str | None = None,
        spawn: Callable[[LaunchOrder], CoreProcess] | None = None,
    ) -> None:
        self._is_remote = spawn is not None
        self._timeout_s = envs.VLLM_ENGINE_HEARTBEAT_TIMEOUT
        self._codec = Codec()
        super().__init__()
        self._ready: Ready | None = None
        self._start_error: BaseException | None = None
        self._closing = False
        self._channel, endpoints = Channel.bind(use_tcp=use_tcp, host=tcp_host)
        order = LaunchOrder(
            vllm_config=vllm_config,
            endpoints=endpoints,
            core_factory=core_factory,
            heartbeat_timeout_s=self._timeout_s,
            launched_at=time.monotonic(),
            more_endpoints=more_endpoints,
        )
        try:
            self._process: CoreProcess = (spawn or spawn_process)(order)
        except BaseException:
            self._channel.close()
            raise
        self._reader = threading.Thread(target=self._read, name="engine-core-reader", daemon=True)
        self._reader.start()
        # A core whose front end is gone ends by itself; this also removes the channel's folder.
        atexit.register(self.shutdown)

    @property
    def pid(self) -> int:
        """The core's process id."""
        return self._process.pid

    def wait_ready(self) -> Ready:
        """Block until the core serves."""
        if self._start_error is not None:
            raise self._start_error
        if self._ready is None:
            try:
                ready = expect_ready(self._mailbox.get())
            except BaseException as error:
                self._start_error = error
                self.shutdown()
                raise
            # Both directions connect independently; this one may be a moment later.
            self._channel.wait_connected(_CONNECT_S)
            self._ready = ready
        return self._ready

    def send(self, message: ToCore) -> None:
        """Send a message; the core must be ready."""
        if not self._channel.send(self._codec.encode(message)) and self._dead_error is None:
            logger.debug("%s goes nowhere: the engine core is gone.", type(message).__name__)

    def shutdown(self, timeout: float = STOP_TIMEOUT_S) -> None:
        """Stop the process, by force after ``timeout`` seconds."""
        self._closing = True
        atexit.unregister(self.shutdown)
        if self._process.poll() is None:
            is_told = self._ready is not None and self._channel.send(self._codec.encode(Shutdown()))
            try:
                self._process.wait(timeout if is_told else 0)
            except subprocess.TimeoutExpired:
                if is_told:
                    logger.warning("The engine core did not stop within %g s: killed.", timeout)
                self._process.kill()
                self._process.wait()
        if threading.current_thread() is not self._reader:
            self._reader.join()

    def _read(self) -> None:
        """Deliver messages until the process has exited; then close the channel."""
        exit_fd = None if self._is_remote else _open_pidfd(self._process.pid)
        try:
            fault = self._read_until_exit(exit_fd)
        finally:
            if exit_fd is not None:
                os.close(exit_fd)
        if fault is not None:
            # Nothing more can be learnt from it; its memory is needed by the next one.
            self._process.kill()
        code = self._process.wait()
        while (data := self._channel.receive(_LAST_WORDS_S)) is not None:
            self._deliver(data)
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._channel.close()
        self._die(fault or _describe_exit(code))

    def _read_until_exit(self, exit_fd: int | None) -> str | None:
        """Return what is wrong with the core, or None when its process has exited."""
        poller = zmq.Poller()
        poller.register(self._channel.receive_socket, zmq.POLLIN)
        if exit_fd is not None:
            poller.register(exit_fd, zmq.POLLIN)
        interval_s = beat_interval_s(self._timeout_s) if exit_fd is not None else _EXIT_POLL_S
        monitor: HeartbeatMonitor | None = None
        while True:
            events = dict(poller.poll(round(interval_s * 1000)))
            if self._channel.receive_socket in events:
                message = self._deliver(self._channel.receive_socket.recv())
                if isinstance(message, Ready):
                    # Loading weights may take any time; from now on the core owes heartbeats.
                    monitor = HeartbeatMonitor(self._timeout_s)
                elif isinstance(message, Heartbeat):
                    if monitor is not None:
                        monitor.saw_beat(message)
                elif monitor is not None:
                    monitor.saw_message()
                # Judged below too: a core may beat for ever while its step loop hangs.
                if self._channel.has_message():
                    continue
            elif events or self._process.poll() is not None:
                return None
            if monitor is not None and not self._closing and (fault := monitor.find_fault()):
                return fault

    def _deliver(self, data: bytes) -> FromCore:
        try:
            message = self._codec.decode_from_core(data)
        except msgspec.DecodeError as error:
            # Who waits for it would wait for ever.
            message = Dead(
                f"it sent a message that cannot be read ({error}): is it of this version?"
            )
        if self._is_remote and isinstance(message, StepOutputs):
            message = on_this_clock(message)
        if isinstance(message, Dead):
            self._die(message.message)
        elif not isinstance(message, Heartbeat):
            self._mailbox.put(message)
        return message

    def _die(self, reason: str) -> None:
        """Mark the core dead and tell the user, once; an ordered shutdown is no death."""
        if self._dead_error is not None:
            return
        message = f"The engine core is dead: {reason}."
        if not self._closing:
            self._dead_error = EngineDeadError(message)
            if self._ready is not None:
                logger.error("%s", message)
        self._mailbox.put(Dead(message))


def _environment(order: LaunchOrder) -> dict[str, str]:
    """Return the environment of a core; several on one machine share out its cores."""
    environment = envs.engine_process_environment()
    parallel = order.vllm_config.parallel_config
    if parallel.num_local_cores > 1 and not envs.OMP_NUM_THREADS:
        num_workers = parallel.num_local_cores * parallel.world_size
        environment["OMP_NUM_THREADS"] = str(max(1, count_usable_cores() // num_workers))
    return environment


def on_this_clock(message: StepOutputs) -> StepOutputs:
    """Return another machine's outputs with times of this one's clock, as if they came at once."""
    outputs = message.outputs
    shift = time.monotonic() - outputs.timestamp
    outputs.timestamp += shift
    for output in outputs.outputs:
        if output.events:
            output.events = [
                EngineCoreEvent(event.type, event.timestamp + shift) for event in output.events
            ]
    return message


def spawn_process(order: LaunchOrder) -> "subprocess.Popen[bytes]":
    """Start a core on this machine; its standard input is its lifeline."""
    # Its own session: Ctrl-C at the terminal is the front end's to handle (it drains).
    process = subprocess.Popen(
        [sys.executable, "-c", _BOOT, json.dumps(sys.path)],
        stdin=subprocess.PIPE,
        start_new_session=True,
        env=_environment(order),
    )
    assert process.stdin is not None
    try:
        process.stdin.write(pickle.dumps(order))
        # Stays open: its end tells the core that the front end is gone.
        process.stdin.flush()
    except BrokenPipeError:
        logger.debug("The engine core exited before it read its orders.")
    return process


def _open_pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def _describe_exit(code: int) -> str:
    if code < 0:
        return f"its process was ended by signal {-code}"
    return f"its process exited with status {code}"
