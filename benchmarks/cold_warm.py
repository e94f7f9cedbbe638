"""Cold = warm: the same prompt with and without a hit, over every source of one, to the bit.

    python -m benchmarks.cold_warm [--seconds 600] [--pairs 100000] [--sources pool,disk,...]

Each pair asks one prompt of an engine that caches nothing, alone, and of one where its beginning
lies somewhere: in the pool, behind a junction, where windows are rebuilt, on the disk after a
restart, in host memory, in another engine (PD), under preemption, beside batch mates, with and
without MTP. Token ids and log probabilities are compared with ==, which native CPU kernels allow.
Prints, by source, pairs, hit tokens and differing pairs; exits with 1 if one differs.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from vllm.sampling_params import SamplingParams
from vllm.v1.engine.client import InlineCore
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.engine_args import EngineArgs
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor.uniproc_executor import UniProcExecutor

_MAX_TOKENS = 6
_MAX_LEN = 1024
_ROOMY, _TIGHT = 48 << 20, 8 << 20
_MTP = {"method": "mtp", "num_speculative_tokens": 2}


@dataclass(frozen=True, slots=True)
class Told:
    """An answer: its ids, their log probabilities, and how many tokens of the prompt were hit."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached: int

    def says_the_same(self, other: Told) -> bool:
        """Whether ids and log probabilities are equal to the bit."""
        return self.ids == other.ids and self.logprobs == other.logprobs


class Asker:
    """An engine in this process."""

    def __init__(self, **arguments: Any) -> None:
        arguments = {"kv_cache_memory_bytes": _ROOMY, **arguments}
        config = EngineArgs(
            block_size=32, max_model_len=_MAX_LEN, max_num_batched_tokens=256, **arguments
        ).create_vllm_config()
        self.core = EngineCore(config, UniProcExecutor)
        self.engine = LLMEngine(config, InlineCore(lambda: self.core))
        self._count = 0

    def add(self, prompt: list[int], transfer: dict[str, Any] | None = None) -> str:
        """Ask, without waiting."""
        self._count += 1
        extra = None if transfer is None else {"kv_transfer_params": transfer}
        params = SamplingParams(
            temperature=0.0, max_tokens=_MAX_TOKENS, ignore_eos=True, logprobs=1, extra_args=extra
        )
        self.engine.add_request(str(self._count), {"prompt_token_ids": prompt}, params)
        return str(self._count)

    def ask(self, prompts: Sequence[list[int]]) -> list[Told]:
        """Ask all at once."""
        ids = [self.add(prompt) for prompt in prompts]
        done = {}
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                if output.finished:
                    done[output.request_id] = output
        told = []
        for request_id in ids:
            answer = done[request_id].outputs[0]
            chosen = zip(answer.token_ids, answer.logprobs or (), strict=True)
            told.append(
                Told(
                    tuple(answer.token_ids),
                    tuple(entry[token].logprob for token, entry in chosen),
                    done[request_id].num_cached_tokens or 0,
                )
            )
        # What is on its way to a tier arrives; a server goes on stepping by itself.
        while self.core.has_work():
            self.core.step()
        return told

    def close(self) -> None:
        """End the engine."""
        self.engine.shutdown()


@contextmanager
def asking(**arguments: Any) -> Iterator[Asker]:
    """Run an engine for a while."""
    asker = Asker(**arguments)
    try:
        yield asker
    finally:
        asker.close()


Pairs = Iterator[tuple[list[int], Told]]


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(10, 2000) for _ in range(count)]


def _some(rng: random.Random, count: int) -> list[list[int]]:
    return [_tokens(rng, rng.randrange(33, 700)) for _ in range(count)]


def _tier(folder: Path, **more: Any) -> dict[str, Any]:
    tiers = [{"type": "fs", "root_dir": str(folder / "cache"), "max_size": "256MiB"}]
    extra = {"secondary_tiers": tiers, "always_restore": True, "warm": 0, **more}
    raw = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    return {"kv_transfer_config": {**raw, "kv_connector_extra_config": extra}}


def from_pool(rng: random.Random, folder: Path, **arguments: Any) -> Pairs:
    """The same prompts again, and as beginnings of longer ones."""
    with asking(**arguments) as asker:
        prompts = _some(rng, 6)
        asker.ask(prompts)
        for prompt in prompts:
            again = [prompt, prompt + _tokens(rng, rng.randrange(1, 200))]
            yield from zip(again, (asker.ask([p])[0] for p in again), strict=True)


def from_junction(rng: random.Random, folder: Path, **arguments: Any) -> Pairs:
    """Prompts that part somewhere."""
    with asking(**arguments) as asker:
        head = _tokens(rng, 600)
        prompts = [
            head[: rng.randrange(50, 600)] + _tokens(rng, rng.randrange(1, 150)) for _ in range(12)
        ]
        for prompt in prompts:
            yield prompt, asker.ask([prompt])[0]


def from_rebuild(rng: random.Random, folder: Path, **arguments: Any) -> Pairs:
    """A pool so small that windows go before dense rows, and come back by being computed."""
    yield from from_junction(rng, folder, kv_cache_memory_bytes=_TIGHT, **arguments)


def from_disk(rng: random.Random, folder: Path, **arguments: Any) -> Pairs:
    """After a restart."""
    prompts = _some(rng, 8)
    with asking(**arguments, **_tier(folder)) as asker:
        asker.ask(prompts)
    with asking(**arguments, **_tier(folder)) as asker:
        _wait_open(asker)
        for prompt in prompts:
            longer = prompt + _tokens(rng, rng.randrange(1, 100))
            yield longer, asker.ask([longer])[0]
            yield prompt, asker.ask([prompt])[0]


def _wait_open(asker: Asker) -> None:
    keeper = asker.core.scheduler.connector._tier.keeper
    while keeper.is_opening:
        time.sleep(0.001)


def from_host(rng: random.Random, folder: Path, **arguments: Any) -> Pairs:
    """Out of host memory, after the pool forgot."""
    extra = {"cpu_bytes_to_use": "128MiB", "always_restore": True}
    raw = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    transfer = {**raw, "kv_connector_extra_config": extra}
    with asking(kv_transfer_config=transfer, **arguments) as asker:
        prompts = _some(rng, 8)
        asker.ask(prompts)
        asker.core.reset_prefix_cache()
        for prompt in prompts:
            yield prompt, asker.ask([prompt])[0]


def from_peer(rng: random.Random, folder: Path, **arguments: Any) -> Pairs:
    """Prefilled in another engine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def side(role: str) -> dict[str, Any]:
        raw = {"kv_connector": "TcpConnector", "kv_role": role, "kv_port": port}
        return {**arguments, "kv_transfer_config": raw}

    with asking(**side("kv_producer")) as giver, asking(**side("kv_consumer")) as taker:
        for prompt in _some(rng, 6):
            given = giver.add(prompt, {"do_remote_decode": True})
            transfer = None
            while giver.engine.has_unfinished_requests():
                for output in giver.engine.step():
                    if output.request_id == given and output.finished:
                        transfer = output.kv_transfer_params
            asked = taker.add(prompt, transfer)
            answer = None
            while answer is None:
                giver.core.step()
                for output in taker.engine.step():
                    if output.request_id == asked and output.finished:
                        answer = output
            out = answer.outputs[0]
            chosen = zip(out.token_ids, out.logprobs or (), strict=True)
            logprobs = tuple(entry[token].logprob for token, entry in chosen)
            yield prompt, Told(tuple(out.token_ids), logprobs, answer.num_cached_tokens or 0)


def from_mates(rng: random.Random, folder: Path, **arguments: Any) -> Pairs:
    """Many at once, again and again, in a pool that holds few: preempted, evicted, hit."""
    with asking(kv_cache_memory_bytes=_TIGHT, **arguments) as asker:
        base = _some(rng, 4)
        for _ in range(3):
            prompts = [
                rng.choice(base)[: rng.randrange(40, 700)] + _tokens(rng, rng.randrange(1, 40))
                for _ in range(8)
            ]
            yield from zip(prompts, asker.ask(prompts), strict=True)


SOURCES: dict[str, Callable[..., Pairs]] = {
    "pool": from_pool,
    "junction": from_junction,
    "rebuild": from_rebuild,
    "disk": from_disk,
    "host": from_host,
    "peer": from_peer,
    "mates": from_mates,
}


class Cold:
    """An engine that caches nothing, asked one prompt at a time."""

    def __init__(self) -> None:
        self._asker = Asker(enable_prefix_caching=False)
        self._known: dict[tuple[int, ...], Told] = {}

    def ask(self, prompt: list[int]) -> Told:
        """Return what is said without a cache."""
        key = tuple(prompt)
        if key not in self._known:
            self._known[key] = self._asker.ask([prompt])[0]
        return self._known[key]


def compare(
    names: Sequence[str], seconds: float, num_pairs: int, seed: int
) -> dict[str, Counter[str]]:
    """Ask pairs until the time or the number is over; counts by source."""
    cold, rng = Cold(), random.Random(seed)
    totals: dict[str, Counter[str]] = {}
    deadline = time.monotonic() + seconds
    bar = tqdm(total=num_pairs)
    while bar.n < num_pairs and time.monotonic() < deadline:
        for name in names:
            for mtp in (False, True):
                arguments = {"speculative_config": _MTP} if mtp else {}
                count = totals.setdefault(f"{name}{', MTP' * mtp}", Counter())
                with tempfile.TemporaryDirectory() as folder:
                    for prompt, told in SOURCES[name](rng, Path(folder), **arguments):
                        count["pairs"] += 1
                        count["hit_pairs"] += told.cached > 0
                        count["hit_tokens"] += told.cached
                        if not told.says_the_same(cold.ask(prompt)):
                            count["differing"] += 1
                            bar.write(f"{name}: {len(prompt)} tokens, {told} {cold.ask(prompt)}")
                        bar.update()
    bar.close()
    return totals


def main() -> int:
    """Compare, and print the counts; 1 if a pair differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--pairs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sources", default=",".join(SOURCES))
    arguments = parser.parse_args()
    names = arguments.sources.split(",")
    unknown = sorted(set(names) - set(SOURCES))
    if unknown:
        parser.error(f"--sources {unknown[0]!r}: use {', '.join(SOURCES)}")
    totals = compare(names, arguments.seconds, arguments.pairs, arguments.seed)
    print(json.dumps({name: dict(count) for name, count in totals.items()}))
    return 1 if any(count["differing"] for count in totals.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
