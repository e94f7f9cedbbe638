"""A fleet on a real Ray cluster on this machine, under agents and chats, and faults.

    python -m benchmarks.fleet_live --replicas 2 4 --pool-mib 100 12 --requests 1000
    python -m benchmarks.fleet_live --replicas 4 --faults 250 --nodes 2 --head-cpus 0

Agents have a long common beginning and add short results of tools; chats begin each in their own
way and have longer answers. Half a dozen of them speak at a time, each turn with all that was said.
Every answer is compared with one engine's, its hit with the one foretold. With faults, engine
cores, actors and nodes are killed, frozen and paused, clients leave, and updates are lost, doubled,
swapped and late.
"""

import argparse
import asyncio
import itertools
import json
import os
import queue
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil

# Ray reads it when it is imported: loopback addresses are taken as they are.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"

import ray
from ray import serve

from benchmarks.faulty_replica import FOLDER, NEWS_FAULTS, FaultyReplica
from tests.ports import free_ports
from tests.ray_cluster import ray_cluster, start_serve
from vllm import LLM, SamplingParams
from vllm.ray_serve import FleetArgs
from vllm.ray_serve.application import build
from vllm.v1.engine.launch import DEFAULT_CORE_FACTORY

T = TypeVar("T")
TOOLS = (
    "You may search the archive, read a file of the harbour, and write down what you found. " * 10
)
WORDS = ["ship", "crane", "letter", "number", "harbour", "archive", "code", "gate", "tide", "night"]
PROCESS_FAULTS = ("core dies", "actor dies", "core freezes", "actor freezes", "node dies")
PAUSES = ("core pauses", "actor pauses", "client leaves")
_HANGS_S = 180.0
_NODE_CPUS = 4
_FLAGS = "--block-size 32 --enable-prompt-tokens-details --max-num-seqs 8 --max-model-len 4096"


@dataclass
class Turn:
    """One request and what came of it.

    Attributes:
        prompt: Sent.
        num_tokens: Asked for.
        text: What came.
        outcome: "done", "left" (by the client), the error's code, or "hangs".
        name: The answer's id.
        first_at: When the first token came; None: none did.
        usage: Of the answer.
    """

    prompt: str
    num_tokens: int
    text: str = ""
    outcome: str = ""
    name: str = ""
    first_at: float | None = None
    usage: dict[str, Any] = field(default_factory=dict)


class Speakers:
    """Agents and chats that go on until enough was said.

    Owns: their histories, the turns.
    """

    def __init__(self, url: str, seed: int, pause_s: float) -> None:
        self._url, self._pause_s = url, pause_s
        self._rng = random.Random(seed)
        self._seed = seed
        self._number = 0
        self.turns: list[Turn] = []
        self.open: dict[int, asyncio.Task[None]] = {}
        self.is_over = False

    def _draw(self, count: int) -> str:
        return " ".join(self._rng.choice(WORDS) for _ in range(count)) + ". "

    async def speak(self, client: httpx.AsyncClient, requests: int) -> None:
        """Have conversations, one after another."""
        while len(self.turns) < requests and not self.is_over:
            self._number += 1
            is_agent = self._number % 2 == 0
            history = TOOLS if is_agent else ""
            history += f"Conversation {self._seed}-{self._number}. " + self._draw(40)
            for _ in range(self._rng.randint(3, 8)):
                turn = Turn(history + self._draw(12 if is_agent else 25), 6 if is_agent else 16)
                self.turns.append(turn)
                task = asyncio.ensure_future(self._ask(client, turn))
                self.open[id(turn)] = task
                try:
                    await asyncio.wait_for(task, _HANGS_S)
                except TimeoutError:
                    turn.outcome = "hangs"
                except asyncio.CancelledError:
                    turn.outcome = "left"
                del self.open[id(turn)]
                history = turn.prompt + turn.text
                await asyncio.sleep(self._rng.uniform(0, 2 * self._pause_s))

    async def _ask(self, client: httpx.AsyncClient, turn: Turn) -> None:
        body = {
            **{"prompt": turn.prompt, "max_tokens": turn.num_tokens, "temperature": 0},
            **{"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}},
        }
        try:
            async with client.stream("POST", self._url + "/v1/completions", json=body) as answer:
                if answer.status_code != 200:
                    error = json.loads(await answer.aread())["error"]
                    turn.outcome = f"{answer.status_code} {error['type']}"
                    return
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        self._take(turn, json.loads(line[6:]))
                    elif line == "data: [DONE]" and not turn.outcome:
                        turn.outcome = "done"
            turn.outcome = turn.outcome or "cut without a word"
        except (httpx.HTTPError, ValueError, KeyError) as error:
            turn.outcome = f"untyped: {error!r}"[:100]

    @staticmethod
    def _take(turn: Turn, told: dict[str, Any]) -> None:
        if "error" in told:
            turn.outcome = f"stream {told['error']['code']} {told['error']['type']}"
            return
        turn.name = told["id"]
        if told["choices"] and told["choices"][0]["text"]:
            turn.first_at = turn.first_at or time.time()
            turn.text += told["choices"][0]["text"]
        turn.usage = told.get("usage") or turn.usage


class Injector:
    """Does harm to a fleet, a fault after another.

    Owns: what was done, who is paused.
    """

    def __init__(
        self, nodes: "Nodes", speakers: Speakers, fleet: "Fleet", args: argparse.Namespace
    ) -> None:
        self._nodes, self._speakers, self._folder = nodes, speakers, fleet.folder
        self._replicas = fleet.replicas
        self._deaths_left = args.deaths
        self._rng = random.Random(args.seed + 1000)
        self.done: Counter[str] = Counter()
        self._ordered: Counter[str] = Counter()

    def _find_cores(self) -> list[psutil.Process]:
        found = []
        for node in psutil.Process().children(recursive=True):
            try:
                if node.name() == "raylet":
                    found += [
                        process
                        for process in node.children(recursive=True)
                        if "vllm.v1.engine.core_proc" in " ".join(process.cmdline())
                        and process.status() != psutil.STATUS_ZOMBIE
                    ]
            except psutil.NoSuchProcess:
                continue
        return found

    def num_cores(self) -> int:
        """Return how many engine cores run."""
        return len(self._find_cores())

    async def run(self, faults: int, seconds: float) -> None:
        """Inject so many, kinds by chance; seconds: at most, 0: as long as it takes."""
        number = 0
        until = time.monotonic() + (seconds or float("inf"))
        kinds = [*NEWS_FAULTS * 4, *PAUSES * 4, *PROCESS_FAULTS * 3]
        while self._num_done() < faults and time.monotonic() < until:
            await asyncio.sleep(self._rng.expovariate(3))
            kind = self._rng.choice(kinds)
            if kind in NEWS_FAULTS:
                number += 1
                self._ordered[kind] += 1
                (self._folder / f"{kind}-{number}.order").touch()
                # Not many at once: each shall meet a fleet that was told the truth meanwhile.
                while self._num_pending() > 3:
                    await asyncio.sleep(0.2)
            else:
                await self._harm(kind)
        for _ in range(100):
            if not self._num_pending():
                break
            await asyncio.sleep(0.2)
        for kind, count in self._ordered.items():
            left = len(list(self._folder.glob(f"{kind}-[0-9]*.order")))
            self.done[f"updates: {kind}"] = count - left
        for path in self._folder.glob("*.order"):
            path.unlink()

    def _num_pending(self) -> int:
        """Return how many orders no replica has taken yet."""
        return len(list(self._folder.glob("*.order")))

    def _num_done(self) -> int:
        return sum(self.done.values()) + sum(self._ordered.values()) - self._num_pending()

    async def _harm(self, kind: str) -> None:
        cores = self._find_cores()
        if kind == "client leaves":
            if not self._speakers.open:
                return
            self._rng.choice([*self._speakers.open.values()]).cancel()
            self.done[kind] += 1
            return
        if kind in PROCESS_FAULTS and not self._deaths_left:
            return
        # Deaths one at a time, but for every fourth: the last one may go too.
        if kind in PROCESS_FAULTS and len(cores) < self._replicas and self._rng.random() < 0.75:
            return
        if not cores:
            return
        try:
            await self._strike(kind, self._rng.choice(cores))
        except psutil.NoSuchProcess:
            return
        self.done[kind] += 1
        self._deaths_left -= kind in PROCESS_FAULTS

    async def _strike(self, kind: str, core: psutil.Process) -> None:
        victim = core if kind.startswith("core") else core.parent() or core
        if kind == "node dies":
            await self._nodes.replace(self._rng.randrange(1000))
        elif kind.endswith("dies"):
            victim.send_signal(signal.SIGKILL)
        else:
            victim.send_signal(signal.SIGSTOP)
            if kind.endswith("pauses"):
                await asyncio.sleep(self._rng.choice([0.3, 1.0, 3.0]))
                victim.send_signal(signal.SIGCONT)
            else:
                # Whoever watches over it must find out.
                await asyncio.sleep(1)


class Nodes:
    """Those beside the head, which can die and come back.

    Ray starts nodes in a process's main thread alone, and it takes seconds: that thread does
    nothing else while another one drives clients.

    Args:
        cluster: They are part of.
        count: How many.

    Owns: what the main thread shall do.
    """

    def __init__(self, cluster: Any, count: int) -> None:
        self._cluster = cluster
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], Future[None]] | None]
        self._jobs = queue.SimpleQueue()
        for _ in range(count):
            self._add()

    def _add(self) -> None:
        """Start one; again where it does not come up within Ray's own 30 s on a busy machine."""
        for tries_left in (3, 2, 1, 0):
            try:
                self._cluster.add_node(
                    num_cpus=_NODE_CPUS,
                    object_store_memory=80 << 20,
                    node_ip_address="127.0.0.1",
                )
                return
            except Exception:  # Ray has no class for it
                if not tries_left:
                    raise

    def _replace(self, number: int) -> None:
        nodes = list(self._cluster.worker_nodes)
        self._cluster.remove_node(nodes[number % len(nodes)], allow_graceful=False)
        time.sleep(1)
        self._add()

    async def replace(self, number: int) -> None:
        """Let one die, and start another."""
        done: Future[None] = Future()
        self._jobs.put((partial(self._replace, number), done))
        await asyncio.wrap_future(done)

    def work_while(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine in a thread, and what it wants of nodes here."""
        with ThreadPoolExecutor(1) as pool:
            result = pool.submit(asyncio.run, work())
            result.add_done_callback(lambda _: self._jobs.put(None))
            while (job := self._jobs.get()) is not None:
                do, done = job
                try:
                    do()
                except BaseException as error:
                    done.set_exception(error)
                else:
                    done.set_result(None)
            return result.result()


class Judge:
    """One engine, with which all answers are compared."""

    def __init__(self) -> None:
        self._llm = LLM("deepseek-v4", block_size=32, max_model_len=4096)

    def count_different(self, turns: list[Turn]) -> tuple[int, int]:
        """Return how many answers have tokens, and how many of them are not this engine's."""
        told = [turn for turn in turns if turn.text]
        params = [
            SamplingParams(temperature=0, max_tokens=turn.num_tokens, ignore_eos=True)
            for turn in told
        ]
        outputs = self._llm.generate([turn.prompt for turn in told], params)
        different = 0
        for turn, output in zip(told, outputs, strict=True):
            whole = output.outputs[0].text
            good = whole == turn.text if turn.outcome == "done" else whole.startswith(turn.text)
            different += not good
        return len(told), different


def count_twice(turns: list[Turn], folder: Path) -> int:
    """Return how many requests a replica took after their first byte had come."""
    taken = [
        json.loads(line)
        for path in folder.glob("*.taken")
        for line in path.read_text().splitlines()
    ]
    first = {turn.name: turn.first_at for turn in turns if turn.first_at is not None}
    known = {name for name in first for n, _, _ in taken if n.startswith(name)}
    if first and len(known) < len(first):
        raise RuntimeError(f"{len(first) - len(known)} answers of nobody: ids do not match")
    return sum(
        any(n.startswith(name) and at > first_at for n, at, _ in taken)
        for name, first_at in first.items()
    )


def describe(turns: list[Turn]) -> dict[str, Any]:
    """Return the figures of turns."""
    usages = [turn.usage for turn in turns if turn.usage]
    details = [usage["prompt_tokens_details"] for usage in usages]
    outcomes = Counter(d.get("prediction") for d in details)
    tokens = sum(usage["prompt_tokens"] for usage in usages)
    return {
        "requests": len(turns),
        "prompt_tokens": tokens,
        "hit_percent": round(100 * sum(d["cached_tokens"] for d in details) / max(1, tokens), 2),
        "foretold": dict(outcomes),
        "exact_percent": round(100 * outcomes["exact"] / max(1, len(details)), 2),
        "ends": dict(Counter(turn.outcome for turn in turns)),
    }


async def drive(args: argparse.Namespace, nodes: Nodes, fleet: "Fleet") -> dict[str, Any]:
    """Run the load and the faults; returns what was seen."""
    speakers = Speakers(fleet.url, args.seed, args.pause)
    report: dict[str, Any] = {}
    turns = speakers.turns
    limits = httpx.Limits(max_connections=64)
    async with httpx.AsyncClient(timeout=_HANGS_S + 60, limits=limits) as client:
        requests = sys.maxsize if args.faults else args.requests
        talking = [
            asyncio.create_task(speakers.speak(client, requests)) for _ in range(args.speakers)
        ]
        if args.faults:
            injector = Injector(nodes, speakers, fleet, args)
            await injector.run(args.faults, args.seconds)
            report["faults"] = dict(injector.done)
        else:
            await asyncio.wait(talking, timeout=args.seconds or None)
        speakers.is_over = True
        await asyncio.gather(*talking)
        report.update(describe(turns))
        if args.faults:
            # Quiet again: all are there, and what is believed of them is true.
            for _ in range(600):
                if injector.num_cores() == fleet.replicas:
                    break
                await asyncio.sleep(0.2)
            await asyncio.sleep(15)
            after = Speakers(fleet.url, args.seed + 1, args.pause)
            await after.speak(client, 20)
            report["afterwards"] = {"cores": injector.num_cores(), **describe(after.turns)}
            turns = turns + after.turns
    report["taken_twice"] = count_twice(turns, fleet.folder)
    report["compared"], report["different"] = fleet.judge.count_different(turns)
    return report


@dataclass(frozen=True)
class Fleet:
    """One that is deployed.

    Attributes:
        url: Of its ingress.
        replicas: It should have.
        folder: Where faults are ordered, and what was taken is written down.
        judge: Of its answers.
    """

    url: str
    replicas: int
    folder: Path
    judge: Judge


def main() -> None:
    """Run fleets one after another, and print what was seen of each as a JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--replicas", type=int, nargs="+", default=[2])
    parser.add_argument("--pool-mib", type=int, nargs="+", default=[100])
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--faults", type=int, default=0)
    parser.add_argument(
        "--deaths", type=int, default=sys.maxsize, help="of processes and nodes, at most"
    )
    parser.add_argument("--seconds", type=float, default=0, help="at most; 0: as long as it takes")
    parser.add_argument("--nodes", type=int, default=1, help="beside the head, of 4 CPUs by name")
    parser.add_argument(
        "--head-cpus", type=int, default=4, help="by name; 0: replicas only on other nodes"
    )
    parser.add_argument("--speakers", type=int, default=6)
    parser.add_argument("--pause", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        os.environ[FOLDER] = name
        os.environ["VLLM_ENGINE_HEARTBEAT_TIMEOUT"] = "8"
        with ray_cluster(args.head_cpus) as cluster:
            nodes = Nodes(cluster, args.nodes)
            ray.init(cluster.address, log_to_driver=False, logging_level="error")
            judge = Judge()
            port = free_ports()
            start_serve(port)
            for replicas, mib in itertools.product(args.replicas, args.pool_mib):
                began = time.monotonic()
                flags = f"{_FLAGS} --kv-cache-memory-bytes {mib << 20}"
                fleet_args = FleetArgs.model_validate({"replicas": replicas, "flags": flags})
                application = build(fleet_args, DEFAULT_CORE_FACTORY, FaultyReplica)
                serve.run(application, name="fleet", route_prefix="/")
                fleet = Fleet(f"http://127.0.0.1:{port}", replicas, Path(name), judge)
                report = nodes.work_while(partial(drive, args, nodes, fleet))
                report = {"replicas": replicas, "pool_mib": mib, **report}
                report["seconds"] = round(time.monotonic() - began)
                print(json.dumps(report), flush=True)
                serve.delete("fleet")
            serve.shutdown()


if __name__ == "__main__":
    main()
