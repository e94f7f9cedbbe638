"""Damaged pictures against a running server: no 5xx, no growth of memory, /health in time.

    python -m benchmarks.image_damage --url http://localhost:8000 --files 10000

Files of six formats are cut, changed and joined at random, some with headers that claim millions of
pixels. Each is sent as a question of one token; /health is asked meanwhile. One line of JSON tells
what came of them.
"""

import argparse
import asyncio
import base64
import io
import json
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import psutil
from PIL import Image

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
_NUM_AT_A_TIME = 4
_HEALTH_EVERY_S = 0.02


def make_files(draws: np.random.Generator) -> list[bytes]:
    """Return whole files, of every format and several kinds of pixels."""
    files = []
    for kind in _FORMATS:
        for mode in ("RGB", "L", "P"):
            width, height = (int(side) for side in draws.integers(20, 400, 2))
            pixels = draws.integers(0, 256, (height, width, 3), np.uint8)
            image = Image.fromarray(pixels).convert(mode)
            out = io.BytesIO()
            options: dict[str, Any] = {"progressive": True} if kind == "JPEG" else {}
            (image.convert("RGB") if kind in ("JPEG", "WEBP") else image).save(out, kind, **options)
            files.append(out.getvalue())
    return files


def damage(data: bytes, draws: np.random.Generator) -> bytes:
    """Return a file with some of its bytes changed, most often near its head, or cut off."""
    changed = bytearray(data)
    for _ in range(int(draws.integers(1, 30))):
        reach = min(len(changed), 64 if draws.random() < 0.5 else len(changed))
        changed[int(draws.integers(reach))] = int(draws.integers(256))
    if draws.random() < 0.3:
        del changed[int(draws.integers(1, len(changed))) :]
    if draws.random() < 0.1:
        changed += bytes(changed)
    return bytes(changed)


async def _send(client: httpx.AsyncClient, files: Iterator[bytes], statuses: Counter[int]) -> None:
    for file in files:
        url = "data:image/png;base64," + base64.b64encode(file).decode()
        content = [{"type": "image_url", "image_url": {"url": url}}]
        body = {"messages": [{"role": "user", "content": content}]}
        answer = await client.post("/tokenize", json=body)
        statuses[answer.status_code] += 1


def _watch(url: str, has_ended: Any, told: Any) -> None:
    """Ask /health, in a process of its own: what makes the files would be measured else."""
    times = []
    with httpx.Client(base_url=url, timeout=120) as client:
        while not has_ended.is_set():
            begin = time.perf_counter()
            client.get("/health").raise_for_status()
            times.append(time.perf_counter() - begin)
            time.sleep(_HEALTH_EVERY_S)
    told.put(times)


async def run(url: str, num_files: int, seed: int, process: int | None) -> dict[str, Any]:
    """Send damaged files; return what came of them."""
    draws = np.random.default_rng(seed)
    whole = make_files(draws)
    files = (damage(whole[number % len(whole)], draws) for number in range(num_files))
    statuses: Counter[int] = Counter()
    sizes = []
    server = psutil.Process(process) if process else None
    processes = multiprocessing.get_context("spawn")
    has_ended, told = processes.Event(), processes.Queue()
    watching = processes.Process(target=_watch, args=(url, has_ended, told), daemon=True)
    watching.start()
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        sending = [
            asyncio.create_task(_send(client, files, statuses)) for _ in range(_NUM_AT_A_TIME)
        ]
        while not all(task.done() for task in sending):
            await asyncio.sleep(1)
            sizes.append(server.memory_info().rss if server else 0)
        await asyncio.gather(*sending)
    has_ended.set()
    times = told.get(timeout=10)
    half = sizes[len(sizes) // 2 :] or [0]
    return {
        "files": num_files,
        "seed": seed,
        "statuses": dict(sorted(statuses.items())),
        "health_ms": {
            "p50": round(1e3 * float(np.percentile(times, 50)), 1),
            "p99": round(1e3 * float(np.percentile(times, 99)), 1),
            "max": round(1e3 * max(times), 1),
        },
        "rss_mib": {
            "first": round(sizes[0] / 2**20) if sizes else None,
            "half": round(half[0] / 2**20),
            "end": round(half[-1] / 2**20),
        },
    }


def main() -> int:
    """Run; 1: a file was answered with a fault of the server."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--process", type=int, help="Id of the server's process, for its memory.")
    args = parser.parse_args()
    told = asyncio.run(run(args.url, args.files, args.seed, args.process))
    print(json.dumps(told))
    return int(any(status >= 500 for status in told["statuses"]))


if __name__ == "__main__":
    sys.exit(main())
