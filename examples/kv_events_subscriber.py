"""Follow a server's prefix cache from outside, as a router does. Start the server with events on:

    vllm serve deepseek-v4 --kv-events-config '{"enable_kv_cache_events": true,
        "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}'
    python examples/kv_events_subscriber.py tcp://localhost:5557 tcp://localhost:5558

``PrefixIndex`` rebuilds what the cache holds and foretells the hit of a prompt; ``Subscriber``
feeds it, asks for what it missed, and begins anew where that is gone.
"""

import argparse
import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import zmq

END_OF_REPLAY = -1
_SEQ_BYTES = 8
_REPLAY_TIMEOUT_MS = 5_000

# Of groups that keep a tail of a prompt, not all of it.
_WINDOW_KINDS = ("sliding_window", "sliding_window_mla", "mamba", "chunked_local_attention")

Hash = int | bytes


class PrefixIndex:
    """The prefixes one engine can reuse, group by group.

    A *dense* group keeps a hash for every ``block_size`` tokens of a prompt. A *window* group
    (``block_size`` 0) keeps a hash for every place where a prompt can be resumed. A prompt is hit
    up to the deepest such place below which every dense group has all it needs. Where there is no
    dense group, a window group says which tokens lead from one such place to the next.
    """

    def __init__(self) -> None:
        self.entries: Counter[tuple[int, Hash]] = Counter()
        self._windows: set[int] = set()
        self._steps: dict[int, int] = {}
        # By dense group: (hash before, salt, tokens) -> hash, and back.
        self._next: dict[int, dict[tuple[Any, ...], Hash]] = defaultdict(dict)
        self._links: dict[tuple[int, Hash], tuple[Any, ...]] = {}
        # Without dense groups: hash -> (hash before, salt, tokens), known as long as one behind it
        # is cached, and the hashes behind each.
        self._spans: dict[Hash, tuple[Hash | None, tuple[Any, ...], tuple[int, ...]]] = {}
        self._behind: dict[Hash | None, set[Hash]] = defaultdict(set)

    def apply(self, event: dict[str, Any]) -> None:
        """Take in one event, as msgpack gives it."""
        if event["type"] == "AllBlocksCleared":
            self.clear()
        elif event["type"] == "BlockRemoved":
            for block_hash in event["block_hashes"]:
                self._remove(event.get("group_idx", 0), block_hash)
        elif event["type"] == "BlockStored":
            self._store(event)

    def clear(self) -> None:
        """Forget everything but how the groups are cut."""
        self.entries.clear()
        self._next.clear()
        self._links.clear()
        self._spans.clear()
        self._behind.clear()

    def _store(self, event: dict[str, Any]) -> None:
        group, step = event.get("group_idx", 0), event["block_size"]
        if step and event.get("kv_cache_spec_kind") in _WINDOW_KINDS:
            self._windows.add(group)
            self._store_span(group, event)
            return
        if step == 0:
            self._windows.add(group)
        else:
            self._steps[group] = step
        parent = event["parent_block_hash"]
        keys = event.get("extra_keys") or [None] * len(event["block_hashes"])
        for i, block_hash in enumerate(event["block_hashes"]):
            self.entries[group, block_hash] += 1
            tokens = tuple(event["token_ids"][i * step : (i + 1) * step])
            if tokens:
                link = (parent, tuple(keys[i] or ()), tokens)
                self._next[group][link] = block_hash
                self._links[group, block_hash] = link
            parent = block_hash

    def _store_span(self, group: int, event: dict[str, Any]) -> None:
        (block_hash,), parent = event["block_hashes"], event["parent_block_hash"]
        self.entries[group, block_hash] += 1
        if block_hash not in self._spans:
            (key,) = event.get("extra_keys") or [None]
            self._spans[block_hash] = parent, tuple(key or ()), tuple(event["token_ids"])
            self._behind[parent].add(block_hash)

    def _is_cached(self, block_hash: Hash) -> bool:
        return any((group, block_hash) in self.entries for group in self._windows)

    def _forget_spans(self, block_hash: Hash | None) -> None:
        """Forget a place that is gone and leads nowhere, and those that led to it alone."""
        while block_hash in self._spans and not self._behind.get(block_hash):
            if self._is_cached(block_hash):
                return
            parent, _, _ = self._spans.pop(block_hash)
            self._behind.pop(block_hash, None)
            self._behind[parent].discard(block_hash)
            block_hash = parent

    def _remove(self, group: int, block_hash: Hash) -> None:
        self.entries[group, block_hash] -= 1
        if self.entries[group, block_hash] <= 0:
            if block_hash in self._spans:
                del self.entries[group, block_hash]
                self._forget_spans(block_hash)
                return
            # Another copy of the same prefix may be left: only the last one takes its tokens along.
            del self.entries[group, block_hash]
            self._next[group].pop(self._links.pop((group, block_hash), ()), None)

    def foretell(self, token_ids: Sequence[int], cache_salt: str | None = None) -> int:
        """Return how many tokens of a prompt the engine would read from its cache now."""
        if not self._steps:
            return self._foretell_by_spans(token_ids, cache_salt)
        unit = min(self._steps.values())
        hashes = self._known_hashes(token_ids, cache_salt, unit)
        # The last token is always computed.
        for i in range(min(len(hashes), (len(token_ids) - 1) // unit) - 1, -1, -1):
            if not self._windows or any((w, hashes[i]) in self.entries for w in self._windows):
                return (i + 1) * unit
        return 0

    def _foretell_by_spans(self, token_ids: Sequence[int], cache_salt: str | None) -> int:
        deepest = 0
        salt = (salt_digest(cache_salt),) if cache_salt else ()
        todo: list[tuple[Hash | None, int]] = [(None, 0)]
        while todo:
            before, at = todo.pop()
            for block_hash in self._behind.get(before, ()):
                _, key, tokens = self._spans[block_hash]
                end = at + len(tokens)
                # The last token is always computed.
                if end >= len(token_ids) or tuple(token_ids[at:end]) != tokens:
                    continue
                if key != (salt if at == 0 else ()):
                    continue
                todo.append((block_hash, end))
                if self._is_cached(block_hash):
                    deepest = max(deepest, end)
        return deepest

    def _known_hashes(
        self, token_ids: Sequence[int], cache_salt: str | None, unit: int
    ) -> list[Hash]:
        """Return the hashes of a prompt's units, as far as every dense group has them."""
        finest = min(self._steps, key=self._steps.__getitem__)
        parent: Hash | None = None
        hashes: list[Hash] = []
        for start in range(0, len(token_ids) - unit + 1, unit):
            salt = (salt_digest(cache_salt),) if cache_salt and start == 0 else ()
            parent = self._next[finest].get((parent, salt, tuple(token_ids[start : start + unit])))
            if parent is None:
                break
            hashes.append(parent)
        for group, step in self._steps.items():
            for i in range(step // unit - 1, len(hashes), step // unit):
                if (group, hashes[i]) not in self.entries:
                    del hashes[i:]
                    break
        return hashes


def salt_digest(salt: str) -> str:
    """Return how events name a cache salt, which they never carry in clear."""
    return f"salt-sha256:{hashlib.sha256(salt.encode()).hexdigest()[:32]}"


class Subscriber:
    """Keeps a PrefixIndex true to an engine.

    Args:
        endpoint: Where the engine publishes.
        replay_endpoint: Where it answers replay requests; None: what was missed stays unknown.
        topic: What to subscribe to.
    """

    def __init__(self, endpoint: str, replay_endpoint: str | None = None, topic: str = "") -> None:
        self.index = PrefixIndex()
        self.next_number = 0
        self.num_gaps = 0
        self._context = zmq.Context()
        self._events = self._context.socket(zmq.SUB)
        self._events.setsockopt_string(zmq.SUBSCRIBE, topic)
        self._events.connect(endpoint)
        self._replay_endpoint = replay_endpoint
        # Batches published before we came; what follows now is already on its way to us.
        self._catch_up()

    def receive(self, timeout_s: float) -> list[dict[str, Any]]:
        """Return what happened next, already in the index; nothing if nothing came in time."""
        if not self._events.poll(int(timeout_s * 1000)):
            return []
        _topic, number, payload = self._events.recv_multipart()
        sequence = int.from_bytes(number, "big")
        missed: list[dict[str, Any]] = []
        if sequence > self.next_number:
            self.num_gaps += 1
            missed = self._catch_up()
        if sequence < self.next_number:
            return missed  # replayed already
        return missed + self._take(sequence, payload)

    def _take(self, sequence: int, payload: bytes) -> list[dict[str, Any]]:
        if sequence > self.next_number:
            # Something is lost for good. What we believe may be gone; what is new we will learn.
            self.index.clear()
        _timestamp, events, _rank = msgspec.msgpack.decode(payload)
        for event in events:
            self.index.apply(event)
        self.next_number = sequence + 1
        return list(events)

    def _catch_up(self) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        for sequence, payload in self._replay(self.next_number):
            events += self._take(sequence, payload)
        return events

    def _replay(self, first: int) -> Iterator[tuple[int, bytes]]:
        """Yield the batches from ``first`` on that the engine still keeps."""
        if self._replay_endpoint is None:
            return
        # A DEALER, not a REQ: one request has many replies.
        socket = self._context.socket(zmq.DEALER)
        try:
            socket.connect(self._replay_endpoint)
            socket.send_multipart([b"", first.to_bytes(_SEQ_BYTES, "big")])
            while socket.poll(_REPLAY_TIMEOUT_MS):
                _delimiter, number, payload = socket.recv_multipart()
                sequence = int.from_bytes(number, "big", signed=True)
                if sequence == END_OF_REPLAY:
                    return
                yield sequence, payload
        finally:
            socket.close(linger=0)

    def close(self) -> None:
        """Leave."""
        self._events.close(linger=0)
        self._context.term()


def main() -> None:
    """Print what happens until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("endpoint", nargs="?", default="tcp://localhost:5557")
    parser.add_argument("replay_endpoint", nargs="?")
    parser.add_argument("--topic", default="")
    args = parser.parse_args()
    subscriber = Subscriber(args.endpoint, args.replay_endpoint, args.topic)
    print(f"{len(subscriber.index.entries)} entries replayed; waiting for events")
    try:
        while True:
            for event in subscriber.receive(timeout_s=1.0):
                hashes = event.get("block_hashes", [])
                group, entries = event.get("group_idx"), len(subscriber.index.entries)
                print(f"{event['type']:16} group {group} {len(hashes):5} hashes -> {entries}")
    except KeyboardInterrupt:
        subscriber.close()


if __name__ == "__main__":
    main()
