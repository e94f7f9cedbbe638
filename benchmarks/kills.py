"""Engines and servers killed under load, over one folder: does what was said stay said?

    python -m benchmarks.kills [--kills 1000] [--servers 20] [--seconds 3600] [--folder DIR]

An engine with a prefix cache on disk computes prompts while SIGKILL comes at a random moment; the
next one starts over the same folder. Every start must succeed, every answer must be that of an
engine without a folder, and every object that was acknowledged before the kill must be there after
it (the folder is large enough that none is given up) and whole in the end. Every fifth life brings
prompts that the folder does not know, so that kills meet writes from the first to the last. Engines
are forked from one process that has imported everything, so that a life takes a second; of servers
each start is whole. One kill in five comes while the engine starts. Stops at the first fault and
leaves the folder; the same command goes on with a folder where it was stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import httpx
from tqdm import tqdm

from benchmarks.live_server import LiveServer
from benchmarks.result import print_result
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.client import InlineCore
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.engine_args import EngineArgs
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.kv_offload.store.object_store import ObjectStore

_SIZE = "4GiB"
_NUM_PROMPTS = 40
# Lives that share their prompts: in the first of them most is written, in the others most is read.
_LIVES_PER_SET = 5
_MAX_TOKENS = 6
_MAX_LIFE_S = 2.0
# Kills that come before the engine has opened its folder, or as it does.
_START_SHARE = 0.2
_MAX_START_S = 2.0
_START_S = 120.0
_SERVED = ("deepseek-v4", "--block-size", "32", "--max-model-len", "1024")


class KilledError(Exception):
    """A fault that kills brought to light."""


def make_prompts(seed: int | str) -> list[list[int]]:
    """Return prompts of many lengths; half of them share beginnings."""
    rng = random.Random(seed)
    heads = [[rng.randrange(10, 1000) for _ in range(400)] for _ in range(3)]
    prompts = []
    for number in range(_NUM_PROMPTS):
        head = rng.choice(heads)[: rng.randrange(400)] if number % 2 else []
        prompts.append([*head, *(rng.randrange(10, 1000) for _ in range(rng.randrange(40, 400)))])
    return prompts


def make_engine(folder: Path | None) -> LLMEngine:
    """Return an engine in this process."""
    tier: dict[str, Any] = {}
    if folder is not None:
        tier = {"prefix_cache_dir": str(folder), "prefix_cache_disk_size": _SIZE}
    config = EngineArgs(
        block_size=32, max_model_len=1024, kv_cache_memory_bytes=48 << 20, **tier
    ).create_vllm_config()
    return LLMEngine(config, InlineCore(lambda: EngineCore(config, UniProcExecutor)))


def store_of(engine: LLMEngine) -> ObjectStore | None:
    """Return the store of an engine in this process; None while it opens."""
    connector = engine._core._core.scheduler.connector  # type: ignore[attr-defined]
    return connector._tier.stores.disk if connector is not None else None


def list_keys(store: ObjectStore) -> list[str]:
    """Return the names of all objects that can be found."""
    return [f"{e.extent.key.kind}{e.extent.key.digest.hex()}" for e in store.content.list_objects()]


def live(folder: Path | None, prompts: list[list[int]], order: list[int], out: IO[str]) -> None:
    """Compute prompts for ever, and tell each answer and each object that is acknowledged."""
    engine = make_engine(folder)
    params = SamplingParams(temperature=0.0, max_tokens=_MAX_TOKENS, ignore_eos=True)
    if folder is not None:
        # Prefixes are found before all of the index is read; a list of them is not whole then.
        while (store := store_of(engine)) is None or not store.state.is_ready:
            time.sleep(0.001)
        _tell(out, {"there": list_keys(store)})
    waiting, told, num_committed = list(order), set[str](), -1
    while waiting or engine.has_unfinished_requests():
        while waiting and engine.get_num_unfinished_requests() < 3:
            index = waiting.pop(0)
            prompt = {"prompt_token_ids": prompts[index]}
            engine.add_request(f"{index}", prompt, params)
        for output in engine.step():
            if output.finished:
                ids = list(output.outputs[0].token_ids)
                _tell(out, {"answer": [int(output.request_id), ids, output.num_cached_tokens]})
        store = store_of(engine)
        if store is not None and store.counts.committed != num_committed:
            num_committed = store.counts.committed
            now = set(list_keys(store))
            _tell(out, {"kept": sorted(now - told)})
            told |= now
    engine.shutdown()


def _tell(out: IO[str], what: dict[str, Any]) -> None:
    out.write(json.dumps(what) + "\n")
    out.flush()


@contextlib.contextmanager
def forked(folder: Path | None, prompts: list[list[int]], order: list[int]) -> Iterator[Any]:
    """Run a life in a fork; gives its process id and what it tells."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(read_end)
            with os.fdopen(write_end, "w") as out:
                live(folder, prompts, order, out)
            code = 0
        except BaseException:  # told, and never taken for the parent's
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(write_end)
    with os.fdopen(read_end) as lines:
        try:
            yield pid, lines
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def read_told(lines: IO[str]) -> Iterator[dict[str, Any]]:
    """Iterate over what a life said; a line that the kill cut is left out."""
    for line in lines:
        if line.endswith("\n"):
            yield json.loads(line)


@dataclass
class Tally:
    """What was seen so far, kept beside the folder.

    Attributes:
        engines: Counts of killed engines.
        servers: Counts of killed servers.
        kept: Names of all objects that were ever acknowledged.
        set_number: Which prompts `expected` is about.
        expected: What an engine without a folder answers, by prompt.
        served: What servers answered, by prompt.
    """

    engines: Counter[str] = field(default_factory=Counter)
    servers: Counter[str] = field(default_factory=Counter)
    kept: set[str] = field(default_factory=set)
    set_number: int = -1
    expected: dict[int, list[int]] = field(default_factory=dict)
    served: dict[int, str] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> Tally:
        """Return what an earlier run wrote down; nothing if there was none."""
        if not path.exists():
            return cls()
        said = json.loads(path.read_text())
        return cls(
            Counter(said["engines"]),
            Counter(said["servers"]),
            set(said["kept"]),
            said["set_number"],
            {int(index): ids for index, ids in said["expected"].items()},
            {int(index): text for index, text in said["served"].items()},
        )

    def save(self, path: Path) -> None:
        """Write it down, whole."""
        beside = path.with_suffix(".new")
        beside.write_text(json.dumps({**vars(self), "kept": sorted(self.kept)}))
        beside.replace(path)


def kill_engines(folder: Path, num_kills: int, seconds: float, seed: int, path: Path) -> None:
    """Kill engines, and check what they said.

    Raises:
        KilledError: Something was lost, or an answer is another.
    """
    tally = Tally.load(path)
    deadline = time.monotonic() + seconds
    for number in tqdm(range(tally.engines["kills"], num_kills)):
        if time.monotonic() > deadline:
            break
        set_number = number // _LIVES_PER_SET
        prompts = make_prompts(f"{seed} {set_number}")
        if tally.set_number != set_number:
            with forked(None, prompts, list(range(_NUM_PROMPTS))) as (_, lines):
                tally.expected = {t["answer"][0]: t["answer"][1] for t in read_told(lines)}
            if len(tally.expected) != _NUM_PROMPTS:
                raise KilledError("the engine without a folder did not answer all prompts")
            tally.set_number = set_number
        _kill_engine(folder, prompts, random.Random(f"{seed} {number}"), tally)
        tally.engines["kills"] += 1
        tally.save(path)


def _kill_engine(folder: Path, prompts: list[list[int]], rng: random.Random, tally: Tally) -> None:
    order = rng.sample(range(_NUM_PROMPTS), _NUM_PROMPTS)
    with forked(folder, prompts, order) as (pid, lines):
        if rng.random() < _START_SHARE:
            time.sleep(rng.random() * _MAX_START_S)
            os.kill(pid, signal.SIGKILL)
            tally.engines["kills_of_starts"] += 1
            first = lines.readline()
            if not first.endswith("\n"):
                return
        else:
            first = lines.readline()
            if not first.endswith("\n"):
                raise KilledError(f"start {tally.engines['kills'] + 1} failed")
            # Beside the writes of the first answers as well as in the midst of them.
            time.sleep(rng.random() ** 2 * _MAX_LIFE_S)
            os.kill(pid, signal.SIGKILL)
        there = now = set(json.loads(first)["there"])
        if lost := tally.kept - there:
            raise KilledError(f"{len(lost)} acknowledged objects are gone after a kill")
        tally.engines["checked"] += len(tally.kept)
        for told in read_told(lines):
            if "kept" in told:
                now |= set(told["kept"])
            else:
                index, ids, num_cached = told["answer"]
                tally.engines["answers"] += 1
                tally.engines["hit_tokens"] += num_cached or 0
                if ids != tally.expected[index]:
                    raise KilledError(f"prompt {index}: {ids}, not {tally.expected[index]}")
        tally.engines["acknowledged"] += len(now - tally.kept)
        tally.kept |= now


def kill_servers(folder: Path, num_kills: int, seed: int, path: Path) -> None:
    """Kill whole servers, and check what they said.

    Raises:
        KilledError: An answer is another, or a server did not start.
    """
    rng = random.Random(seed)
    prompts = make_prompts(seed + 1)[:12]
    flags = (*_SERVED, "--prefix-cache-dir", str(folder), "--prefix-cache-disk-size", _SIZE)
    tally = Tally.load(path)
    answers, totals = tally.served, tally.servers
    for _ in tqdm(range(totals["kills"], num_kills)):
        with LiveServer(folder.parent / "server.txt", *flags) as server:
            until = time.monotonic() + rng.random() * _MAX_LIFE_S
            while time.monotonic() < until:
                index = rng.randrange(len(prompts))
                body = {"model": "deepseek-v4", "prompt": prompts[index], "temperature": 0}
                body |= {"max_tokens": _MAX_TOKENS, "ignore_eos": True}
                answer = httpx.post(server.url + "/v1/completions", json=body, timeout=60).json()
                text = answer["choices"][0]["text"]
                if answers.setdefault(index, text) != text:
                    raise KilledError(f"prompt {index}: {text!r}, not {answers[index]!r}")
                totals["answers"] += 1
                totals["hit_tokens"] += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            for pid in (*_children(server.process.pid), server.process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        totals["kills"] += 1
        tally.save(path)


def _children(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(text) for text in path.read_text().split()] if path.exists() else []


def main() -> None:
    """Kill, and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--servers", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=3600.0, help="Of engines, at most.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    place = arguments.folder or Path(tempfile.mkdtemp(prefix="vllm-kills-"))
    folder, path = place / "cache", place / "tally.json"
    if arguments.kills:
        kill_engines(folder, arguments.kills, arguments.seconds, arguments.seed, path)
    if arguments.servers:
        kill_servers(folder, arguments.servers, arguments.seed, path)
    command = [sys.executable, "-m", "vllm", "cache", "verify", str(folder)]
    verified = subprocess.run(command, capture_output=True, text=True, check=False)
    tally = Tally.load(path)
    values = {
        "engines": tally.engines,
        "servers": tally.servers,
        "verify": verified.stdout.strip(),
        "verify_code": verified.returncode,
    }
    print_result("kills", {"seed": arguments.seed}, values)


if __name__ == "__main__":
    main()
