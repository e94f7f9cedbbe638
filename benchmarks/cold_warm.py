"""Cold = warm: the same prompt with and without a hit, over every source of one, to the bit.

    python -m benchmarks.cold_warm [--pairs 100000] [--seconds 600] [--sources pool,disk,...]
        [--results cold_warm.json]

A round makes prompts that share beginnings and asks each of an engine that caches nothing. Then
each source serves all of them, with MTP and without, from engines that live through many rounds:

    pool        again, beside batch mates         junction    one by one, parting where they part
    rebuild     from a pool too small for all     mates       the same, many at once
    disk        after the pool was emptied        restart     by the next engine over the folder
    host        after the pool was emptied        preempted   set back in mid answer, restored
    peer        prefilled in another engine       core        kept by another engine core that runs

A pair is one answer of a source and the cold one; token ids and log probabilities are compared with
==, which native CPU kernels allow. Some cold prompts are asked alone, too ("batch"). Whole rounds
are added up in the results file; the next run goes on behind them. Exits with 1 if a pair differs.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.result import describe_machine, find_commit
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.client import InlineCore
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.engine_args import EngineArgs
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor.uniproc_executor import UniProcExecutor

_MAX_TOKENS = 4
_MAX_LEN = 640
_ROOMY, _TIGHT = 48 << 20, 8 << 20
_MTP = {"method": "mtp", "num_speculative_tokens": 2}
_BATCH = 16
_NUM_HEADS = 6
_NUM_PROMPTS = 64
# Of each round's cold prompts, asked alone as well.
_NUM_ALONE = 4
# Steps after which running requests are set back.
_STEPS_BEFORE = 3


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
            block_size=32, max_model_len=_MAX_LEN, max_num_batched_tokens=512, **arguments
        ).create_vllm_config()
        self.core = EngineCore(config, UniProcExecutor)
        self.engine = LLMEngine(config, InlineCore(lambda: self.core))
        self._count = 0
        self._done: dict[str, Any] = {}

    def add(self, prompt: list[int], transfer: dict[str, Any] | None = None) -> str:
        """Ask, without waiting."""
        self._count += 1
        extra = None if transfer is None else {"kv_transfer_params": transfer}
        params = SamplingParams(
            temperature=0.0, max_tokens=_MAX_TOKENS, ignore_eos=True, logprobs=1, extra_args=extra
        )
        self.engine.add_request(str(self._count), {"prompt_token_ids": prompt}, params)
        return str(self._count)

    def step(self) -> None:
        """Take what a step brings."""
        for output in self.engine.step():
            if output.finished:
                self._done[output.request_id] = output

    def is_busy(self) -> bool:
        """Whether answers are missing."""
        return self.engine.has_unfinished_requests()

    def take(self, request_id: str) -> Any:
        """Return the whole output of an answered request, once."""
        return self._done.pop(request_id)

    def tell(self, request_id: str) -> Told:
        """Return the answer of an answered request, once."""
        output = self.take(request_id)
        answer = output.outputs[0]
        chosen = zip(answer.token_ids, answer.logprobs or (), strict=True)
        logprobs = tuple(entry[token].logprob for token, entry in chosen)
        return Told(tuple(answer.token_ids), logprobs, output.num_cached_tokens or 0)

    def ask(self, prompts: Sequence[list[int]], at_once: int = _BATCH) -> list[Told]:
        """Ask all, so many at a time."""
        told: list[Told] = []
        for some in _batches(prompts, at_once):
            ids = [self.add(prompt) for prompt in some]
            while self.is_busy():
                self.step()
            told += [self.tell(request_id) for request_id in ids]
        self.settle()
        return told

    def settle(self) -> None:
        """Let arrive what is on its way to a tier; a server goes on stepping by itself."""
        while self.core.has_work():
            self.core.step()

    def forget_pool(self) -> None:
        """Empty the pool, not the tiers."""
        assert self.core.reset_prefix_cache()

    def wait_open(self) -> None:
        """Wait until the folder is open."""
        keeper = self.core.scheduler.connector._tier.stores.keeper
        while keeper.is_opening:
            time.sleep(0.001)

    def close(self) -> None:
        """End the engine."""
        self.engine.shutdown()


Pairs = Iterator[tuple[list[int], Told]]


def _batches(prompts: Sequence[list[int]], size: int) -> Iterator[Sequence[list[int]]]:
    return (prompts[low : low + size] for low in range(0, len(prompts), size))


def _tier(folder: Path | None, *, host: bool = False, read_only: bool = False) -> dict[str, Any]:
    extra: dict[str, Any] = {"always_restore": True, "warm": 0}
    if folder is not None:
        tier = {"type": "fs", "root_dir": str(folder / "cache"), "max_size": "256MiB"}
        extra["secondary_tiers"] = [{**tier, "read_only": read_only}]
    if host:
        extra["cpu_bytes_to_use"] = "128MiB"
    raw = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    return {"kv_transfer_config": {**raw, "kv_connector_extra_config": extra}}


class Source(ABC):
    """Serves rounds of prompts whose beginnings lie somewhere.

    Owns: its engines, which live from round to round.

    Args:
        folder: Its own.
        arguments: Of all its engines.
    """

    def __init__(self, folder: Path, arguments: dict[str, Any]) -> None:
        self.folder = folder
        self.arguments = arguments
        self._askers: dict[str, Asker] = {}

    def asker(self, name: str = "", **more: Any) -> Asker:
        """Return an engine, made when it is first asked for."""
        if name not in self._askers:
            self._askers[name] = Asker(**{**self.arguments, **more})
        return self._askers[name]

    def drop(self, name: str = "") -> None:
        """End an engine."""
        if (asker := self._askers.pop(name, None)) is not None:
            asker.close()

    @abstractmethod
    def serve(self, prompts: Sequence[list[int]]) -> Pairs:
        """Yield prompts with their answers."""

    def close(self) -> None:
        """End all engines."""
        for name in list(self._askers):
            self.drop(name)


class FromPool(Source):
    """The same prompts again, beside batch mates."""

    def serve(self, prompts: Sequence[list[int]]) -> Pairs:
        """Ask twice."""
        for _ in range(2):
            yield from zip(prompts, self.asker().ask(prompts), strict=True)


class FromJunction(Source):
    """Prompts that part somewhere, one after the other."""

    def serve(self, prompts: Sequence[list[int]]) -> Pairs:
        """Ask one by one."""
        yield from zip(prompts, self.asker().ask(prompts, at_once=1), strict=True)


class FromRebuild(Source):
    """A pool so small that windows go before dense rows, and come back by being computed."""

    def serve(self, prompts: Sequence[list[int]]) -> Pairs:
        """Ask one by one."""
        asker = self.asker(kv_cache_memory_bytes=_TIGHT)
        yield from zip(prompts, asker.ask(prompts, at_once=1), strict=True)


class FromMates(Source):
    """Many at once in a pool that holds few: they wait, lose their blocks, and hit."""

    def serve(self, prompts: Sequence[list[int]]) -> Pairs:
        """Ask twice."""
        asker = self.asker(kv_cache_memory_bytes=_TIGHT)
        for _ in range(2):
            yield from zip(prompts, asker.ask(prompts, at_once=24), strict=True)


class FromDisk(Source):
    """Out of the folder, after the pool forgot."""

    def serve(self, prompts: Sequence[list[int]]) -> Pairs:
        """Ask, forget, ask again."""
        asker = self.asker(**_tier(self.folder))
        asker.wait_open()
        asker.ask(prompts)
        asker.forget_pool()
        yield from zip(prompts, asker.ask(prompts), strict=True)


class FromRestart(Source):
    """Out of the folder, in another process's place."""

    def serve(self, prompts: Sequence[list[int]]) -> Pairs:
        """Ask, begin a new engine, ask again."""
        asker = self.asker(**_tier(self.folder))
        asker.wait_open()
        asker.ask(prompts)
        self.drop()
        asker = self.asker(**_tier(self.folder))
        asker.wait_open()
        yield from zip(prompts, asker.ask(prompts), strict=True)


class FromHost(Source):
    """Out of host memory, after the pool forgot."""

    def serve(self, prompts: Sequence[list[int]]) -> Pairs:
        """Ask, forget, ask again."""
        asker = self.asker(**_tier(None, host=True))
        asker.ask(prompts)
        asker.forget_pool()
        yield from zip(prompts, asker.ask(prompts), strict=True)


class FromPreempted(Source):
    """Set back while they are answered, with an empty pool: host memory and the disk have it."""

    def serve(self, prompts: Sequence[list[int]]) -> Pairs:
        """Ask, and set all back after some steps."""
        asker = self.asker(**_tier(self.folder, host=True))
        asker.wait_open()
        for some in _batches(prompts, _BATCH):
            ids = [asker.add(prompt) for prompt in some]
            for _ in range(_STEPS_BEFORE):
                asker.step()
            asker.core.reset_prefix_cache(reset_running_requests=True)
            while asker.is_busy():
                asker.step()
            for prompt, request_id in zip(some, ids, strict=True):
                yield prompt, asker.tell(request_id)
        asker.settle()


class FromPeer(Source):
    """Prefilled in another engine."""

    def __init__(self, folder: Path, arguments: dict[str, Any]) -> None:
        super().__init__(folder, arguments)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]

    def _side(self, role: str) -> Asker:
        raw = {"kv_connector": "TcpConnector", "kv_role": role, "kv_port": self._port}
        return self.asker(role, kv_transfer_config=raw)

    def serve(self, prompts: Sequence[list[int]]) -> Pairs:
        """Ask one engine, hand over, ask the other."""
        giver, taker = self._side("kv_producer"), self._side("kv_consumer")
        for some in _batches(prompts, _BATCH):
            given = [giver.add(prompt, {"do_remote_decode": True}) for prompt in some]
            while giver.is_busy():
                giver.step()
            transfers = [giver.take(request_id).kv_transfer_params for request_id in given]
            asked = [taker.add(p, t) for p, t in zip(some, transfers, strict=True)]
            while taker.is_busy():
                giver.core.step()
                taker.step()
            yield from zip(some, map(taker.tell, asked), strict=True)


class FromCore(Source):
    """Kept by an engine core that still runs; another one reads its folder."""

    def serve(self, prompts: Sequence[list[int]]) -> Pairs:
        """Ask one core, then a new one beside it."""
        writer = self.asker("writer", **_tier(self.folder))
        writer.wait_open()
        writer.ask(prompts)
        self.drop("reader")
        reader = self.asker("reader", **_tier(self.folder, read_only=True))
        reader.wait_open()
        yield from zip(prompts, reader.ask(prompts), strict=True)


SOURCES: dict[str, type[Source]] = {
    "pool": FromPool,
    "junction": FromJunction,
    "rebuild": FromRebuild,
    "mates": FromMates,
    "disk": FromDisk,
    "restart": FromRestart,
    "host": FromHost,
    "preempted": FromPreempted,
    "peer": FromPeer,
    "core": FromCore,
}


def make_prompts(seed: int, number: int) -> list[list[int]]:
    """Return a round's prompts: beginnings of a few long ones, each with an end of its own."""
    rng = random.Random(f"{seed}-{number}")

    def draw(count: int) -> list[int]:
        return [rng.randrange(10, 2000) for _ in range(count)]

    heads = [draw(rng.randrange(150, 520)) for _ in range(_NUM_HEADS)]
    made = []
    for _ in range(_NUM_PROMPTS):
        head = rng.choice(heads)
        made.append(head[: rng.randrange(32, len(head) + 1)] + draw(rng.randrange(1, 90)))
    return made


class Totals:
    """What was compared so far, by source; kept in a file.

    Owns: the file.
    """

    def __init__(self, path: Path, seed: int) -> None:
        self._path = path
        self._raw: dict[str, Any] = {
            "benchmark": "cold_warm",
            "seed": seed,
            "hardware": describe_machine(),
            "commits": [],
            "num_rounds": 0,
            "sources": {},
        }
        if path.exists():
            self._raw = json.loads(path.read_text(encoding="utf-8"))
        commit = find_commit()
        if commit not in self._raw["commits"]:
            self._raw["commits"].append(commit)

    @property
    def num_rounds(self) -> int:
        """Rounds that were compared."""
        return int(self._raw["num_rounds"])

    @property
    def seed(self) -> int:
        """Of the prompts."""
        return int(self._raw["seed"])

    def count(self, name: str) -> int:
        """Return a sum over all sources."""
        return sum(counts.get(name, 0) for counts in self._raw["sources"].values())

    def add(self, counts: dict[str, Counter[str]]) -> None:
        """Add a round, and write it down."""
        self._raw["num_rounds"] += 1
        for source, found in counts.items():
            known = Counter(self._raw["sources"].get(source, {}))
            known.update(found)
            self._raw["sources"][source] = dict(known)
        total = {name: self.count(name) for name in ("pairs", "hit_pairs", "differing")}
        text = json.dumps({**self._raw, "total": total}, indent=1)
        fresh = self._path.with_suffix(".new")
        fresh.write_text(text + "\n", encoding="utf-8")
        fresh.replace(self._path)


class Harness:
    """All sources, and the engine that caches nothing.

    Owns: their engines.
    """

    def __init__(self, names: Sequence[str], folder: Path) -> None:
        self._cold = Asker(enable_prefix_caching=False)
        self._sources: dict[str, Source] = {}
        for name in names:
            for mtp in (False, True):
                own = folder / f"{name}-{mtp}"
                own.mkdir()
                arguments = {"speculative_config": _MTP} if mtp else {}
                self._sources[f"{name}{', MTP' * mtp}"] = SOURCES[name](own, arguments)

    def run_round(self, prompts: Sequence[list[int]]) -> dict[str, Counter[str]]:
        """Compare all sources; counts by source."""
        cold = self._cold.ask(prompts)
        wanted = {tuple(p): told for p, told in zip(prompts, cold, strict=True)}
        some = prompts[:_NUM_ALONE]
        alone = self._cold.ask(some, at_once=1)
        counts = {"batch": _compare(zip(some, alone, strict=True), wanted, "batch")}
        for name, source in self._sources.items():
            counts[name] = _compare(source.serve(prompts), wanted, name)
        return counts

    def close(self) -> None:
        """End all engines."""
        self._cold.close()
        for source in self._sources.values():
            source.close()


def _compare(pairs: Pairs, wanted: dict[tuple[int, ...], Told], name: str) -> Counter[str]:
    count: Counter[str] = Counter()
    for prompt, told in pairs:
        cold = wanted[tuple(prompt)]
        count["pairs"] += 1
        count["hit_pairs"] += told.cached > 0
        count["hit_tokens"] += told.cached
        if not told.says_the_same(cold):
            count["differing"] += 1
            print(f"{name}: {len(prompt)} tokens, warm {told}, cold {cold}", file=sys.stderr)
    return count


def main() -> int:
    """Compare, and print the totals; 1 if a pair differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--pairs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sources", default=",".join(SOURCES))
    parser.add_argument("--results", type=Path, default=Path("cold_warm.json"))
    arguments = parser.parse_args()
    names = arguments.sources.split(",")
    unknown = sorted(set(names) - set(SOURCES))
    if unknown:
        parser.error(f"--sources {unknown[0]!r}: use {', '.join(SOURCES)}")
    totals = Totals(arguments.results, arguments.seed)
    deadline = time.monotonic() + arguments.seconds
    with tempfile.TemporaryDirectory() as folder, tqdm(total=arguments.pairs) as bar:
        bar.update(totals.count("pairs"))
        harness = Harness(names, Path(folder))
        while totals.count("pairs") < arguments.pairs and time.monotonic() < deadline:
            counts = harness.run_round(make_prompts(totals.seed, totals.num_rounds))
            totals.add(counts)
            bar.update(totals.count("pairs") - bar.n)
        harness.close()
    print(json.dumps({name: totals.count(name) for name in ("pairs", "hit_pairs", "differing")}))
    return 1 if totals.count("differing") else 0


if __name__ == "__main__":
    sys.exit(main())
