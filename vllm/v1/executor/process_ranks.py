"""Ranks as processes of this machine, over a socket each."""

import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from vllm import envs
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import WorkerPlace
from vllm.exceptions import EngineDeadError
from vllm.logger import init_logger
from vllm.utils.liveness import beat_interval_s
from vllm.v1.executor.messages import (
    STEP_ORDERS,
    Beat,
    BindWake,
    Failure,
    FromRank,
    Order,
    Stop,
    rebuild_failure,
)
from vllm.v1.executor.rank_watch import OWN_SHARE, RankWatch

logger = init_logger(__name__)

# A fresh interpreter, not multiprocessing: no re-import of the user's script, no fork of threads.
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from vllm.v1.executor.rank_proc import main; "
    "main(int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]), "
    "bool(int(sys.argv[6])))"
)
_STOP_S = 3.0
# So many calls of ranks are one.
_WAKES_AT_ONCE = 4096


class ProcessRanks:
    """One process per rank.

    Args:
        size: How many.
        timeout_s: Seconds without life that mean death, of a rank that runs a step.

    Attributes:
        places: Where each stands.
        timeout_s: As given.

    Owns: the processes, their sockets, the pipe by which they rouse this process with the thread
    that reads it, and the folder they meet in.
    """

    def __init__(self, size: int, timeout_s: float, first_device: int = 0) -> None:
        self.timeout_s = timeout_s
        self._folder = Path(tempfile.mkdtemp(prefix="vllm-ranks-"))
        meeting = f"file://{self._folder}/meeting"
        self.places = [
            WorkerPlace(rank, size, first_device + rank, size, meeting) for rank in range(size)
        ]
        self._ranks: list[_RankProcess] = []
        self._closed = False
        self._wake: Callable[[], None] | None = None
        self._wake_fd, theirs = os.pipe()
        # Of a pipe that is full nobody need wait: it rouses this process already.
        os.set_blocking(theirs, False)
        try:
            for place in self.places:
                self._ranks.append(_RankProcess(place.rank, timeout_s, theirs))
        except BaseException:
            self.close()
            raise
        finally:
            # Theirs alone: with the last of them the pipe ends, and its reader.
            os.close(theirs)
            threading.Thread(target=self._hear_wakes, name="rank-wakes", daemon=True).start()

    @property
    def pids(self) -> list[int]:
        """The processes' ids, in rank order."""
        return [rank.process.pid for rank in self._ranks]

    def order(self, orders: Sequence[Order]) -> list[Any]:
        """See ``Ranks``."""
        try:
            self._send(orders)
            return self._gather(is_step=isinstance(orders[0], STEP_ORDERS))
        except BaseException:
            # One is lost: the others wait for it in a collective, and cannot go on without it.
            self._kill()
            raise

    def bind_wake(self, wake: Callable[[], None]) -> bool:
        """See ``Ranks``."""
        self._wake = wake
        return all(self.order([BindWake()] * len(self._ranks)))

    def _hear_wakes(self) -> None:
        with os.fdopen(self._wake_fd, "rb", buffering=0) as pipe:
            while pipe.read(_WAKES_AT_ONCE):
                if self._wake is not None:
                    self._wake()

    def find_fault(self) -> str | None:
        """See ``Ranks``."""
        if self._closed:
            return None
        for rank in self._ranks:
            if (code := rank.process.poll()) is not None:
                return rank.describe_exit(code)
        return None

    def close(self) -> None:
        """See ``Ranks``."""
        if self._closed:
            return
        self._closed = True
        for rank in self._ranks:
            rank.try_send(pickle.dumps(Stop()))
        deadline = time.monotonic() + _STOP_S
        for rank in self._ranks:
            rank.wait(deadline - time.monotonic())
        self._kill()

    def _kill(self) -> None:
        self._closed = True
        for rank in self._ranks:
            rank.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _send(self, orders: Sequence[Order]) -> None:
        is_one = all(order is orders[0] for order in orders)
        shared = pickle.dumps(orders[0]) if is_one else None
        for rank, order in zip(self._ranks, orders, strict=True):
            if not rank.try_send(shared or pickle.dumps(order)):
                raise EngineDeadError(rank.describe_end())

    def _gather(self, *, is_step: bool) -> list[Any]:
        answers: dict[int, Any] = {}
        watch = RankWatch(range(len(self._ranks)), self.timeout_s * OWN_SHARE)
        by_connection = {rank.connection: rank for rank in self._ranks}
        interval_s = beat_interval_s(self.timeout_s)
        while len(answers) < len(self._ranks):
            pending = [c for c, rank in by_connection.items() if rank.rank not in answers]
            ready = wait(pending, interval_s)
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = by_connection[connection]
                message = rank.receive()
                if isinstance(message, Beat):
                    watch.saw_beat(rank.rank, message)
                elif isinstance(message, Failure):
                    # Of a collective that broke the rank that is gone is the cause.
                    if fault := self.find_fault():
                        raise EngineDeadError(fault)
                    raise rebuild_failure(rank.rank, message)
                else:
                    answers[rank.rank] = message.value
                    watch.saw_answer(rank.rank)
            if is_step and not ready and (fault := watch.find_fault()):
                raise EngineDeadError(fault)
        return [answers[rank] for rank in range(len(self._ranks))]


class _RankProcess:
    """Owns: a process and the socket to it."""

    def __init__(self, rank: int, timeout_s: float, wake_fd: int) -> None:
        self.rank = rank
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-c", _BOOT, json.dumps(sys.path)]
            # The kernel goes by the thread that starts a process: only the main one lives as long.
            dies_along = threading.current_thread() is threading.main_thread()
            command += [str(theirs.fileno()), str(wake_fd)]
            command += [str(rank), str(timeout_s), str(int(dies_along))]
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno(), wake_fd],
                start_new_session=True,
                env=_environment(),
            )
        self.connection = Connection(ours.detach())

    def try_send(self, data: bytes) -> bool:
        """Send a pickled order; False where nobody reads it any more."""
        try:
            self.connection.send_bytes(data)
        except OSError:
            return False
        return True

    def receive(self) -> FromRank:
        """Return the next message.

        Raises:
            EngineDeadError: There will be none.
        """
        try:
            message: FromRank = self.connection.recv()
        except (EOFError, OSError) as error:
            raise EngineDeadError(self.describe_end()) from error
        return message

    def describe_end(self) -> str:
        """Say how the process ended; its socket is closed already."""
        self.wait(_STOP_S)
        code = self.process.poll()
        return f"rank {self.rank} closed its socket" if code is None else self.describe_exit(code)

    def describe_exit(self, code: int) -> str:
        """Say how the process ended."""
        how = f"was ended by signal {-code}" if code < 0 else f"exited with status {code}"
        return f"rank {self.rank} {how}"

    def wait(self, timeout_s: float) -> None:
        """Wait for the process's end, if it comes in time."""
        try:
            self.process.wait(max(0.0, timeout_s))
        except subprocess.TimeoutExpired:
            logger.debug("rank %d still runs", self.rank)

    def kill(self) -> None:
        """End the process, whatever it does."""
        self.process.kill()
        self.process.wait()
        self.connection.close()


def start_process_ranks(config: VllmConfig) -> ProcessRanks:
    """Start the ranks that a configuration asks for."""
    parallel = config.parallel_config
    return ProcessRanks(
        parallel.world_size, envs.VLLM_ENGINE_HEARTBEAT_TIMEOUT, parallel.first_device
    )


def _environment() -> dict[str, str]:
    environment = dict(os.environ)
    if sys.platform == "linux":
        # Ranks of one machine need no network, nor that its own name resolves.
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return environment
