"""Requests that leave nothing among others, and a search for what they might have left.

    python -m tests.e2e.private_traffic --requests 500

So many private requests and as many public ones, side by side on one server with all tiers, a trace
and KV events; they end in every way there is. Then nothing of the private ones may be hit, in the
server's life or after a restart, and none of their own hashes stand in the folder's index, in the
events or in the trace.
"""

import argparse
import json
import os
import random
import tempfile
import threading
from base64 import b64decode, b64encode
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import httpx
import msgspec
import zmq

from tests.e2e.server_process import NO_TLS, ServerProcess
from tests.ports import free_ports
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

UNIT = 32
_ALGORITHM = "sha256"
_SEED = "7"
_NUM_CLIENTS = 6
_POOL_BYTES = 5 << 20
_MTP = json.dumps({"method": "mtp", "num_speculative_tokens": 2})


@dataclass(slots=True)
class Sent:
    """A request, and what came of it.

    Attributes:
        prompt: Token ids.
        is_private: Whether it is to leave nothing.
        ends: How it ends.
        answers: Tokens of its answers, as far as they came.
        num_cached: Its hit; None: it was not told.
    """

    prompt: list[int]
    is_private: bool
    ends: str
    answers: list[list[int]] = field(default_factory=list)
    num_cached: int | None = None


ENDS: dict[str, dict[str, Any]] = {
    "length": {},
    "stop": {"stop_token_ids": list(range(10, 400)), "ignore_eos": False},
    "stop string": {"stop": ["e", "a"]},
    "two answers": {"n": 2, "temperature": 0.8},
    "prompt scores": {"prompt_logprobs": 1},
    "long": {"max_tokens": 90},
    "leaves early": {"max_tokens": 200},
    "leaves late": {"max_tokens": 400},
}


class Events:
    """Hears of every hash that a server announces.

    Owns: the hashes, and the thread that reads.
    """

    def __init__(self, endpoint: str) -> None:
        self.hashes: set[bytes] = set()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(endpoint)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._is_over.set()
        self._thread.join()
        self._socket.close(0)
        self._context.term()

    def _read(self) -> None:
        while self._socket.poll(200) or not self._is_over.is_set():
            if not self._socket.poll(0):
                continue
            _, events, _ = msgspec.msgpack.decode(self._socket.recv_multipart()[-1])
            for event in events:
                self.hashes.update(event.get("block_hashes", ()))
                if event.get("parent_block_hash") is not None:
                    self.hashes.add(event["parent_block_hash"])


class Traffic:
    """Prompts that go on from one another, and how they end."""

    def __init__(self, seed: int, num_each: int) -> None:
        rng = random.Random(seed)
        self.requests: list[Sent] = []
        private = [True] * num_each + [False] * num_each
        rng.shuffle(private)
        prompts: list[list[int]] = []
        for is_private in private:
            base = rng.choice(prompts[-8:])[: rng.randrange(700)] if prompts else []
            own = [rng.randrange(10, 2000) for _ in range(rng.choice((5, 70, 300)))]
            prompts.append([*base, *own][:900])
            self.requests.append(Sent(prompts[-1], is_private, rng.choice([*ENDS])))

    def send_all(self, url: str) -> None:
        """Send them, several at a time."""
        with (
            httpx.Client(base_url=url, timeout=300, verify=NO_TLS) as client,
            ThreadPoolExecutor(_NUM_CLIENTS) as pool,
        ):
            for done in pool.map(lambda sent: self._send(client, sent), self.requests):
                assert done is None

    @staticmethod
    def _send(client: httpx.Client, sent: Sent) -> None:
        body = {"prompt": sent.prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
        body |= {"return_token_ids": True, **ENDS[sent.ends]}
        headers = {}
        if sent.is_private and len(sent.prompt) % 2:
            headers["Cache-Control"] = "no-store"
        elif sent.is_private:
            body["skip_cache_insert"] = True
        if not sent.ends.startswith("leaves"):
            reply = client.post("/v1/completions", json=body, headers=headers)
            assert reply.status_code == 200, reply.text
            told = reply.json()
            sent.answers = [choice["token_ids"] for choice in told["choices"]]
            sent.num_cached = told["usage"]["prompt_tokens_details"]["cached_tokens"]
            return
        num_wanted = 1 if sent.ends == "leaves early" else 12
        sent.answers = [[]]
        body["stream"] = True
        with client.stream("POST", "/v1/completions", json=body, headers=headers) as reply:
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    sent.answers[0] += json.loads(line[6:])["choices"][0]["token_ids"] or []
                if len(sent.answers[0]) >= num_wanted:
                    return


def hashes_of(token_ids: Sequence[int]) -> list[bytes]:
    """Return the chained hashes of whole units, as a server with the same seed has them."""
    hasher = get_request_block_hasher(UNIT, get_hash_fn_by_name(_ALGORITHM))
    request = Request("r", list(token_ids), SamplingParams(max_tokens=1), block_hasher=hasher)
    return [bytes(one) for one in request.block_hashes]


def own_hashes(requests: Sequence[Sent], *, private: bool) -> set[bytes]:
    """Return all hashes of the private, or of the public requests and their answers."""
    return {
        one
        for sent in requests
        if sent.is_private is private
        for answer in sent.answers or [[]]
        for one in hashes_of([*sent.prompt, *answer])
    }


def trace_hashes(folder: Path) -> Iterator[bytes]:
    """Yield every hash of a trace, cut as it cuts them."""
    for path in folder.glob("trace*"):
        for line in path.read_text().splitlines()[1:]:
            yield from _hashes_in(json.loads(line))


def _hashes_in(value: Any) -> Iterator[bytes]:
    """Yield what may be hashes: texts of base64 whose bytes are whole hashes of 16."""
    if isinstance(value, list):
        for one in value:
            yield from _hashes_in(one)
    elif isinstance(value, dict):
        yield from _hashes_in([*value, *value.values()])
    elif isinstance(value, str) and len(value) >= 22:
        try:
            decoded = b64decode(value, validate=True)
        except ValueError:
            return
        for at in range(0, len(decoded) // 16 * 16, 16):
            yield decoded[at : at + 16]


def find_in_folder(folder: Path, digests: Sequence[bytes]) -> list[bytes]:
    """Return which digests stand in a folder's indexes and small files; rows hold no names."""
    texts = [p.read_bytes() for p in folder.rglob("*") if p.is_file() and "rows." not in p.name]
    content = b"\n".join(texts)
    spelled = {d: (d[:16], d[:16].hex().encode(), b64encode(d[:16])) for d in digests}
    return [digest for digest, forms in spelled.items() if any(f in content for f in forms)]


def check_hits(url: str, known: list[list[int]], asked: Sequence[Sent]) -> int:
    """Send private prompts as public ones; they may hit what public ones share, no more.

    Returns:
        How many tokens were hit.
    """
    num_hit = 0
    with httpx.Client(base_url=url, timeout=300, verify=NO_TLS) as client:
        for sent in asked:
            body = {"prompt": sent.prompt, "max_tokens": 1, "temperature": 0}
            told = client.post("/v1/completions", json=body).json()
            hit = told["usage"]["prompt_tokens_details"]["cached_tokens"]
            shared = max((_num_shared(sent.prompt, other) for other in known), default=0)
            assert hit <= shared, f"{hit} of {len(sent.prompt)} hit, {shared} may be"
            num_hit += hit
            known.append(sent.prompt)
    return num_hit


def _num_shared(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def run(folder: Path, num_each: int, *, seed: int = 1, num_asked: int = 40) -> dict[str, int]:
    """Serve the traffic, search, restart and search again; return what was looked at."""
    os.environ["PYTHONHASHSEED"] = _SEED
    init_none_hash(get_hash_fn_by_name(_ALGORITHM))
    port = free_ports()
    flags = ["--prefix-cache-dir", str(folder / "cache"), "--prefix-cache-disk-size", "64MiB"]
    flags += ["--kv-offloading-size", "0.004", "--kv-cache-memory-bytes", str(_POOL_BYTES)]
    flags += ["--max-model-len", "1536", "--max-num-batched-tokens", "256"]
    flags += ["--speculative-config", _MTP, "--prefix-caching-hash-algo", _ALGORITHM]
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{port}"}
    events_flag = ("--kv-events-config", json.dumps(events))
    trace = ("--cache-trace", str(folder / "trace.jsonl"))
    environment = {"PYTHONHASHSEED": _SEED, "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0"}
    environment |= {"VLLM_SCRUB_UNCACHED": "1"}
    traffic = Traffic(seed, num_each)
    with (
        Events(f"tcp://127.0.0.1:{port}") as heard,
        ServerProcess(
            folder / "one.txt", *flags, *events_flag, *trace, environment=environment
        ) as server,
    ):
        traffic.send_all(server.url)
        server.wait_idle()
        num_preempted = server.metric("vllm:num_preemptions_total")
    public = own_hashes(traffic.requests, private=False)
    private = own_hashes(traffic.requests, private=True) - public
    recorded, kept = set(trace_hashes(folder)), sorted(private)
    # What is looked for in the right form is found of the others.
    assert len(public & heard.hashes) > len(public) // 4
    assert len({one[:16] for one in public} & recorded) > len(public) // 2
    assert find_in_folder(folder / "cache", sorted(public)[:2_000])
    assert not private & heard.hashes, "KV events name hashes of private requests"
    assert not {one[:16] for one in private} & recorded, "the trace has them"
    assert not find_in_folder(folder / "cache", kept), "the folder has them"
    known = [
        [*sent.prompt, *answer]
        for sent in traffic.requests
        if not sent.is_private
        for answer in sent.answers or [[]]
    ]
    rng = random.Random(seed)
    secret = [sent for sent in traffic.requests if sent.is_private]
    asked = rng.sample(secret, min(num_asked, len(secret)))
    with ServerProcess(folder / "two.txt", *flags, environment=environment) as server:
        num_hit = check_hits(server.url, known, asked)
        log = server.log
    assert "Traceback" not in (folder / "one.txt").read_text() + log
    return {
        "private_requests": len(secret),
        "private_hashes": len(private),
        "public_hashes": len(public),
        "preempted": int(num_preempted),
        "asked_after_restart": len(asked),
        "tokens_hit_that_others_share": num_hit,
    }


def main() -> None:
    """Run it, and print one JSON line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=500, help="Of each kind.")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        print(json.dumps(run(Path(name), args.requests, seed=args.seed)))


if __name__ == "__main__":
    main()
