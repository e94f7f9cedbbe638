"""A router's index as people build them elsewhere, written from the published layout of KV events.

Such an index names blocks itself, by chained hashes of tokens that it computes of each prompt, and
learns from events which names an engine's own hashes stand for. It shares no code with ours.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq

_START = b""


def name_blocks(token_ids: Sequence[int], size: int, parent: bytes = _START) -> list[bytes]:
    """Return the names of a prompt's whole blocks, each of all tokens up to its end."""
    names = []
    for start in range(0, len(token_ids) - size + 1, size):
        text = ",".join(map(str, token_ids[start : start + size])).encode()
        parent = hashlib.sha256(parent + b"|" + text).digest()
        names.append(parent)
    return names


class Indexer:
    """Follows one engine by group.

    Args:
        endpoint: Where it publishes.
        topic: What to subscribe to.
    """

    def __init__(self, endpoint: str, topic: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt_string(zmq.SUBSCRIBE, topic)
        self._socket.connect(endpoint)
        self._topic = topic
        self.next_number: int | None = None
        # By group: tokens of a block, and how many blocks have an engine's hash.
        self.sizes: dict[int, int] = {}
        self.held: dict[int, Counter[Any]] = defaultdict(Counter)
        # Of dense groups: an engine's hash -> our name, and back.
        self._names: dict[int, dict[Any, bytes]] = defaultdict(dict)

    def close(self) -> None:
        """Stop."""
        self._socket.close(0)
        self._context.term()

    def hears(self) -> bool:
        """Whether something comes: a subscription travels by itself."""
        return bool(self._socket.poll(100))

    def read(self, until: int) -> None:
        """Take in what is published, up to the batch before a number."""
        while self.next_number is None or self.next_number < until:
            assert self._socket.poll(30_000), f"batch {self.next_number} did not come"
            topic, number, payload = self._socket.recv_multipart()
            assert topic == self._topic.encode()
            sequence = int.from_bytes(number, "big")
            assert self.next_number in (None, sequence)
            self.next_number = sequence + 1
            _timestamp, events, rank = msgspec.msgpack.decode(payload)
            assert rank == 0
            for event in events:
                self._take(event)

    def _take(self, event: dict[str, Any]) -> None:
        kind = event["type"]
        if kind == "AllBlocksCleared":
            self.held.clear()
            self._names.clear()
            return
        group, hashes = event.get("group_idx", 0), event["block_hashes"]
        held = self.held[group]
        if kind == "BlockRemoved":
            held.subtract(hashes)
            self.held[group] = +held
            return
        assert kind == "BlockStored"
        self.sizes[group] = size = event["block_size"]
        held.update(hashes)
        if size:
            parent = event.get("parent_block_hash")
            names = self._names[group]
            above = _START if parent is None else names.get(parent)
            if above is None:
                return  # it goes on from what was stored before anybody listened
            names.update(zip(hashes, name_blocks(event["token_ids"], size, above), strict=True))

    def find_hits(self, prompt: Sequence[int]) -> dict[int, list[int]]:
        """Return, by group, where its rows are cached: of dense groups how far, of others where."""
        hits: dict[int, list[int]] = {}
        boundaries: dict[Any, int] = {}
        for group, size in self.sizes.items():
            if not size:
                continue
            known = {name: block_hash for block_hash, name in self._names[group].items()}
            hashes = [known.get(name) for name in name_blocks(prompt, size)]
            boundaries |= {h: (i + 1) * size for i, h in enumerate(hashes) if h is not None}
            cached = [h is not None and self.held[group][h] > 0 for h in hashes]
            hits[group] = [size * [*cached, False].index(False)]
        for group, size in self.sizes.items():
            if not size:
                hits[group] = sorted(boundaries[h] for h in self.held[group] if h in boundaries)
        return hits

    def foretell(self, prompt: Sequence[int]) -> int:
        """Return the tokens of a prompt that need not be computed."""
        hits = self.find_hits(prompt)
        last = len(prompt) - 1
        ends = [end for g, size in self.sizes.items() if not size for end in hits[g] if end <= last]
        # A coarse group ends where it must: what lies behind its last whole block is not in it.
        return max((end for end in ends if self._reaches(hits, end)), default=0)

    def _reaches(self, hits: dict[int, list[int]], end: int) -> bool:
        return all(hits[g][0] >= end // size * size for g, size in self.sizes.items() if size)
