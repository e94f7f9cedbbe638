"""Handing prefixes over by plain TCP: rows go from one pool to the other without a copy between.

    holder   accept thread, one thread per connection: reads a frame, sends its answers
    puller   one thread per holder: its conversations one after the other, on one connection

Sending blocks while the other side does not read, so a slow puller slows its holder's thread down
and nothing piles up.
"""

from __future__ import annotations

import errno
import queue
import socket
import threading
import time
from collections.abc import Callable
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
from vllm.distributed.kv_transfer.handover.serving import Serving
from vllm.distributed.kv_transfer.handover.sockets import (
    CONNECT_TIMEOUT_S,
    LOOK_UP_S,
    PeerClosedError,
    close,
    connect,
    drop,
    listen,
    receive,
    receive_control,
    receive_into,
    send,
    set_options,
)
from vllm.logger import init_logger

logger = init_logger(__name__)

_SEND_TIMEOUT_S = 15.0
# Whoever connects and does not say who they are is no engine.
_GREETING_S = 10.0
_MAX_CONNECTIONS = 1024
# A puller's thread of a holder that nothing is asked of ends, with its connection.
_IDLE_S = 60.0
# Of accept, while the listener is as it was: the other side left, or this process has no room.
_PASSING_ERRORS = frozenset(
    {
        *(errno.ECONNABORTED, errno.EPROTO, errno.EINTR, errno.EPERM),
        *(errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM),
    }
)
_ACCEPT_PAUSE_S = 0.1


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
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._listener = listen(host, port)
        self._thread = threading.Thread(target=self._accept, name="kv-holder", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                connection, address = self._listener.accept()
            except OSError as error:
                if self._closing.is_set():
                    return
                if error.errno not in _PASSING_ERRORS:
                    logger.error("No further KV transfer can begin: %s.", error)
                    return
                logger.warning("A KV transfer cannot begin now: %s.", error)
                self._closing.wait(_ACCEPT_PAUSE_S)
                continue
            with self._lock:
                has_room = len(self._connections) < _MAX_CONNECTIONS
                if has_room:
                    self._connections.add(connection)
            if not has_room:
                logger.warning("KV transfer: %s is turned away, too many are here.", address[0])
                connection.close()
                continue
            name = f"kv-holder-{address[0]}:{address[1]}"
            arguments = (connection, name)
            threading.Thread(target=self._answer, args=arguments, name=name, daemon=True).start()

    def _answer(self, connection: socket.socket, name: str) -> None:
        serving = self._make_serving()
        try:
            set_options(connection)
            deadline = time.monotonic() + _GREETING_S

            def left_s(last: float) -> float:
                if self._closing.is_set():
                    return -1.0
                # Engines idle between requests: keep-alive ends what is dead.
                return LOOK_UP_S if serving.is_greeted else deadline - time.monotonic()

            while not self._closing.is_set():
                head, payload = receive_control(connection, left_s)
                # Closed here and now: an answer that is cut short must not go on reading a lease.
                with closing(serving.handle(head, payload)) as frames:
                    for frame in frames:
                        connection.settimeout(_SEND_TIMEOUT_S)
                        send(connection, frame)
        except PeerClosedError:
            logger.debug("%s: closed by the other side.", name)
        except (OSError, FrameError) as error:
            if not self._closing.is_set():
                logger.warning("%s: the connection ends: %s.", name, error)
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def shutdown(self) -> None:
        """Close everything; idempotent."""
        self._closing.set()
        close(self._listener)
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            close(connection)
        self._thread.join(timeout=LOOK_UP_S)


class TcpPuller:
    """Holds conversations with holders; what has ended is taken by ``take_ended``.

    Args:
        takes_turns: Whether conversations with several holders are held one after the other, too.

    Owns: a thread and a connection per holder that was asked for something lately.
    """

    def __init__(self, *, takes_turns: bool = False) -> None:
        self._turn = threading.Lock() if takes_turns else nullcontext()
        self._peers: dict[tuple[str, int], _Peer] = {}
        self._ended: queue.SimpleQueue[Conversation] = queue.SimpleQueue()

    def begin(self, conversation: Conversation) -> None:
        """Hold a conversation, after those begun with the same holder before."""
        address = (conversation.remote.host, conversation.remote.port)
        peer = self._peers.get(address)
        if peer is not None and peer.try_put(conversation):
            return
        self._peers = {known: peer for known, peer in self._peers.items() if not peer.is_over}
        self._peers[address] = _Peer(address, self._ended, self._turn, conversation)

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
        first: Conversation,
    ) -> None:
        self.is_over = False
        self._turn = turn
        self._address = address
        self._ended = ended
        self._connection: socket.socket | None = None
        # Why nobody answered, and when, if that was so the last time.
        self._refusal: tuple[str, float] | None = None
        self._is_stopped = threading.Event()
        self._lock = threading.Lock()
        self._conversations: queue.SimpleQueue[Conversation | None] = queue.SimpleQueue()
        self._conversations.put(first)
        name = f"kv-puller-{address[0]}:{address[1]}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def try_put(self, conversation: Conversation) -> bool:
        """Take a conversation; False where the thread is at its end."""
        with self._lock:
            if not self.is_over:
                self._conversations.put(conversation)
            return not self.is_over

    def stop(self) -> None:
        """End the thread."""
        self._is_stopped.set()
        self._conversations.put(None)
        self._thread.join(timeout=4 * LOOK_UP_S)

    def _run(self) -> None:
        try:
            while (conversation := self._next()) is not None:
                try:
                    with self._turn:
                        self._converse(conversation)
                finally:
                    self._end(conversation)
        finally:
            self._finish()

    def _next(self) -> Conversation | None:
        """Wait for a conversation; None: there will be none."""
        try:
            return self._conversations.get(timeout=_IDLE_S)
        except queue.Empty:
            with self._lock:
                self.is_over = self._conversations.empty()
            return None if self.is_over else self._conversations.get()

    def _end(self, conversation: Conversation) -> None:
        # Without an outcome only where this thread breaks: nobody shall wait for it then.
        conversation.fail("the transfer broke")
        self._ended.put(conversation)

    def _finish(self) -> None:
        with self._lock:
            self.is_over = True
        self._disconnect()
        while not self._conversations.empty():
            left = self._conversations.get()
            if left is not None:
                self._end(left)

    def _converse(self, conversation: Conversation) -> None:
        """Bring a conversation to its outcome."""
        # A connection kept from before may have died since: that is no failure.
        is_reused = self._connection is not None
        if self._refusal is not None:
            reason, refused_at = self._refusal
            if time.monotonic() - refused_at < CONNECT_TIMEOUT_S:
                # Those that wait behind each other do not find out one after the other.
                conversation.broken(reason, time.monotonic())
        while conversation.outcome is None:
            if self._is_stopped.is_set():
                conversation.fail("the engine is shutting down")
                break
            now = time.monotonic()
            if self._connection is None and conversation.retry_at > now:
                pause = min(conversation.retry_at - now, LOOK_UP_S)
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
            connection, is_greeted = self._connect(), False
        if conversation.begin_talking():
            try:
                self._exchange(conversation, connection, is_greeted=is_greeted)
            finally:
                conversation.end_talking()

    def _connect(self) -> socket.socket:
        try:
            connection = self._connection = connect(self._address)
        except OSError as error:
            self._refusal = str(error), time.monotonic()
            raise
        self._refusal = None
        return connection

    def _exchange(
        self, conversation: Conversation, connection: socket.socket, *, is_greeted: bool
    ) -> None:
        def left_s(last: float) -> float:
            if conversation.outcome is not None or self._is_stopped.is_set():
                return -1.0
            return conversation.wait_s(last, time.monotonic())

        connection.settimeout(CONNECT_TIMEOUT_S)
        for frame in conversation.connected(is_greeted=is_greeted):
            send(connection, frame)
        while conversation.outcome is None:
            head = Head.unpack(receive(connection, HEAD_BYTES, left_s))
            payload: Buffer | None = None
            target = conversation.target(head)
            if target is not None:
                receive_into(connection, target, left_s)
            elif conversation.wants_payload(head):
                payload = receive(connection, head.length, left_s)
            else:
                drop(connection, head.length, left_s)
                payload = b""
            for frame in conversation.receive(head, payload, time.monotonic()):
                send(connection, frame)

    def _disconnect(self) -> None:
        if self._connection is not None:
            close(self._connection)
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
    send(connection, control_frame(Kind.HELLO, encode(me)))
    head, payload = receive_control(connection, left_s)
    data = check_control(head, payload)
    if head.kind is Kind.REFUSE:
        return head.kind, decode(data, Refuse).reason
    if head.kind is not Kind.WELCOME:
        raise FrameError(f"a greeting was answered by a {head.kind.name} frame")
    mismatch = find_mismatch(me, decode(data, Hello))
    return (head.kind, "") if mismatch is None else (Kind.REFUSE, mismatch)
