import time
import uuid

import msgspec
import pytest
import zmq

from vllm.config.kv_events import KVEventsConfig
from vllm.distributed.kv_events import (
    END_OF_REPLAY,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventPublisherFactory,
    KVEventBatch,
    NullEventPublisher,
    ZmqEventPublisher,
    _binds,
    offset_endpoint_port,
)
from vllm.exceptions import ConfigError


def stored(**kw):
    fields = {
        "block_hashes": [1, 2],
        "parent_block_hash": None,
        "token_ids": [1, 2, 3, 4],
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    return BlockStored(**{**fields, **kw})


class TestEvents:
    def test_values(self):
        assert stored() == stored()
        assert hash(stored()) == hash(stored())
        assert stored() != stored(group_idx=1)
        assert stored(extra_keys=[("a", ("b", 1)), None]) in {
            stored(extra_keys=[("a", ("b", 1)), None])
        }
        assert BlockRemoved([1], "GPU") == BlockRemoved(block_hashes=[1], medium="GPU")
        assert hash(BlockRemoved([b"x"], "GPU", 2)) == hash(BlockRemoved([b"x"], "GPU", 2))
        assert len({AllBlocksCleared(), AllBlocksCleared()}) == 1

    def test_mutable(self):
        event = stored()
        event.kv_cache_spec_kind = "full_attention"
        event.kv_cache_spec_sliding_window = 8
        assert event != stored()

    def test_wire_form(self):
        """A batch is an array of three; an event a map with its type, without defaults."""
        batch = KVEventBatch(1.5, [stored(), BlockRemoved([7], "GPU"), AllBlocksCleared()], 2)
        ts, events, rank = msgspec.msgpack.decode(msgspec.msgpack.encode(batch))
        assert (ts, rank) == (1.5, 2)
        assert events == [
            {
                "type": "BlockStored",
                "block_hashes": [1, 2],
                "parent_block_hash": None,
                "token_ids": [1, 2, 3, 4],
                "block_size": 2,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
            },
            {"type": "BlockRemoved", "block_hashes": [7], "medium": "GPU"},
            {"type": "AllBlocksCleared"},
        ]

    @pytest.mark.parametrize("hashes", [[1, 2**64 - 1], [b"\x00" * 32, b"y"]])
    def test_round_trip(self, hashes):
        batch = KVEventBatch(
            1.0,
            [
                stored(
                    block_hashes=hashes,
                    parent_block_hash=hashes[0],
                    extra_keys=[("lora", ("id", -3), b"digest"), None],
                    group_idx=3,
                    kv_cache_spec_kind="sliding_window",
                    kv_cache_spec_sliding_window=128,
                )
            ],
            0,
        )
        decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=KVEventBatch)
        [event] = decoded.events
        assert type(event) is BlockStored
        assert event.block_hashes == hashes
        assert event.kv_cache_spec_sliding_window == 128
        assert [tuple(key) if key else None for key in event.extra_keys][1] is None


class TestFactory:
    @pytest.mark.parametrize(
        "config",
        [None, KVEventsConfig(), KVEventsConfig(publisher="zmq"), KVEventsConfig(True, "null")],
        ids=["none", "off", "zmq but off", "null"],
    )
    def test_null(self, config):
        publisher = EventPublisherFactory.create(config, 0)
        assert type(publisher) is NullEventPublisher
        publisher.publish(KVEventBatch(0.0, []))
        publisher.shutdown()

    def test_zmq(self):
        config = KVEventsConfig(True, endpoint=f"inproc://{uuid.uuid4()}")
        publisher = EventPublisherFactory.create(config)
        assert type(publisher) is ZmqEventPublisher
        publisher.shutdown()

    def test_names_are_taken_once(self):
        with pytest.raises(KeyError, match="zmq"):
            EventPublisherFactory.register_publisher("zmq", ZmqEventPublisher)


@pytest.mark.parametrize(
    ("endpoint", "rank", "expected"),
    [
        ("tcp://*:5557", 0, "tcp://*:5557"),
        ("tcp://*:5557", 3, "tcp://*:5560"),
        ("inproc://x", 2, "inproc://x_dp2"),
        ("ipc:///tmp/x", 1, "ipc:///tmp/x_dp1"),
    ],
)
def test_endpoint_by_rank(endpoint, rank, expected):
    assert offset_endpoint_port(endpoint, rank) == expected


@pytest.mark.parametrize(
    ("endpoint", "opens"),
    [
        ("tcp://*:5557", True),
        ("tcp://0.0.0.0:5557", True),
        ("tcp://[::]:5557", True),
        ("ipc:///tmp/x", True),
        ("inproc://x", True),
        ("tcp://router:5557", False),
        ("tcp://10.0.0.0:5557", False),
        ("tcp://127.0.0.1:5557", False),
    ],
)
def test_an_address_of_no_single_host_is_opened_and_others_are_connected_to(endpoint, opens):
    assert _binds(endpoint) is opens


def test_endpoint_without_port():
    with pytest.raises(ConfigError, match="has no port"):
        offset_endpoint_port("tcp://host", 1)


class Wire:
    """A publisher and sockets that listen to it, all in one process."""

    def __init__(self, rank=0, **kw):
        self.name = f"inproc://{uuid.uuid4()}"
        self.config = KVEventsConfig(
            True, endpoint=self.name, replay_endpoint=self.name + "-replay", topic="kv", **kw
        )
        self.publisher = EventPublisherFactory.create(self.config, rank)
        self.context = zmq.Context.instance()
        self.sockets = []

    def socket(self, kind, endpoint):
        socket = self.context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, 60_000)
        socket.connect(endpoint)
        self.sockets.append(socket)
        return socket

    def subscriber(self, topic=b"kv"):
        socket = self.socket(zmq.SUB, self.name)
        socket.setsockopt(zmq.SUBSCRIBE, topic)
        # The publisher's socket looks for new subscriptions every few milliseconds only.
        time.sleep(0.03)
        return socket

    def publish(self, *hashes):
        for block_hash in hashes:
            self.publisher.publish(KVEventBatch(0.0, [BlockRemoved([block_hash], "GPU")]))

    def close(self):
        self.publisher.shutdown()
        for socket in self.sockets:
            socket.close()


@pytest.fixture
def wire():
    made = []

    def make(*args, **kw):
        made.append(Wire(*args, **kw))
        return made[-1]

    yield make
    for each in made:
        each.close()


def decode(frames):
    topic, number, payload = frames
    batch = msgspec.msgpack.decode(payload, type=KVEventBatch)
    return topic, int.from_bytes(number, "big"), batch.events[0].block_hashes[0], batch


def replay(wire, first):
    """(sequence number, block hash) of every batch a late subscriber is sent."""
    socket = wire.socket(zmq.DEALER, wire.config.replay_endpoint)
    socket.send_multipart([b"", first.to_bytes(8, "big")])
    got = []
    while True:
        delimiter, number, payload = socket.recv_multipart()
        assert delimiter == b""
        if number == END_OF_REPLAY:
            assert payload == b""
            return got
        batch = msgspec.msgpack.decode(payload, type=KVEventBatch)
        got.append((int.from_bytes(number, "big"), batch.events[0].block_hashes[0]))


def drained(wire, num_batches):
    """Wait until the publisher's thread has taken everything."""
    deadline = time.monotonic() + 60
    while len(wire.publisher._buffer) < num_batches and time.monotonic() < deadline:
        time.sleep(0.005)


class TestZmq:
    def test_in_order_with_numbers(self, wire):
        w = wire()
        socket = w.subscriber()
        w.publish(10, 11, 12)
        got = [decode(socket.recv_multipart()) for _ in range(3)]
        assert [(topic, number, value) for topic, number, value, _ in got] == [
            (b"kv", 0, 10),
            (b"kv", 1, 11),
            (b"kv", 2, 12),
        ]
        assert got[0][3].data_parallel_rank == 0

    def test_rank(self, wire):
        w = wire()
        publisher = ZmqEventPublisher(w.config, 3)
        batch = KVEventBatch(0.0, [])
        publisher.publish(batch)
        assert batch.data_parallel_rank == 3
        kept = KVEventBatch(0.0, [], 1)
        publisher.publish(kept)
        assert kept.data_parallel_rank == 1
        publisher.shutdown()

    def test_replay_without_any_subscriber(self, wire):
        w = wire()
        w.publish(10, 11, 12, 13)
        drained(w, 4)
        assert replay(w, 0) == [(0, 10), (1, 11), (2, 12), (3, 13)]
        assert replay(w, 2) == [(2, 12), (3, 13)]
        assert replay(w, 9) == []

    def test_replay_buffer_is_bounded(self, wire):
        w = wire(buffer_steps=2)
        w.publish(10, 11, 12)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and replay(w, 0)[-1:] != [(2, 12)]:
            time.sleep(0.005)
        assert replay(w, 0) == [(1, 11), (2, 12)]

    def test_replay_to_a_request_socket(self, wire):
        w = wire()
        w.publish(10)
        drained(w, 1)
        socket = w.socket(zmq.REQ, w.config.replay_endpoint)
        socket.send((0).to_bytes(8, "big"))
        number, payload = socket.recv_multipart()
        assert int.from_bytes(number, "big") == 0
        assert payload

    def test_bad_replay_request(self, wire, caplog):
        w = wire()
        socket = w.socket(zmq.DEALER, w.config.replay_endpoint)
        socket.send_multipart([b"", b"what"])
        assert socket.recv_multipart() == [b"", END_OF_REPLAY, b""]
        w.publish(10)
        drained(w, 1)
        assert replay(w, 0) == [(0, 10)]

    def test_shutdown_sends_what_is_queued(self, wire):
        w = wire()
        socket = w.subscriber()
        w.publish(*range(50))
        w.publisher.shutdown()
        w.publisher.shutdown()
        assert [decode(socket.recv_multipart())[2] for _ in range(50)] == list(range(50))
        with pytest.raises(RuntimeError, match="shut down"):
            w.publish(1)

    def test_full_queue_drops_with_a_warning(self, wire, caplog):
        w = wire(max_queue_size=1)
        w.publisher.shutdown()
        w.publisher._closed = False  # the thread is gone, so nothing drains the queue
        w.publish(1, 2, 3)
        assert w.publisher._num_dropped >= 2
        assert caplog.text.count("is full") == 1
        w.publisher._closed = True

    def test_after_a_failure_nothing_is_queued_and_nothing_more_is_said(self, wire, caplog):
        w = wire(max_queue_size=1)
        w.publisher.publish(KVEventBatch(0.0, [object()]))  # cannot be encoded
        w.publisher._thread.join(60)
        w.publish(1, 2, 3)
        assert caplog.text.count("no more events are published") == 1
        assert "is full" not in caplog.text
        w.publisher.shutdown()

    def test_a_dropped_batch_takes_its_number_with_it(self, wire):
        """That is how subscribers learn of it."""
        w = wire(max_queue_size=1)
        w.publish(*range(500))  # faster than the thread can send
        while not w.publisher._queue.empty():
            time.sleep(0.001)
        w.publish(500)
        deadline = time.monotonic() + 60
        got = replay(w, 0)
        while got[-1:] != [(500, 500)] and time.monotonic() < deadline:
            got = replay(w, 0)
        assert got[-1] == (500, 500)
        assert all(number == value for number, value in got)
        assert len(got) + w.publisher._num_dropped == 501

    def test_taken_address(self, wire):
        w = wire()
        with pytest.raises(ConfigError, match="cannot be opened"):
            ZmqEventPublisher(w.config, 0)

    def test_taken_replay_address(self, wire):
        w = wire()
        config = KVEventsConfig(
            True, endpoint=f"inproc://{uuid.uuid4()}", replay_endpoint=w.config.replay_endpoint
        )
        with pytest.raises(ConfigError, match="replay"):
            ZmqEventPublisher(config, 0)
