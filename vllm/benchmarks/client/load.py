"""Sends requests at their times, so many at once."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp
from tqdm import tqdm

from vllm.benchmarks.client.observation import Observation
from vllm.benchmarks.client.target import Target, send
from vllm.benchmarks.datasets.prompt import BenchRequest


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent, and when.

    Attributes:
        requests: In order.
        times_s: When each is sent, from the start.
        max_concurrency: How many at once; None: any number.
        id_prefix: Of request ids.
        shows_progress: Whether to draw a bar.
    """

    requests: Sequence[BenchRequest]
    times_s: Sequence[float]
    max_concurrency: int | None = None
    id_prefix: str = "bench-"
    shows_progress: bool = True


async def run_load(
    session: aiohttp.ClientSession, target: Target, load: Load
) -> tuple[list[Observation], float]:
    """Send everything and wait for all answers.

    Returns:
        An observation for each request, in order, and the seconds it all took.
    """
    limit = load.max_concurrency
    slots = asyncio.Semaphore(limit) if limit else None
    bar = tqdm(total=len(load.requests), unit="req", disable=None if load.shows_progress else True)
    origin = time.perf_counter()

    async def one(number: int, request: BenchRequest) -> Observation:
        due = time.perf_counter()
        if slots is None:
            seen = await send(session, target, request, origin, f"{load.id_prefix}{number}")
        else:
            async with slots:
                waited = time.perf_counter() - due
                seen = await send(session, target, request, origin, f"{load.id_prefix}{number}")
                seen.queue_s = waited
        bar.update()
        return seen

    tasks = []
    try:
        for number, (request, due_s) in enumerate(zip(load.requests, load.times_s, strict=True)):
            delay = due_s - (time.perf_counter() - origin)
            if delay > 0:
                await asyncio.sleep(delay)
            tasks.append(asyncio.create_task(one(number, request)))
            if limit and number % limit == 0:
                await asyncio.sleep(0)  # the first ones get on while the rest is queued
        seen = list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        bar.close()
    return seen, time.perf_counter() - origin
