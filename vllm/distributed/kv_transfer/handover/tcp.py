"""Handing prefixes over by plain TCP: rows go from one pool to the other without a copy between.

    holder   accept thread, one thread per connection: reads a frame, sends its answers
    puller   one thread per holder: its conversations one after the other, on one connection

Sending blocks while the other side does not read, so a slow puller slows its holder's thread down
and nothing piles up.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from typing import Any

from vllm.distributed.kv_transfer.handover.frames import (
    HEAD_BYTES,
    Buffer,
    FrameError,
    Head,
    Kind,
    check_control,
    control_frame,
)
from vllm.distributed.kv_transfer.handover.manifest import find_mismatch
from vllm.distributed.kv_transfer.handover.messages import Hello, Refuse, decode, encode
from vllm.distributed.kv_transfer.handover.pulling import Conversation
from vllm.distributed.kv_transfer.handover.serving import Frame, Serving
from vllm.exceptions import ConfigError
from vllm.logger import init_logger

logger = init_logger(__name__)

_CONNECT_TIMEOUT_S = 2.0
_SEND_TIMEOUT_S = 15.0
# How soon a thread that waits for bytes notices that nobody wants them any more.
_LOOK_UP_S = 0.25
_SCRATCH_BYTES = 1 << 16
# Linux takes 1,024 pieces at a time.
_MAX_PIECES = 512


class _Closed(OSError):
    """The other side closed the connection."""


def _send(connection: socket.socket, frame: Frame) -> None:
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


def _receive_into(
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
        connection.settimeout(min(wait_s, _LOOK_UP_S))
        try:
            received = connection.recvmsg_into(left[:_MAX_PIECES])[0]
        except TimeoutError:
            continue
        if not received:
            raise _Closed("the connection was closed")
        last = time.monotonic()
        while received:
            size = left[0].nbytes
            if received < size:
                left[0] = left[0][received:]
                break
            received -= size
            del left[0]


def _receive(connection: socket.socket, length: int, left_s: Callable[[float], float]) -> bytearray:
    data = bytearray(length)
    _receive_into(connection, [memoryview(data)], left_s)
    return data


def _drop(connection: socket.socket, length: int, left_s: Callable[[float], float]) -> None:
    scratch = memoryview(bytearray(min(length, _SCRATCH_BYTES)))
    while length:
        part = scratch[: min(length, _SCRATCH_BYTES)]
        _receive_into(connection, [part], left_s)
        length -= part.nbytes


class TcpHolder:
    """Answers those who pull.

    Owns: the listening socket, its connections and their threads.

    Args:
        host: Address to listen on.
        port: Port to listen on.
        make_serving: Makes the answering side of a new connection.

    Raises:
        ConfigError: The address cannot be listened on.
    """

    def __init__(self, host: str, port: int, make_serving: Callable[[], Serving]) -> None:
        self._make_serving = make_serving
        self._is_closing = False
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._listener = listen(host, port)
        self._thread = threading.Thread(target=self._accept, name="kv-holder", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, address = self._listener.accept()
            except OSError as error:
                if not self._is_closing:
                    logger.error("No further KV transfer can begin: %s.", error)
                return
            with self._lock:
                self._connections.add(connection)
            name = f"kv-holder-{address[0]}:{address[1]}"
            arguments = (connection, name)
            threading.Thread(target=self._answer, args=arguments, name=name, daemon=True).start()

    def _answer(self, connection: socket.socket, name: str) -> None:
        serving = self._make_serving()
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while not self._is_closing:
                head = Head.unpack(_receive(connection, HEAD_BYTES, self._patience_s))
                payload = _receive(connection, head.length, self._patience_s)
                # Closed here and now: an answer that is cut short must not go on reading a lease.
                with closing(serving.handle(head, payload)) as frames:
                    for frame in frames:
                        connection.settimeout(_SEND_TIMEOUT_S)
                        _send(connection, frame)
        except _Closed:
            logger.debug("%s: closed by the other side.", name)
        except (OSError, FrameError) as error:
            if not self._is_closing:
                logger.warning("%s: the connection ends: %s.", name, error)
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _patience_s(self, last: float) -> float:
        # Connections idle between requests; only the engine's end ends them from this side.
        return -1.0 if self._is_closing else _LOOK_UP_S

    def shutdown(self) -> None:
        """Close everything; idempotent."""
        self._is_closing = True
        _close(self._listener)
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            _close(connection)
        self._thread.join(timeout=_LOOK_UP_S)


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket.

    Raises:
        ConfigError: The address cannot be listened on.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ConfigError(
            f"kv-transfer-config: cannot listen on {host}:{port} ({error}): set kv_ip to an "
            "address of this machine and kv_port to a free port."
        ) from error


def _close(connection: socket.socket) -> None:
    try:
        # Wakes a thread that waits in it, which close alone does not.
        connection.shutdown(socket.SHUT_RDWR)
    except OSError as error:
        logger.debug("Closing: %s.", error)
    connection.close()


class TcpPuller:
    """Holds conversations with holders; what has ended is taken by ``take_ended``.

    Args:
        takes_turns: Whether conversations with several holders are held one after the other, too.

    Owns: a thread and a connection per holder.
    """

    def __init__(self, *, takes_turns: bool = False) -> None:
        self._turn = threading.Lock() if takes_turns else nullcontext()
        self._peers: dict[tuple[str, int], _Peer] = {}
        self._ended: queue.SimpleQueue[Conversation] = queue.SimpleQueue()

    def begin(self, conversation: Conversation) -> None:
        """Hold a conversation, after those begun with the same holder before."""
        address = (conversation.remote.host, conversation.remote.port)
        peer = self._peers.get(address)
        if peer is None:
            peer = self._peers[address] = _Peer(address, self._ended, self._turn)
        peer.conversations.put(conversation)

    def take_ended(self) -> list[Conversation]:
        """Drain the conversations that ended; none of them touches memory any more."""
        ended = []
        while not self._ended.empty():
            ended.append(self._ended.get())
        return ended

    def shutdown(self) -> None:
        """Stop; what has not ended fails."""
        for peer in self._peers.values():
            peer.stop()


class _Peer:
    """One holder, and the thread that talks to it."""

    def __init__(
        self,
        address: tuple[str, int],
        ended: queue.SimpleQueue[Conversation],
        turn: AbstractContextManager[Any],
    ) -> None:
        self._turn = turn
        self._address = address
        self._ended = ended
        self._connection: socket.socket | None = None
        self._is_stopped = threading.Event()
        self.conversations: queue.SimpleQueue[Conversation | None] = queue.SimpleQueue()
        name = f"kv-puller-{address[0]}:{address[1]}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._is_stopped.set()
        self.conversations.put(None)
        self._thread.join(timeout=4 * _LOOK_UP_S)

    def _run(self) -> None:
        while (conversation := self.conversations.get()) is not None:
            with self._turn:
                self._converse(conversation)
            self._ended.put(conversation)
        self._disconnect()

    def _converse(self, conversation: Conversation) -> None:
        """Bring a conversation to its outcome."""
        # A connection kept from before may have died since: that is no failure.
        is_reused = self._connection is not None
        while conversation.outcome is None:
            if self._is_stopped.is_set():
                conversation.fail("the engine is shutting down")
                break
            now = time.monotonic()
            if self._connection is None and conversation.retry_at > now:
                pause = min(conversation.retry_at - now, _LOOK_UP_S)
                self._is_stopped.wait(pause)
                conversation.check_deadline(time.monotonic())
                continue
            try:
                self._talk(conversation)
            except (OSError, FrameError) as error:
                self._disconnect()
                if not is_reused:
                    conversation.broken(str(error), time.monotonic())
                is_reused = False
        if conversation.outcome is not None and not conversation.outcome.succeeded:
            # What it asked for may still be on its way.
            self._disconnect()

    def _talk(self, conversation: Conversation) -> None:
        connection, is_greeted = self._connection, True
        if connection is None:
            connection = socket.create_connection(self._address, timeout=_CONNECT_TIMEOUT_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._connection, is_greeted = connection, False

        def left_s(last: float) -> float:
            if conversation.outcome is not None or self._is_stopped.is_set():
                return -1.0
            return conversation.wait_s(last, time.monotonic())

        connection.settimeout(_CONNECT_TIMEOUT_S)
        for frame in conversation.connected(is_greeted=is_greeted):
            _send(connection, frame)
        while conversation.outcome is None:
            head = Head.unpack(_receive(connection, HEAD_BYTES, left_s))
            payload: Buffer | None = None
            target = conversation.target(head)
            if target is not None:
                _receive_into(connection, target, left_s)
            elif conversation.wants_payload(head):
                payload = _receive(connection, head.length, left_s)
            else:
                _drop(connection, head.length, left_s)
                payload = b""
            for frame in conversation.receive(head, payload, time.monotonic()):
                _send(connection, frame)

    def _disconnect(self) -> None:
        if self._connection is not None:
            _close(self._connection)
            self._connection = None


def exchange_hello(connection: socket.socket, me: Hello, timeout_s: float) -> tuple[Kind, str]:
    """Greet a holder on a fresh connection.

    Returns:
        WELCOME, or REFUSE with what differs.

    Raises:
        OSError: It does not answer.
        FrameError: What it answers is no greeting.
    """
    deadline = time.monotonic() + timeout_s

    def left_s(last: float) -> float:
        return deadline - time.monotonic()

    connection.settimeout(timeout_s)
    _send(connection, control_frame(Kind.HELLO, encode(me)))
    head = Head.unpack(_receive(connection, HEAD_BYTES, left_s))
    data = check_control(head, _receive(connection, head.length, left_s))
    if head.kind is Kind.REFUSE:
        return head.kind, decode(data, Refuse).reason
    if head.kind is not Kind.WELCOME:
        raise FrameError(f"a greeting was answered by a {head.kind.name} frame")
    mismatch = find_mismatch(me, decode(data, Hello))
    return (head.kind, "") if mismatch is None else (Kind.REFUSE, mismatch)
