"""The process of one rank on this machine.

    main thread       takes an order, carries it out, answers
    heartbeat thread  sends beats while an order is carried out; ends the process when the engine
                      core is gone
    other threads     of a connector: a byte in a pipe of all ranks rouses the engine core

The engine core's end of the socket closes with its process, however it ends: the main thread then
reads the end of the stream, or a beat finds the pipe broken, in a collective that hangs too.
"""

import contextlib
import ctypes
import logging
import os
import pickle
import signal
import sys
import threading
from multiprocessing.connection import Connection

from vllm.config.observability import ObservabilityConfig
from vllm.logger import setup_logging
from vllm.platforms.resolve import get_current_platform
from vllm.utils.collector import lasting_imports
from vllm.utils.liveness import beat_interval_s, thread_effort_clock
from vllm.v1.executor.messages import Beat, FromRank, MakeWorker, Order, Stop

EXIT_STATUS_ORPHANED = 3
_PR_SET_PDEATHSIG = 1


def main(
    socket_fd: int, wake_fd: int, rank: int, heartbeat_timeout_s: float, dies_along: bool
) -> None:
    """Run a rank until the engine core stops it or goes away.

    Args:
        socket_fd: Of a stream socket to the engine core; closed at the end.
        wake_fd: Of a pipe to the engine core, which does not block.
        rank: For logs, until the first order tells more.
        heartbeat_timeout_s: Seconds of silence that the engine core takes for death.
        dies_along: Whether the kernel is to end this process with the thread that started it.
    """
    # The engine core decides when to stop: process managers signal every process at once.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if dies_along:
        _die_with_parent()
    link = _Link(Connection(socket_fd), heartbeat_timeout_s)
    first = link.receive()
    assert isinstance(first, MakeWorker), "the first order makes the worker"
    _set_up_logging(rank, first.vllm_config.observability_config)
    # First: a platform's plug-in may have to say how torch meets its device.
    get_current_platform()
    with lasting_imports():
        from vllm.v1.executor.rank_host import RankHost  # noqa: PLC0415  (see above)

    host = RankHost(lambda: _rouse(wake_fd))
    order: Order = first
    while True:
        answer = host.carry_out(order)
        link.answer(answer)
        if isinstance(order, Stop):
            logging.shutdown()
            # Nothing is left to tidy, and the interpreter's own end takes torch seconds.
            os._exit(0)
        order = link.receive()


class _Link:
    """This process's end of the socket.

    Owns: the socket and the heartbeat thread.
    """

    def __init__(self, connection: Connection, timeout_s: float) -> None:
        self._connection = connection
        self._interval_s = beat_interval_s(timeout_s)
        self._effort_clock = thread_effort_clock(threading.main_thread())
        self._sending = threading.Lock()
        self._busy = threading.Event()
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def receive(self) -> Order:
        """Return the next order; the process ends here when there will be none."""
        try:
            order: Order = self._connection.recv()
        except (EOFError, OSError):
            os._exit(EXIT_STATUS_ORPHANED)
        self._busy.set()
        return order

    def answer(self, message: FromRank) -> None:
        """Answer the order."""
        self._busy.clear()
        self._send(message)

    def _send(self, message: FromRank) -> None:
        data = pickle.dumps(message)
        try:
            with self._sending:
                self._connection.send_bytes(data)
        except OSError:
            os._exit(EXIT_STATUS_ORPHANED)

    def _beat(self) -> None:
        never = threading.Event()
        while True:
            # Idle ranks are silent: nobody reads, and the pipe would fill.
            self._busy.wait()
            self._send(Beat(self._effort_clock().total_s))
            never.wait(self._interval_s)


def _rouse(wake_fd: int) -> None:
    """Rouse the engine core; any thread may."""
    # A full pipe rouses it already; of one that nobody reads the socket tells.
    with contextlib.suppress(BlockingIOError, BrokenPipeError):
        os.write(wake_fd, b"1")


def _die_with_parent() -> None:
    """Have the kernel kill this process with the engine core, a stopped one too; Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _set_up_logging(rank: int, observability: ObservabilityConfig) -> None:
    setup_logging(
        f"(Rank {rank}) ",
        log_format=observability.log_format,
        config_file=observability.logging_config,
    )
