"""A router's view of a real server's prefix cache, rebuilt from its KV events."""

import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import zmq

from examples.kv_events_subscriber import PrefixIndex, Subscriber, salt_digest
from tests.e2e.kv_indexer import Indexer
from tests.e2e.server_process import ServerProcess
from tests.ports import free_ports

COMPLETIONS = "/v1/completions"
SALT = "a very secret salt"


class EventServer(ServerProcess):
    """A small server that publishes KV events."""

    def __init__(self, log_path: Path, **config: Any) -> None:
        self.endpoint = f"tcp://127.0.0.1:{free_ports()}"
        self.replay_endpoint = f"tcp://127.0.0.1:{free_ports()}"
        # A star binds; a host name would be connected to.
        addresses = {
            "endpoint": self.endpoint.replace("127.0.0.1", "*"),
            "replay_endpoint": self.replay_endpoint.replace("127.0.0.1", "*"),
        }
        events = {"enable_kv_cache_events": True, "topic": "kv", **addresses, **config}
        super().__init__(
            log_path,
            "--kv-events-config",
            msgspec.json.encode(events).decode(),
            "--max-model-len",
            "1024",
            environment={"VLLM_CPU_KVCACHE_SPACE": "0.006", "VLLM_SERVER_DEV_MODE": "1"},
        )

    def complete(self, prompt: list[int], **fields: Any) -> int:
        """Run a prompt to its end; return the prompt tokens read from the cache."""
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, **fields}
        response = self.post(COMPLETIONS, body)
        assert response.status_code == 200, response.text
        return int(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EventServer]:
    with EventServer(tmp_path_factory.mktemp("events") / "log.txt") as server:
        yield server


@pytest.fixture
def subscriber(server: EventServer) -> Iterator[Subscriber]:
    subscriber = Subscriber(server.endpoint, server.replay_endpoint, "kv")
    drain(subscriber)
    yield subscriber
    subscriber.close()


@pytest.fixture
def indexer(server: EventServer) -> Iterator[Indexer]:
    indexer = Indexer(server.endpoint, "kv")
    wait_subscribed(server, indexer.hears)
    yield indexer
    indexer.close()


def drain(subscriber: Subscriber, quiet_s: float = 0.3) -> list[dict[str, Any]]:
    """Take in everything there is."""
    events: list[dict[str, Any]] = []
    while batch := subscriber.receive(quiet_s):
        events += batch
    return events


def wait_subscribed(server: EventServer, has_heard: Callable[[], bool]) -> None:
    """Return once a subscriber hears the server: subscriptions travel by themselves."""
    for seed in range(1000):
        server.complete(prompt_of(10_000 + seed, 40))
        if has_heard():
            return
    pytest.fail("the subscription never arrived")


def prompt_of(seed: int, length: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(1000) for _ in range(length)]


def test_the_index_foretells_every_hit(
    server: EventServer, subscriber: Subscriber, indexer: Indexer
) -> None:
    """Resends, branches, evictions: what a router expects is what ``cached_tokens`` says."""
    # An index of another make begins with an empty cache: it keeps no record of its own.
    assert server.post("/reset_prefix_cache", {}).status_code == 200
    drain(subscriber)
    indexer.read(subscriber.next_number)
    draw = random.Random(0)
    known = [prompt_of(seed, draw.randrange(40, 600)) for seed in range(3)]
    hits = 0
    removed = 0
    for seed in range(18):
        base = draw.choice(known)
        kept = draw.randrange(len(base) + 1) if seed % 3 else len(base)
        prompt = base[:kept] + prompt_of(seed, draw.randrange(1, 200) if seed % 3 else 0)
        expected = subscriber.index.foretell(prompt)
        indexer.read(subscriber.next_number)
        assert indexer.foretell(prompt) == expected, indexer.find_hits(prompt)
        assert server.complete(prompt, max_tokens=draw.randrange(1, 20)) == expected, seed
        hits += expected > 0
        removed += sum(e["type"] == "BlockRemoved" for e in drain(subscriber))
        known.append(prompt[:900])
    assert hits > 5
    assert removed > 0, "the pool was never under pressure"
    assert subscriber.num_gaps == 0


def test_a_late_subscriber_replays_to_the_same_index(
    server: EventServer, subscriber: Subscriber
) -> None:
    server.complete(prompt_of(100, 300))
    drain(subscriber)
    late = Subscriber(server.endpoint, server.replay_endpoint, "kv")
    try:
        assert late.next_number == subscriber.next_number > 0
        assert late.index.entries == subscriber.index.entries
        assert late.index.entries
    finally:
        late.close()


def test_batches_are_numbered_without_a_gap(server: EventServer) -> None:
    context = zmq.Context()
    events = context.socket(zmq.SUB)
    events.setsockopt(zmq.SUBSCRIBE, b"kv")
    events.connect(server.endpoint)
    wait_subscribed(server, lambda: bool(events.poll(50)))
    for seed in range(4):
        server.complete(prompt_of(200 + seed, 70))
    numbers = []
    while events.poll(500):
        topic, number, payload = events.recv_multipart()
        assert topic == b"kv"
        assert len(number) == 8
        numbers.append(int.from_bytes(number, "big"))
        timestamp, batch, rank = msgspec.msgpack.decode(payload)
        assert abs(timestamp - time.time()) < 60
        assert rank == 0
        assert batch
    events.close(linger=0)
    context.term()
    assert len(numbers) >= 4
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


def test_a_salt_travels_as_its_digest_only(server: EventServer) -> None:
    prompt = prompt_of(300, 200)
    assert server.complete(prompt, cache_salt=SALT) == 0
    late = Subscriber(server.endpoint, server.replay_endpoint, "kv")
    payloads = b"".join(payload for _, payload in late._replay(0))
    late.close()
    assert SALT.encode() not in payloads
    assert salt_digest(SALT).encode() in payloads
    # Who knows the salt can foretell the hit; nobody else can.
    expected = late.index.foretell(prompt, SALT)
    assert late.index.foretell(prompt) == 0
    assert server.complete(prompt, cache_salt=SALT) == expected == 192


def test_an_idle_reset_is_told_at_once(server: EventServer, subscriber: Subscriber) -> None:
    prompt = prompt_of(400, 100)
    server.complete(prompt)
    drain(subscriber)
    assert subscriber.index.foretell(prompt) == 96
    server.wait_idle()
    assert server.post("/reset_prefix_cache", None).json() == {"success": True}
    assert subscriber.receive(60.0) == [{"type": "AllBlocksCleared"}]
    assert subscriber.index.entries == Counter()
    assert server.complete(prompt) == subscriber.index.foretell(prompt) == 0


def test_a_gap_without_replay_clears_the_view() -> None:
    def stored(number: int) -> bytes:
        event = {
            "type": "BlockStored",
            "block_hashes": [number],
            "parent_block_hash": None,
            "token_ids": [1, 2],
            "block_size": 2,
            "group_idx": 0,
        }
        return msgspec.msgpack.encode([0.0, [event], 0])

    subscriber = Subscriber("inproc://nowhere")
    try:
        subscriber._take(0, stored(7))
        subscriber._take(5, stored(8))
        assert dict(subscriber.index.entries) == {(0, 8): 1}
        assert subscriber.next_number == 6
    finally:
        subscriber.close()


def test_copies_of_a_prefix_are_counted() -> None:
    """A multiset: one copy leaving does not take the other's tokens along."""
    index = PrefixIndex()
    stored = {
        "type": "BlockStored",
        "block_hashes": [7, 8],
        "parent_block_hash": None,
        "token_ids": [1, 2, 3, 4],
        "block_size": 2,
        "group_idx": 0,
    }
    index.apply(stored)
    index.apply({**stored, "token_ids": []})
    index.apply({"type": "BlockRemoved", "block_hashes": [8], "group_idx": 0})
    assert index.foretell([1, 2, 3, 4, 5]) == 4
    index.apply({"type": "BlockRemoved", "block_hashes": [8], "group_idx": 0})
    assert index.foretell([1, 2, 3, 4, 5]) == 2
    assert index.foretell([1, 2]) == 0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ('{"enable_kv_cache_events": true, "endpoint": "tcp://*"}', "lacks a host or a port"),
        ("[1]", "must be a JSON object"),
    ],
)
def test_bad_configurations_end_the_command(config: str, message: str) -> None:
    command = [sys.executable, "-m", "vllm", "serve", "--kv-events-config", config]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert message in done.stderr + done.stdout
    assert "Traceback" not in done.stderr


def test_a_taken_address_is_told_before_weights_load(server: EventServer, tmp_path: Path) -> None:
    taken = {"enable_kv_cache_events": True, "endpoint": server.endpoint.replace("127.0.0.1", "*")}
    second = ServerProcess(
        tmp_path / "log.txt", "--kv-events-config", msgspec.json.encode(taken).decode()
    )
    try:
        assert second.process.wait(60) == 2
    finally:
        second.stop()
    assert "cannot be opened" in second.log
    assert "Address already in use" in second.log
    assert "Traceback" not in second.log
    assert "worker 0" in server.log
    assert "worker 0" not in second.log


def test_shutdown_publishes_what_is_queued(tmp_path: Path) -> None:
    with EventServer(tmp_path / "log.txt") as server:
        subscriber = Subscriber(server.endpoint, server.replay_endpoint, "kv")
        wait_subscribed(server, lambda: bool(subscriber.receive(0.05)))
        server.complete(prompt_of(1, 100))
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        assert drain(subscriber)
        subscriber.close()
        with pytest.raises(httpx.ConnectError):
            server.get("/health")
