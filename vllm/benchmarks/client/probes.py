"""Short requests beside a load: how long somebody waits who comes while it runs."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import aiohttp

from vllm.benchmarks.client.observation import Observation
from vllm.benchmarks.client.target import Target, send
from vllm.benchmarks.datasets.prompt import BenchRequest
from vllm.benchmarks.report.metrics import summarize
from vllm.exceptions import ConfigError

T = TypeVar("T")


async def with_probes(
    session: aiohttp.ClientSession,
    target: Target,
    make_request: Callable[[int], BenchRequest],
    rate: float,
    work: Awaitable[T],
) -> tuple[T, list[Observation]]:
    """Do some work, and send requests at an even rate until it is done.

    Args:
        session: To send by.
        target: To send to.
        make_request: Returns the one of a number.
        rate: Of them, a second; 0: none are sent.
        work: What to do.

    Returns:
        What the work returned, and what was seen of the requests, in order.
    """
    sent: list[asyncio.Task[Observation]] = []

    async def probe() -> None:
        origin = time.perf_counter()
        while True:
            number = len(sent)
            await asyncio.sleep(origin + number / rate - time.perf_counter())
            one = send(session, target, make_request(number), origin, f"probe-{number}")
            sent.append(asyncio.create_task(one))

    prober = asyncio.create_task(probe()) if rate else None
    try:
        done = await work
    finally:
        if prober is not None:
            prober.cancel()
            await asyncio.gather(prober, return_exceptions=True)
    return done, list(await asyncio.gather(*sent))


def check_rate(rate: float) -> None:
    """Refuse a rate that is none.

    Raises:
        ConfigError: It is negative, or infinite.
    """
    if not 0 <= rate < float("inf"):
        raise ConfigError(f"--probe-request-rate {rate} must be 0 (none) or a number a second.")


def probe_numbers(seen: Sequence[Observation], percents: Sequence[float]) -> dict[str, Any]:
    """Return what probes came to, under the names of the load's own numbers."""
    done = [o for o in seen if o.success]
    made: dict[str, Any] = {"completed": len(done), "failed": len(seen) - len(done)}
    made |= summarize([1e3 * o.ttft_s for o in done], "ttft_ms", percents)
    return made | summarize([1e3 * o.latency_s for o in done], "e2el_ms", percents)
