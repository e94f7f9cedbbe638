"""``--api-server-count``: starts engine cores and several HTTP processes, and keeps them.

    this process     binds the socket, starts and watches the cores, forwards signals
    ApiServer_1..N   accept on the one socket; each talks to every core over channels of its own

Whatever ends by itself ends the whole: a process manager shall see it.
"""

import json
import queue
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence

import msgspec

from vllm import envs
from vllm.config import VllmConfig
from vllm.entrypoints.batch.folder_lock import lock_folder
from vllm.entrypoints.openai.api_process import ApiOrder, CoreFate
from vllm.entrypoints.openai.server_args import ServerArgs
from vllm.exceptions import ConfigError, VllmError
from vllm.logger import init_logger
from vllm.v1.engine.channel import Endpoints, make_private_folder
from vllm.v1.engine.client import AsyncEngineCoreHandle
from vllm.v1.engine.data_parallel.ranks import agree_on_hashes
from vllm.v1.engine.launch import launch_engine_core
from vllm.v1.engine.wire import CoreLost, Dead, FromCore

logger = init_logger(__name__)

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from vllm.entrypoints.openai.api_process import main; main()"
)
_SIGNALS = (signal.SIGINT, signal.SIGTERM)

# What happens: a signal's number, the exit of a server process, a core that cannot start.
_Exit = tuple[int, int]
_Event = signal.Signals | _Exit | VllmError


def run_api_processes(config: VllmConfig, args: ServerArgs, listener: socket.socket) -> int:
    """Serve with several processes until told to stop; return the exit code.

    Raises:
        ConfigError: That cannot be done here.
        VllmError: An engine core cannot start.
    """
    if not envs.VLLM_ENABLE_V1_MULTIPROCESSING:
        raise ConfigError("--api-server-count needs VLLM_ENABLE_V1_MULTIPROCESSING=1.")
    if config.parallel_config.data_parallel_backend == "ray":
        raise ConfigError("--api-server-count needs cores on this machine: leave ray out.")
    folder = make_private_folder()
    if folder is None:
        raise ConfigError("--api-server-count needs Unix sockets: set TMPDIR to a short path.")
    # Held until the last of the processes that inherit it has ended.
    batch_lock = None if args.batch.folder is None else lock_folder(args.batch)
    count = args.operations.api_server_count
    ranks = range(config.parallel_config.data_parallel_size)
    endpoints = [
        tuple(Endpoints.in_folder(folder, f"{rank}-{client}") for client in range(1, count + 1))
        for rank in ranks
    ]
    config = agree_on_hashes(config)
    core = launch_engine_core(config, more_endpoints=endpoints)
    orders = [
        ApiOrder(
            config,
            args,
            listener.fileno(),
            tuple(endpoints[rank][client - 1] for rank in ranks),
            client,
            count,
            folder,
            batch_lock,
        )
        for client in range(1, count + 1)
    ]
    keeper = _Keeper(core, orders)
    try:
        return keeper.run()
    finally:
        keeper.kill()
        core.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


class _Keeper:
    """Owns: the server processes and what they are told."""

    def __init__(self, core: AsyncEngineCoreHandle, orders: Sequence[ApiOrder]) -> None:
        self._core = core
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._processes = [_spawn(order) for order in orders]
        self._lock = threading.Lock()
        for index in range(len(orders)):
            threading.Thread(target=self._watch, args=(index,), daemon=True).start()
        threading.Thread(target=self._await_core, name="wait-for-engine", daemon=True).start()

    def run(self) -> int:
        """Wait until every process has ended; return the exit code."""
        for number in _SIGNALS:
            signal.signal(number, lambda n, _frame: self._events.put(signal.Signals(n)))
        num_left, code, is_stopping = len(self._processes), 0, False
        while num_left:
            event = self._events.get()
            if isinstance(event, VllmError):
                raise event
            if isinstance(event, signal.Signals):
                logger.info("[shutdown] %s received", event.name)
                is_stopping = True
                self._signal_all()
                continue
            index, status = event
            num_left -= 1
            if status:
                code = 1
            if not is_stopping:
                logger.error("API server process %d ended with status %d", index + 1, status)
                code, is_stopping = 1, True
                self._signal_all()
        return code

    def kill(self) -> None:
        """End what still runs."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()

    def _signal_all(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)

    def _watch(self, index: int) -> None:
        self._events.put((index, self._processes[index].wait()))

    def _await_core(self) -> None:
        try:
            self._core.wait_ready()
        except VllmError as error:
            self._events.put(error)
            return
        self._core.subscribe(self._on_message)

    def _on_message(self, message: FromCore) -> None:
        """Tell every server process what became of a core; the rest they hear themselves."""
        if isinstance(message, CoreLost):
            self._tell(CoreFate(message.engine_index, message.message))
        elif isinstance(message, Dead):
            self._tell(CoreFate(None, message.message))

    def _tell(self, fate: CoreFate) -> None:
        line = msgspec.json.encode(fate) + b"\n"
        with self._lock:
            for process in self._processes:
                assert process.stdin is not None
                try:
                    process.stdin.write(line)
                    process.stdin.flush()
                except BrokenPipeError:
                    logger.debug("A server process ended before it heard of a core's death.")


def _spawn(order: ApiOrder) -> "subprocess.Popen[bytes]":
    # A session of its own: Ctrl-C at the terminal is this process's to forward.
    process = subprocess.Popen(
        [sys.executable, "-c", _BOOT, json.dumps(sys.path)],
        stdin=subprocess.PIPE,
        start_new_session=True,
        pass_fds=(order.listener, *([] if order.batch_lock is None else [order.batch_lock])),
    )
    assert process.stdin is not None
    try:
        process.stdin.write(order.encode())
        process.stdin.flush()
    except BrokenPipeError:
        logger.debug("A server process exited before it read its orders.")
    return process
