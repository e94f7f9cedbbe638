"""One tenant asks for 20 times its share of a real server: what the others' first tokens become.

    python -m benchmarks.tenant_flood_live [--flags "-dp 2"]
    python -m benchmarks.tenant_flood_live --shares --seconds 60 [--flags "-dp 2"]
    python -m benchmarks.tenant_flood_live --shares --seconds 60 --rounds 1 --replicas 2

Three tenants send a request of a conversation each second in turn; the fourth sends as many as one
of them (held) or 20 times as many (flood), on the embedded checkpoint. Runs alternate. With
``--shares`` all four ask for more than there is, each with prompts and answers of other lengths:
what each was served, weighted as the server weighs it, in percent. With ``--replicas`` a fleet on
a Ray cluster of two nodes on this machine serves in the place of a server.
"""

import argparse
import asyncio
import json
import os
import re
import shlex
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

# Ray reads it when it is imported: loopback addresses are taken as they are.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"

import ray
from ray import serve

from tests.e2e.server_process import ServerProcess
from tests.ports import free_ports
from tests.ray_cluster import ray_cluster, start_serve
from vllm.ray_serve import FleetArgs, app

OTHERS = ("a", "b", "c")
FLOODER = "flood"
# As the server counts them without a setting of its own.
TOKEN_WEIGHTS = {"input": 1.0, "cached": 0.1, "output": 4.0}
# Lengths of requests by tenant: stories in a prompt, tokens of an answer.
SHAPES = {"a": (4, 48), "b": (24, 8), "c": (12, 16), FLOODER: (12, 16)}
_OPEN_REQUESTS = 24
_SERVED = re.compile(r'vllm:tenant_tokens_total\{.*?kind="(\w+)".*?tenant="(\w+)"\} (\S+)')
STORY = "The access code of the archive is 7302. The access code of the harbour is 1186. "


async def ask(client: httpx.AsyncClient, tenant: str, prompt: str, num_tokens: int) -> Any:
    """Send a request; returns seconds to its first token, prompt tokens and cached ones."""
    body = {
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    headers = {"Authorization": f"Bearer sk-{tenant}"}
    began, first, usage = time.monotonic(), None, {}
    async with client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            first = first or time.monotonic() - began
            usage = json.loads(line[6:]).get("usage") or usage
    details = usage["prompt_tokens_details"]
    return first, usage["prompt_tokens"], details["cached_tokens"]


async def run(url: str, factor: int, seconds: float, name: str) -> dict[str, float]:
    """Run a load; returns the others' figures."""
    seen: dict[str, list[Any]] = defaultdict(list)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=httpx.Limits()) as client:

        async def send(tenant: str, prompt: str) -> None:
            seen[tenant].append(await ask(client, tenant, prompt, 16))

        async def other(tenant: str, delay: float) -> None:
            await asyncio.sleep(delay)
            async with asyncio.TaskGroup() as group:
                for number in range(int(seconds)):
                    turns = f" And then, {tenant}?" * (number % 12)
                    group.create_task(send(tenant, f"{name} {tenant}. " + STORY * 12 + turns))
                    await asyncio.sleep(1)

        async def flooder() -> None:
            async with asyncio.TaskGroup() as group:
                for number in range(int(seconds) * factor):
                    group.create_task(send(FLOODER, f"{name} {number}. " + STORY * 12))
                    await asyncio.sleep(1 / factor)

        flood = asyncio.create_task(flooder())
        await asyncio.gather(*(other(t, i / len(OTHERS)) for i, t in enumerate(OTHERS)))
        flood.cancel()
        await asyncio.gather(flood, return_exceptions=True)
    rows = sorted(row for tenant in OTHERS for row in seen[tenant])
    return {
        "requests": len(rows),
        "p50_ttft_ms": round(1000 * rows[len(rows) // 2][0], 1),
        "p90_ttft_ms": round(1000 * rows[len(rows) * 9 // 10][0], 1),
        "hit_percent": round(100 * sum(r[2] for r in rows) / sum(r[1] for r in rows), 2),
    }


async def count_served(client: httpx.AsyncClient) -> dict[str, float]:
    """Return weighted tokens served to each tenant so far."""
    served: dict[str, float] = defaultdict(float)
    for kind, tenant, count in _SERVED.findall((await client.get("/metrics")).text):
        served[tenant] += TOKEN_WEIGHTS[kind] * float(count)
    return served


async def find_shares(url: str, seconds: float) -> dict[str, float]:
    """Have all tenants ask for more than there is; returns their shares of the time, in percent,
    and the weighted tokens of all: what runs at a time must be little beside them."""
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits()) as client:

        async def keep_asking(tenant: str, number: int) -> None:
            stories, num_tokens = SHAPES[tenant]
            for turn in range(10**6):
                await ask(
                    client, tenant, f"{tenant} {number} {turn}. " + STORY * stories, num_tokens
                )

        asking = [
            asyncio.create_task(keep_asking(tenant, number))
            for tenant in SHAPES
            for number in range(_OPEN_REQUESTS)
        ]
        # Until there is a queue of all.
        await asyncio.sleep(seconds / 4)
        before = await count_served(client)
        await asyncio.sleep(seconds)
        after = await count_served(client)
        for task in asking:
            task.cancel()
        for result in await asyncio.gather(*asking, return_exceptions=True):
            if not isinstance(result, asyncio.CancelledError):
                raise RuntimeError("a tenant stopped asking") from result
    served = {tenant: after[tenant] - before[tenant] for tenant in SHAPES}
    total = sum(served.values())
    shares = {tenant: round(100 * tokens / total, 2) for tenant, tokens in served.items()}
    return {**shares, "tokens": total}


@contextmanager
def serving(folder: Path, flags: Sequence[str], replicas: int) -> Iterator[str]:
    """Serve with flags; yields the URL. Replicas: of a fleet; 0: one server."""
    if not replicas:
        environment = {"VLLM_CHECK_INVARIANTS": "0", "VLLM_CPU_KVCACHE_SPACE": "0.1"}
        with ServerProcess(folder / "log", *flags, environment=environment) as server:
            yield server.url
        return
    with ray_cluster(4, 4) as cluster:
        ray.init(cluster.address, log_to_driver=False, logging_level="error")
        port = free_ports()
        start_serve(port)
        # As ServerProcess serves.
        given = shlex.join(["--block-size", "32", *flags])
        fleet = app(FleetArgs.model_validate({"replicas": replicas, "flags": given}))
        serve.run(fleet, name="fleet", route_prefix="/")
        yield f"http://127.0.0.1:{port}"
        serve.shutdown()


def main() -> None:
    """Run the loads by turns and print their figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--shares", action="store_true")
    parser.add_argument("--flags", default="", help="further ones of vllm serve")
    parser.add_argument("--replicas", type=int, default=0, help="of a fleet; 0: one server")
    args = parser.parse_args()
    tenants: list[dict[str, Any]] = [
        {"name": name, "keys": [f"sk-{name}"], "cache_guaranteed": 0.2} for name in OTHERS
    ]
    tenants.append({"name": FLOODER, "keys": [f"sk-{FLOODER}"]})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tenants.json"
        path.write_text(json.dumps({"tenants": tenants}))
        flags = ("--tenants", str(path), "--max-num-batched-tokens", "128", "--max-num-seqs", "16")
        flags += ("--max-model-len", "2048", *shlex.split(args.flags))
        with serving(Path(folder), flags, args.replicas) as url:
            for number in range(args.rounds):
                if args.shares:
                    shares = asyncio.run(find_shares(url, args.seconds))
                    print("shares", json.dumps(shares), flush=True)
                    continue
                for name, factor in (("held", 1), ("flood", 20)):
                    figures = asyncio.run(run(url, factor, args.seconds, f"{name} {number}"))
                    print(name, json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
