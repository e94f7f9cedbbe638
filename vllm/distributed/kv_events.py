"""What happens to cached blocks, told to routers and other outsiders.

Replaying the events of one engine rebuilds its prefix index (I7). They are made by the block pool,
gathered by the scheduler once a step, and published here as one batch:

    PUB   [topic, sequence number (8 bytes, big-endian), msgpack([ts, events, rank])]
    REQ   first wanted sequence number (8 bytes)          -> a ROUTER on ``replay_endpoint``
    reply [sequence number, payload] ..., then [-1, b""]   one message per kept batch

An event is a map whose ``type`` names its class; fields at their default are left out.
"""

from __future__ import annotations

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import zmq

from vllm.exceptions import ConfigError
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.config.kv_events import KVEventsConfig

logger = init_logger(__name__)

MEDIUM_GPU = "GPU"
MEDIUM_CPU = "CPU"
MEDIUM_STORAGE = "STORAGE"

_SEQ_BYTES = 8
END_OF_REPLAY = (-1).to_bytes(_SEQ_BYTES, "big", signed=True)

# How long the publisher thread sleeps without work: with a replay socket this is the delay of a
# replay on an idle engine, without one only a net for a shutdown that finds the queue full.
_REPLAY_POLL_S = 0.05
_IDLE_POLL_S = 1.0
_DROPS_PER_WARNING = 1000
_LINGER_MS = 1000
_SHUTDOWN_TIMEOUT_S = 2.0
_REBIND_S = 0.5


def _hashable(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_hashable(item) for item in value)
    return value


class KVCacheEvent(msgspec.Struct, omit_defaults=True, tag=True):
    """Base of all events: mutable, compared and hashed by value."""

    def __hash__(self) -> int:
        values = tuple(_hashable(getattr(self, name)) for name in self.__struct_fields__)
        return hash((type(self).__name__, values))


class BlockStored(KVCacheEvent):
    """Blocks entered the prefix cache.

    Attributes:
        block_hashes: Their hashes, in prefix order.
        parent_block_hash: Hash of the block before the first; None at a prompt's start.
        token_ids: Tokens of the stored blocks, ``block_size`` for each hash.
        block_size: Tokens of a block.
        lora_id: Number of the LoRA adapter, if any.
        medium: Where the blocks are.
        lora_name: Name of the LoRA adapter, if any.
        extra_keys: What else entered each hash, one entry per block.
        group_idx: KV cache group of the blocks.
        kv_cache_spec_kind: Kind of that group.
        kv_cache_spec_sliding_window: Its window in tokens, if it has one.
        session_id: Of the request that stored them, as its client names it.
    """

    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    session_id: str | None = None

    __hash__ = KVCacheEvent.__hash__


class BlockRemoved(KVCacheEvent):
    """Blocks left the prefix cache.

    Attributes:
        block_hashes: Their hashes.
        medium: Where the blocks were.
        group_idx: KV cache group of the blocks.
    """

    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None

    __hash__ = KVCacheEvent.__hash__


class AllBlocksCleared(KVCacheEvent):
    """The prefix cache was emptied."""

    __hash__ = KVCacheEvent.__hash__


AnyKVCacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True):
    """The events of one step.

    Attributes:
        ts: Seconds since the epoch.
        events: In the order they happened.
        data_parallel_rank: The engine that made them; filled in by the publisher.
    """

    ts: float
    events: list[AnyKVCacheEvent]
    data_parallel_rank: int | None = None


class EventPublisher(ABC):
    """Sends batches to whoever listens; never blocks the step loop.

    Args:
        data_parallel_rank: Stamped on every batch.
    """

    def __init__(self, data_parallel_rank: int = 0) -> None:
        self._data_parallel_rank = data_parallel_rank

    @abstractmethod
    def publish(self, batch: KVEventBatch) -> None:
        """Hand over a batch."""

    @abstractmethod
    def shutdown(self) -> None:
        """Send what is queued and release everything; idempotent."""


class NullEventPublisher(EventPublisher):
    """Drops everything."""

    def publish(self, batch: KVEventBatch) -> None:
        """Do nothing."""

    def shutdown(self) -> None:
        """Do nothing."""


def offset_endpoint_port(endpoint: str, data_parallel_rank: int) -> str:
    """Return an endpoint of its own for each data parallel rank.

    TCP ports are counted up, other addresses get the rank as a suffix; rank 0 keeps the address.

    Raises:
        ConfigError: A TCP address without a port.
    """
    if data_parallel_rank == 0:
        return endpoint
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}_dp{data_parallel_rank}"
    base, _, port = endpoint.rpartition(":")
    if not port.isdigit():
        raise ConfigError(
            f"KV events endpoint {endpoint!r} has no port: write it like tcp://*:5557."
        )
    return f"{base}:{int(port) + data_parallel_rank}"


def _bind(socket: zmq.Socket[bytes], endpoint: str) -> None:
    """Bind a socket; an address that a socket closed before is freed by ZeroMQ's own thread."""
    deadline = time.monotonic() + _REBIND_S
    while True:
        try:
            socket.bind(endpoint)
            return
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE or time.monotonic() > deadline:
                raise
        time.sleep(0.01)


def _binds(endpoint: str) -> bool:
    """Whether an address is ours to open, rather than somebody's to connect to.

    Addresses of no single host are ours (``*``, 0.0.0.0, ``::``), and so are those of this machine
    only, and IPv6 addresses written with ``::``: other tools read these so, too.
    """
    return any(
        every_host in endpoint for every_host in ("*", "::", "//0.0.0.0:")
    ) or endpoint.startswith(("ipc://", "inproc://"))


class ZmqEventPublisher(EventPublisher):
    """Publishes on a ZMQ PUB socket and answers replay requests on a ROUTER.

    A thread owns both sockets, so a slow network never holds up a step. Batches that find the
    queue full are dropped with a warning; each takes its sequence number with it, so that
    subscribers see the gap.

    Owns: the numbering, the queue, the replay buffer, the thread and its sockets.

    Args:
        config: Addresses and limits.
        data_parallel_rank: Stamped on every batch; moves the addresses.

    Raises:
        ConfigError: An address cannot be opened.
    """

    def __init__(self, config: KVEventsConfig, data_parallel_rank: int = 0) -> None:
        super().__init__(data_parallel_rank)
        self._config = config
        self._topic = config.topic.encode()
        self._queue: queue.Queue[tuple[int, KVEventBatch] | None] = queue.Queue(
            config.max_queue_size
        )
        self._next_number = 0
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._num_dropped = 0
        self._encoder = msgspec.msgpack.Encoder()
        self._closed = False
        self._has_failed = False
        # Opened here, so that a taken address is an error at start-up and not in a thread.
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._pub = self._open(zmq.PUB, offset_endpoint_port(config.endpoint, data_parallel_rank))
        self._replay: zmq.Socket[bytes] | None = None
        if config.replay_endpoint:
            endpoint = offset_endpoint_port(config.replay_endpoint, data_parallel_rank)
            self._replay = self._open(zmq.ROUTER, endpoint)
        self._poll_s = _IDLE_POLL_S if self._replay is None else _REPLAY_POLL_S
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def _open(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.set_hwm(self._config.hwm)
        socket.setsockopt(zmq.LINGER, _LINGER_MS)
        try:
            if kind == zmq.ROUTER or _binds(endpoint):
                _bind(socket, endpoint)
            else:
                socket.connect(endpoint)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            if kind == zmq.ROUTER:
                self._pub.close(linger=0)
            raise ConfigError(
                f"KV events endpoint {endpoint!r} cannot be opened: {error}"
            ) from error
        return socket

    def publish(self, batch: KVEventBatch) -> None:
        """Queue a batch.

        Mutates: ``batch.data_parallel_rank``, if it is not set.

        Raises:
            RuntimeError: The publisher is shut down.
        """
        if self._closed:
            raise RuntimeError("The KV event publisher is shut down.")
        if self._has_failed:
            # That was said; a queue that nobody empties would ask for a longer one, for ever.
            return
        if batch.data_parallel_rank is None:
            batch.data_parallel_rank = self._data_parallel_rank
        number = self._next_number
        self._next_number += 1
        try:
            self._queue.put_nowait((number, batch))
        except queue.Full:
            self._num_dropped += 1
            if self._num_dropped % _DROPS_PER_WARNING == 1:
                logger.warning(
                    "The KV event queue (%d batches) is full: %d batches dropped so far. "
                    "Subscribers see a gap; raise max_queue_size.",
                    self._config.max_queue_size,
                    self._num_dropped,
                )

    def shutdown(self) -> None:
        """Send what is queued, then close the sockets."""
        if self._closed:
            return
        self._closed = True
        # A full queue ends too: the thread looks at _closed whenever the queue is empty.
        with suppress(queue.Full):
            self._queue.put_nowait(None)
        self._thread.join(timeout=_SHUTDOWN_TIMEOUT_S)

    # ------------------------------------------------------- the publisher's thread

    def _run(self) -> None:
        try:
            while self._step():
                pass
        except Exception:  # a thread's edge: nobody above could log it, and steps go on
            self._has_failed = True
            logger.exception("The KV event publisher stopped; no more events are published.")
        finally:
            self._pub.close()
            if self._replay is not None:
                self._replay.close()

    def _step(self) -> bool:
        """Answer a replay request, publish one batch; False: all is sent and we are closed."""
        if self._replay is not None and self._replay.poll(0):
            self._answer_replay(self._replay)
        try:
            item = self._queue.get(timeout=self._poll_s)
        except queue.Empty:
            return not self._closed
        if item is None:
            return False
        number, batch = item
        payload = self._encoder.encode(batch)
        self._buffer.append((number, payload))
        self._pub.send_multipart((self._topic, number.to_bytes(_SEQ_BYTES, "big"), payload))
        return True

    def _answer_replay(self, socket: zmq.Socket[bytes]) -> None:
        """Send the kept batches from the wanted number on, then the end marker."""
        frames = socket.recv_multipart()
        # REQ sockets put an empty delimiter between their identity and the request.
        envelope, request = frames[:-1], frames[-1]
        if len(request) != _SEQ_BYTES:
            logger.warning("Ignored a KV event replay request of %d bytes.", len(request))
            socket.send_multipart([*envelope, END_OF_REPLAY, b""])
            return
        first = int.from_bytes(request, "big")
        for number, payload in self._buffer:
            if number >= first:
                socket.send_multipart([*envelope, number.to_bytes(_SEQ_BYTES, "big"), payload])
        socket.send_multipart([*envelope, END_OF_REPLAY, b""])


class EventPublisherFactory:
    """Makes the publisher that the configuration names."""

    _registry: ClassVar[dict[str, Callable[[KVEventsConfig, int], EventPublisher]]] = {
        "null": lambda _config, rank: NullEventPublisher(rank),
        "zmq": ZmqEventPublisher,
    }

    @classmethod
    def register_publisher(
        cls, name: str, constructor: Callable[[KVEventsConfig, int], EventPublisher]
    ) -> None:
        """Add a publisher under a new name, at import time.

        Raises:
            KeyError: The name is taken.
        """
        if name in cls._registry:
            raise KeyError(f"KV event publisher {name!r} is already registered.")
        cls._registry[name] = constructor

    @classmethod
    def create(cls, config: KVEventsConfig | None, data_parallel_rank: int = 0) -> EventPublisher:
        """Return a publisher: one that drops everything unless events are enabled.

        Raises:
            ConfigError: The configuration names an unknown publisher.
        """
        if config is None or not config.enable_kv_cache_events:
            return NullEventPublisher(data_parallel_rank)
        constructor = cls._registry.get(config.publisher or "zmq")
        if constructor is None:
            raise ConfigError(
                f"KV events publisher {config.publisher!r} is unknown: use one of "
                f"{', '.join(sorted(cls._registry))}."
            )
        return constructor(config, data_parallel_rank)
