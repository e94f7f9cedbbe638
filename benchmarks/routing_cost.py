"""What a routing decision, and updates of a cache, cost: by replicas, prefixes and prompt length.

    python -m benchmarks.routing_cost --replicas 1000 --prefixes 10000000

Prompts are conversations of ten families, each with a common start of 1,024 tokens that every
replica holds; a request has a known conversation's start and something new. Hashing is not in it:
times are of this thread alone, as a busy machine's clock says little.
"""

import argparse
import random
import resource
import time

import numpy as np

from vllm.v1.engine.data_parallel.directory import CacheShape
from vllm.v1.engine.data_parallel.router import Router, RouterSettings
from vllm.v1.engine.wire import CoreStatus

UNIT = 32
START = 32
# As DeepSeek-V4-Flash's cache tells: two dense groups, checkpoints, and what a rebuild takes.
SHAPE = CacheShape(UNIT, (UNIT, 4 * UNIT, 0), 5589)


def fill(
    router: Router, rng: random.Random, replicas: int, prefixes: int, units: int
) -> tuple[list[list[int]], float, int]:
    """Tell a router of conversations; returns some, seconds of updates, and prefixes told."""
    families = [[rng.getrandbits(64) for _ in range(START)] for _ in range(10)]
    numbers = [0] * replicas
    some: list[list[int]] = []
    told, seconds, step = 0, 0.0, 0
    while told < prefixes:
        chain = [*rng.choice(families), *(rng.getrandbits(64) for _ in range(units - START))]
        rank = step % replicas if step < 3 * replicas else rng.randrange(replicas)
        new = chain if step < 3 * replicas else chain[START:]
        stored = {
            0: new,
            1: chain[len(chain) - len(new) + 3 :: 4],
            2: [chain[-1], chain[START - 1]],
        }
        status = CoreStatus(0, 0, 50_000, stored=stored, number=numbers[rank])
        began = time.thread_time()
        router.observe(rank, status, 0.0)
        seconds += time.thread_time() - began
        numbers[rank] += 1
        told += sum(map(len, stored.values()))
        step += 1
        if len(some) < 5000:
            some.append(chain)
    return some, seconds, told


def decide(
    router: Router, rng: random.Random, known: list[list[int]], units: int, decisions: int
) -> np.ndarray:
    """Return microseconds of decisions, with 500 requests in flight."""
    times = []
    for number in range(decisions):
        chain = rng.choice(known)[: rng.randrange(units // 2, units)]
        prompt = chain + [rng.getrandbits(64) for _ in range(rng.randrange(1, 65))]
        began = time.thread_time()
        router.route_prompt(str(number), prompt, len(prompt) * UNIT + 5)
        times.append(time.thread_time() - began)
        if number >= 500:
            router.end(str(number - 500))
    return np.array(times[500:]) * 1e6


def main() -> None:
    """Measure, and print a line of a table for each size."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 64, 1000])
    parser.add_argument("--prefixes", type=int, nargs="+", default=[1_000_000])
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 65536])
    parser.add_argument("--decisions", type=int, default=3000)
    args = parser.parse_args()
    print("| replicas | prefixes | prompt tokens | decision, us: P50 | P90 | P99 "
          "| updates, us/prefix | bytes/prefix |")  # fmt: skip
    print("|--:|--:|--:|--:|--:|--:|--:|--:|")
    for replicas in args.replicas:
        for prefixes in args.prefixes:
            for tokens in args.tokens:
                rng = random.Random(1)
                router = Router(RouterSettings(SHAPE, replicas, 128, 10**5, 32.0))
                before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
                units = tokens // UNIT
                known, seconds, told = fill(router, rng, replicas, prefixes, units)
                grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
                p50, p90, p99 = np.percentile(
                    decide(router, rng, known, units, args.decisions), [50, 90, 99]
                )
                size = f"{grown * 1024 / told:.0f}" if grown > 0 else "-"
                print(
                    f"| {replicas:,} | {told:,} | {tokens:,} | {p50:.0f} | {p90:.0f} | {p99:.0f} "
                    f"| {seconds / told * 1e6:.2f} | {size} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
