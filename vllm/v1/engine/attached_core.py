"""An engine core that another process keeps, as one of its several front ends sees it."""

import threading

import msgspec

from vllm.exceptions import EngineDeadError
from vllm.logger import init_logger
from vllm.v1.engine.channel import Channel, Endpoints
from vllm.v1.engine.client import STOP_TIMEOUT_S, MailboxHandle, expect_ready
from vllm.v1.engine.wire import (
    AddRequests,
    Codec,
    CoreLost,
    Dead,
    Heartbeat,
    Ready,
    ToCore,
)

logger = init_logger(__name__)

_POLL_S = 0.5
_CONNECT_S = 5.0


class AttachedCore(MailboxHandle):
    """A core process that somebody else started, watches and stops.

    Owns: this front end's end of the channel, and the thread that reads from it.

    Args:
        endpoints: Unix sockets, made here, that the core connects to.
        client: Number of this front end, from 1.
    """

    def __init__(self, endpoints: Endpoints, client: int) -> None:
        self._client = client
        self._codec = Codec()
        super().__init__()
        self._ready: Ready | None = None
        self._closing = threading.Event()
        self._channel = Channel.bind_at(endpoints)
        self._reader = threading.Thread(target=self._read, name="engine-core-reader", daemon=True)
        self._reader.start()

    def wait_ready(self) -> Ready:
        """Block until the core serves."""
        if self._ready is None:
            ready = expect_ready(self._mailbox.get())
            self._channel.wait_connected(_CONNECT_S)
            self._ready = ready
        return self._ready

    def send(self, message: ToCore) -> None:
        """Send a message; requests carry this front end's number."""
        if isinstance(message, AddRequests):
            number = self._client
            message = AddRequests(
                [msgspec.structs.replace(r, client_index=number) for r in message.requests]
            )
        if not self._channel.send(self._codec.encode(message)):
            logger.debug("%s goes nowhere: the engine core is gone.", type(message).__name__)

    def shutdown(self, timeout: float = STOP_TIMEOUT_S) -> None:
        """Let go of the core, which lives on."""
        self._closing.set()
        if threading.current_thread() is not self._reader:
            self._reader.join(timeout)

    def note_lost(self, reason: str, *, is_final: bool) -> None:
        """Take in the changes of the core's death from who watches it.

        Args:
            reason: Why it died.
            is_final: Whether that is the end; else other cores go on, and it may come back.
        """
        if is_final:
            self._dead_error = EngineDeadError(reason)
            self._mailbox.put(Dead(reason))
        else:
            self._mailbox.put(CoreLost(0, reason))

    def _read(self) -> None:
        while not self._closing.is_set():
            data = self._channel.receive(_POLL_S)
            if data is None:
                continue
            message = self._codec.decode_from_core(data)
            # Its last words come from its keeper too, who knows what follows from them.
            if not isinstance(message, Heartbeat | Dead):
                self._mailbox.put(message)
        self._channel.close()
