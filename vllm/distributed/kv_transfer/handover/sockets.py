"""Frames in and out of sockets, with an end to every wait."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from random import SystemRandom

from vllm.distributed.kv_transfer.handover.frames import HEAD_BYTES, FrameError, Head, Kind
from vllm.distributed.kv_transfer.handover.serving import Frame
from vllm.exceptions import ConfigError
from vllm.logger import init_logger

logger = init_logger(__name__)

CONNECT_TIMEOUT_S = 2.0
# How soon a thread that waits for bytes notices that nobody wants them any more.
LOOK_UP_S = 0.25
_SCRATCH_BYTES = 1 << 16
# Linux takes 1,024 pieces at a time.
_MAX_PIECES = 512
# A machine that vanished closes nothing: after idling so long, its connections are probed.
_KEEP_ALIVE_S = 60
# Where ports are looked for that no client of this machine is given.
_FIRST_OWN_PORT, _LAST_OWN_PORT = 20_000, 32_000
_MAX_TRIES = 20


class PeerClosedError(OSError):
    """The other side closed the connection."""


def send(connection: socket.socket, frame: Frame) -> None:
    """Send a frame, piece by piece where it lies."""
    pieces = [memoryview(piece).cast("B") for piece in frame if len(piece)]
    while pieces:
        sent = connection.sendmsg(pieces[:_MAX_PIECES])
        while sent:
            size = pieces[0].nbytes
            if sent < size:
                pieces[0] = pieces[0][sent:]
                break
            sent -= size
            del pieces[0]


def receive_into(
    connection: socket.socket, buffers: Sequence[memoryview], left_s: Callable[[float], float]
) -> None:
    """Fill buffers.

    Args:
        connection: Where from.
        buffers: Where to.
        left_s: Returns how many seconds are left to wait, given when the last bytes came.

    Raises:
        OSError: The connection ended, or nothing came for so long.
    """
    left = [buffer for buffer in buffers if buffer.nbytes]
    last = time.monotonic()
    while left:
        wait_s = left_s(last)
        if wait_s <= 0:
            raise TimeoutError("nothing came for too long")
        connection.settimeout(min(wait_s, LOOK_UP_S))
        try:
            received = connection.recvmsg_into(left[:_MAX_PIECES])[0]
        except TimeoutError:
            continue
        if not received:
            raise PeerClosedError("the connection was closed")
        last = time.monotonic()
        while received:
            size = left[0].nbytes
            if received < size:
                left[0] = left[0][received:]
                break
            received -= size
            del left[0]


def receive(connection: socket.socket, length: int, left_s: Callable[[float], float]) -> bytearray:
    """Receive so many bytes; the rest is as for ``receive_into``."""
    data = bytearray(length)
    receive_into(connection, [memoryview(data)], left_s)
    return data


def receive_control(
    connection: socket.socket, left_s: Callable[[float], float]
) -> tuple[Head, bytearray]:
    """Receive a frame where no rows are expected: a stranger must not say how much to hold.

    Raises:
        FrameError: It is none, or rows.
        OSError: As for ``receive_into``.
    """
    head = Head.unpack(receive(connection, HEAD_BYTES, left_s))
    if head.kind is Kind.ROWS:
        raise FrameError("rows came that nobody asked for")
    return head, receive(connection, head.length, left_s)


def drop(connection: socket.socket, length: int, left_s: Callable[[float], float]) -> None:
    """Receive so many bytes and forget them."""
    scratch = memoryview(bytearray(min(length, _SCRATCH_BYTES)))
    while length:
        part = scratch[: min(length, _SCRATCH_BYTES)]
        receive_into(connection, [part], left_s)
        length -= part.nbytes


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket.

    Raises:
        ConfigError: The address cannot be listened on.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"kv-transfer-config: cannot listen on {host}:{port} ({error}): set kv_ip to an "
            "address of this machine and kv_port to a free port."
        ) from error


def find_port_range(host: str, offset: int, count: int) -> int:
    """Return a port such that so many from ``offset`` above it on are free now.

    Below those that systems give to clients, so that nobody else gets one by chance before it is
    listened on.

    Raises:
        ConfigError: The address is none of this machine.
    """
    draw = SystemRandom()
    last = _LAST_OWN_PORT - offset - count
    for tries_left in reversed(range(_MAX_TRIES)):
        first = draw.randrange(_FIRST_OWN_PORT, last)
        try:
            for port in range(first + offset, first + offset + count):
                listen(host, port).close()
        except ConfigError:
            if not tries_left:
                raise
        else:
            return first
    raise AssertionError("the last try returns or raises")


def set_options(connection: socket.socket) -> None:
    """Send small frames at once, and find out about machines that vanished."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # Not on every system; without it, keep-alive begins after the system's own time.
    if idle := getattr(socket, "TCP_KEEPIDLE", None):
        connection.setsockopt(socket.IPPROTO_TCP, idle, _KEEP_ALIVE_S)


def connect(address: tuple[str, int]) -> socket.socket:
    """Connect.

    Raises:
        OSError: Nobody answers there, or there can be no such address: requests name them.
    """
    if not 0 < address[1] < 1 << 16:
        # Some systems would take the remainder.
        raise OSError(f"no engine can be there (port {address[1]})")
    try:
        connection = socket.create_connection(address, timeout=CONNECT_TIMEOUT_S)
    except ValueError as error:
        raise OSError(f"no engine can be there ({error})") from error
    set_options(connection)
    return connection


def close(connection: socket.socket) -> None:
    """Close a connection or a listener that another thread may wait in."""
    try:
        # Wakes a thread that waits in it, which close alone does not.
        connection.shutdown(socket.SHUT_RDWR)
    except OSError as error:
        logger.debug("Closing: %s.", error)
    connection.close()
