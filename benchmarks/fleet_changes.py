"""A fleet on a real Ray cluster of three nodes on this machine, while its replicas come and go.

    python -m benchmarks.fleet_changes

The driver and the HTTP side are on the head, which takes no replica. Clients ask without a pause,
half of them for long answers: replicas are added, the application is updated under them, first to
scale by requests, then by prompt tokens, and when most clients leave, replicas are removed while
the others still read. No stream may be cut; every answer is compared with one engine's.
"""

import argparse
import asyncio
import json
import os
import time
from collections import Counter
from functools import partial
from typing import Any

import httpx

# Ray reads it when it is imported: loopback addresses are taken as they are.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"

import ray
from ray import serve

from benchmarks.fleet_live import Judge, Nodes, Speakers, Turn
from tests.ports import free_ports
from tests.ray_cluster import ray_cluster, start_serve
from vllm.ray_serve import FleetArgs, app

_FLAGS = "--block-size 32 --enable-prompt-tokens-details --max-model-len 4096"
_LONG = 200
_LIMIT_S = 300.0


class Readers(Speakers):
    """Speakers of whom half read long answers, as long as they are wanted.

    Owns: when they shall leave.
    """

    def __init__(self, url: str) -> None:
        super().__init__(url, 0, 0.0)
        self.wanted = 0

    async def read(self, client: httpx.AsyncClient, place: int) -> None:
        """Ask one thing after another."""
        number = 0
        while place < self.wanted:
            number += 1
            prompt = f"Reader {place}, question {number}. " + self._draw(300 if place % 2 else 40)
            turn = Turn(prompt, _LONG if place % 2 == 0 else 8)
            self.turns.append(turn)
            await self._ask(client, turn)
            # Others shall not be starved by who is refused.
            await asyncio.sleep(0.5 if turn.outcome != "done" else 0.0)


def count_states() -> Counter[str]:
    """Return how many replicas there are, by state, as Serve says it."""
    engines = serve.status().applications["fleet"].deployments.get("engines")
    return Counter({str(k): n for k, n in engines.replica_states.items()} if engines else {})


class Log:
    """Writes down what happens, by seconds.

    Owns: the lines.
    """

    def __init__(self) -> None:
        self._began = time.monotonic()
        self.lines: list[tuple[float, str]] = []
        self._last: Counter[str] = Counter()

    def note(self, text: str) -> None:
        """Write down something."""
        self.lines.append((round(time.monotonic() - self._began, 1), text))
        print(self.lines[-1], flush=True)

    async def until(self, what: str, is_so: Any) -> bool:
        """Wait for a state of the replicas; returns whether it came."""
        deadline = time.monotonic() + _LIMIT_S
        while time.monotonic() < deadline:
            states = await asyncio.to_thread(count_states)
            if states != self._last:
                self._last = states
                self.note(f"replicas: {dict(states)}")
            if is_so(states):
                self.note(what)
                return True
            await asyncio.sleep(0.5)
        self.note(f"NOT within {_LIMIT_S:g} s: {what}")
        return False


def deploy(**arguments: Any) -> None:
    """Deploy a fleet, or update it, and wait until it serves."""
    serve.run(app(FleetArgs(**arguments)), name="fleet", route_prefix="/", blocking=False)


async def drive(url: str, log: Log) -> list[Turn]:
    """Let the fleet grow, change and shrink under load."""
    readers = Readers(url)
    limits = httpx.Limits(max_connections=64)
    async with httpx.AsyncClient(timeout=_LIMIT_S, limits=limits) as client:

        async def come(count: int) -> list[asyncio.Task[None]]:
            first, readers.wanted = readers.wanted, count
            return [asyncio.create_task(readers.read(client, i)) for i in range(first, count)]

        log.note("8 clients")
        tasks = await come(8)
        await log.until("three replicas serve", lambda states: states["RUNNING"] == 3)
        await asyncio.sleep(10)
        log.note("update: other flags, and a target of prompt tokens instead of requests")
        updating = asyncio.create_task(
            asyncio.to_thread(
                deploy,
                **{"replicas": 2, "min_replicas": 1, "max_replicas": 3},
                **{"target_requests": 1000, "target_prefill_tokens": 200},
                flags=_FLAGS + " --max-num-seqs 6",
            )
        )
        await updating
        log.note("the update is there")
        await log.until("three serve again, by prompt tokens", lambda s: s["RUNNING"] == 3)
        await asyncio.sleep(5)
        log.note("all but one client leave when they were answered")
        readers.wanted = 1
        await log.until("one replica serves", lambda s: s["RUNNING"] == 1 and s.total() == 1)
        readers.wanted = 0
        await asyncio.gather(*tasks)
    return readers.turns


def main() -> None:
    """Run it, and print what was seen."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.parse_args()
    with ray_cluster(0) as cluster:
        nodes = Nodes(cluster, 2)
        ray.init(cluster.address, log_to_driver=False, logging_level="error")
        judge = Judge()
        port = free_ports()
        start_serve(port)
        log = Log()
        log.note("deploy")
        deploy(
            **{"replicas": 1, "max_replicas": 3, "target_requests": 2},
            flags=_FLAGS + " --max-num-seqs 8",
        )
        log.note("one replica serves")
        turns = nodes.work_while(partial(drive, f"http://127.0.0.1:{port}", log))
        compared, different = judge.count_different(turns)
        report = {
            "ends": Counter(turn.outcome for turn in turns),
            "long": sum(turn.num_tokens == _LONG and turn.outcome == "done" for turn in turns),
            "compared": compared,
            "different": different,
        }
        print(json.dumps(report), flush=True)
        serve.shutdown()


if __name__ == "__main__":
    main()
