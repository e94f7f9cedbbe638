"""The pair of ZMQ sockets between the front end and its engine core.

Unix sockets in a private folder; where those cannot be (no such sockets, or a path that is too
long), TCP on the loopback interface with CURVE keys, since any user of the machine may connect
there.
"""

import os
import shutil
import tempfile
import threading
from dataclasses import dataclass

import zmq

from vllm.exceptions import ConfigError, EngineError

# sun_path holds 108 bytes on Linux, 104 elsewhere, a final zero included.
_MAX_IPC_PATH = 100
_IPC = "ipc://"
_LINGER_MS = 2000
# A plain number: a flag's operators are Python code.
_POLLIN = int(zmq.POLLIN)


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where the core connects to, and the keys it needs there.

    Attributes:
        to_core: Address of the front end's PUSH socket.
        from_core: Address of its PULL socket.
        server_key: The front end's public CURVE key; None on Unix sockets.
    """

    to_core: str
    from_core: str
    server_key: bytes | None = None

    @classmethod
    def in_folder(cls, folder: str, name: str) -> "Endpoints":
        """Return a pair of Unix sockets in a private folder."""
        return cls(f"{_IPC}{folder}/{name}to", f"{_IPC}{folder}/{name}from")

    def remove_folder(self) -> None:
        """Remove the private folder of Unix sockets, if there is one."""
        if self.to_core.startswith(_IPC):
            shutil.rmtree(os.path.dirname(self.to_core.removeprefix(_IPC)), ignore_errors=True)


class Channel:
    """One end: sends from any thread, receives in one.

    Owns: both sockets, a context for each (so that one can be flushed and closed while another
    thread waits at the other), and the folder at the front end.
    """

    def __init__(self, folder: str | None = None) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._closed = False
        self._send_context = zmq.Context()
        self._receive_context = zmq.Context()
        self._send_socket = self._send_context.socket(zmq.PUSH)
        self.receive_socket = self._receive_context.socket(zmq.PULL)
        for socket in (self._send_socket, self.receive_socket):
            # A reader that falls behind must not stop the other side's loop.
            socket.set_hwm(0)
            socket.setsockopt(zmq.LINGER, _LINGER_MS)

    @classmethod
    def bind(cls, *, use_tcp: bool = False, host: str | None = None) -> tuple["Channel", Endpoints]:
        """Make the front end's side.

        Args:
            use_tcp: Do not try Unix sockets.
            host: An address of this machine for a core on another one, by TCP; None: it is here.

        Raises:
            EngineError: TCP is needed, but this ZMQ cannot encrypt.
        """
        folder = None if use_tcp or host is not None else make_private_folder()
        channel = cls(folder)
        if folder is not None:
            endpoints = Endpoints.in_folder(folder, "")
            channel._send_socket.bind(endpoints.to_core)
            channel.receive_socket.bind(endpoints.from_core)
            return channel, endpoints
        return channel, channel._bind_tcp(host or "127.0.0.1")

    def _bind_tcp(self, host: str) -> Endpoints:
        if not zmq.has("curve"):
            self.close()
            raise EngineError(
                "Unix sockets cannot be used here and this pyzmq was built without CURVE, so TCP "
                "would be open to every user of the machine: set TMPDIR to a short path."
            )
        public_key, secret_key = zmq.curve_keypair()
        addresses = []
        for socket in (self._send_socket, self.receive_socket):
            socket.curve_server = True
            socket.curve_secretkey = secret_key
            try:
                port = socket.bind_to_random_port(f"tcp://{host}")
            except zmq.ZMQError as error:
                self.close()
                raise ConfigError(
                    f"data_parallel_address={host!r} is no address of this machine: {error}."
                ) from error
            addresses.append(f"tcp://{host}:{port}")
        return Endpoints(addresses[0], addresses[1], public_key)

    @classmethod
    def bind_at(cls, endpoints: Endpoints) -> "Channel":
        """Make a further front end's side, at Unix sockets in a folder of somebody else's."""
        channel = cls()
        channel._send_socket.bind(endpoints.to_core)
        channel.receive_socket.bind(endpoints.from_core)
        return channel

    @classmethod
    def connect(cls, endpoints: Endpoints) -> "Channel":
        """Make the core's side."""
        channel = cls()
        for socket in (channel._send_socket, channel.receive_socket):
            if endpoints.server_key is not None:
                public_key, secret_key = zmq.curve_keypair()
                socket.curve_serverkey = endpoints.server_key
                socket.curve_publickey = public_key
                socket.curve_secretkey = secret_key
        channel._send_socket.connect(endpoints.from_core)
        channel.receive_socket.connect(endpoints.to_core)
        return channel

    def wait_connected(self, timeout_s: float) -> bool:
        """Wait until the other end can be sent to; the side that bound needs this once."""
        with self._lock:
            return not self._closed and bool(
                self._send_socket.poll(round(timeout_s * 1000), zmq.POLLOUT)
            )

    def send(self, data: bytes) -> bool:
        """Send without waiting; return False when nobody is there to receive, or after close."""
        with self._lock:
            if self._closed:
                return False
            try:
                self._send_socket.send(data, zmq.NOBLOCK, copy=True)
            except zmq.Again:
                return False
            return True

    def has_message(self) -> bool:
        """Whether a message waits; a fifth of what asking by ``poll`` takes."""
        return bool(int(self.receive_socket.getsockopt(zmq.EVENTS)) & _POLLIN)

    def receive(self, timeout_s: float) -> bytes | None:
        """Return the next message, or None after ``timeout_s``."""
        if not self.receive_socket.poll(round(timeout_s * 1000)):
            return None
        return self.receive_socket.recv()

    def close_sender(self) -> None:
        """Flush and close the sending side, from any thread. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._send_socket.close()
                self._send_context.term()

    def close(self) -> None:
        """Close everything; only the thread that receives may call this. Idempotent."""
        self.close_sender()
        self.receive_socket.close()
        self._receive_context.term()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def make_private_folder() -> str | None:
    """Return a new folder only this user may enter, or None when no Unix socket fits in one."""
    if not zmq.has("ipc"):
        return None
    for parent in (None, "/tmp"):
        try:
            folder = tempfile.mkdtemp(prefix="vllm-", dir=parent)
        except OSError:
            continue
        if len(f"{folder}/from".encode()) <= _MAX_IPC_PATH:
            return folder
        shutil.rmtree(folder, ignore_errors=True)
    return None
