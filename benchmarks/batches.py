"""What a batch does: the order of its lines, and what others feel of it.

    python -m benchmarks.batches [--lines 10000] [--seconds 60]

The scheduler and the cache are the server's, the time of a step is that of
``CostModel.published_a3``: every run is the same.

Order: lines share 20 system texts, in a pool that holds about 4 of them beside the lines that run.
They are sent in the order of the file, which is a shuffle, and in that of ``prefix_key``.

Beside chats: conversations of ``tenant_flood`` at two rates, without and with ten lines a second.
"""

import argparse
import hashlib
from collections.abc import Iterator, Sequence
from functools import partial

from benchmarks.tenant_flood import turns
from vllm.benchmarks.draws import Draws
from vllm.cachelab.sim.clock import ClockedRun, LoadRequest
from vllm.cachelab.sim.cost import CostModel
from vllm.cachelab.sim.engine import SimEngine
from vllm.cachelab.sim.requests import PrefixUnits, SimRequest
from vllm.cachelab.sim.settings import SimSettings, find_hf_config
from vllm.config.tenants import BATCH_TENANT, DEFAULT_TENANT, with_batch_tenant
from vllm.entrypoints.batch.prefix_order import prefix_key
from vllm.v1.request import RequestStatus

SPAN = 256
SYSTEM_SPANS = 8
NUM_SYSTEMS = 20
NUM_OUTPUT = 32
CHAT_OUTPUT = 64
LINES_PER_S = 10


def make_file(num_lines: int, seed: int) -> list[tuple[int, bytes]]:
    """Return the system text of each line, and its key."""
    draws = Draws(seed, 0)
    lines = []
    for number in range(num_lines):
        system = draws.below(NUM_SYSTEMS)
        text = hashlib.sha256(str(system).encode()).hexdigest() * 100
        question = hashlib.sha256(f"line {number}".encode()).hexdigest()
        messages = [
            {"role": "system", "content": text},
            {"role": "user", "content": question},
        ]
        lines.append((system, prefix_key({"messages": messages})))
    return lines


def make_line(number: int, system: int, unit: int, time_s: float = 0.0) -> SimRequest:
    """Return a line behind one of the system texts."""
    spans = [(system + 1) * 1000 + i for i in range(SYSTEM_SPANS)] + [1_000_000 + number]
    return SimRequest(
        f"line-{number}",
        len(spans) * SPAN,
        NUM_OUTPUT,
        PrefixUnits(number, spans, unit, SPAN),
        time_s,
        tenant=BATCH_TENANT,
    )


def make_chats(rate: float, seconds: float, unit: int) -> Iterator[SimRequest]:
    """Yield the turns of conversations, so many a second."""
    draws = Draws(0, 1)
    prompts, time_s, number = turns(0, draws), 0.0, 0
    while (time_s := time_s + 0.1 / rate) < seconds:
        if draws.uniform() < 0.1:
            spans, number = next(prompts), number + 1
            units = PrefixUnits(1_000_000 + number, spans, unit, SPAN)
            yield SimRequest(
                f"chat-{number}",
                len(spans) * SPAN,
                CHAT_OUTPUT,
                units,
                time_s,
                tenant=DEFAULT_TENANT,
            )


def make_engine(blocks: int, num_places: int) -> SimEngine:
    """Return a server with batches."""
    settings = SimSettings(
        find_hf_config("v4-flash"),
        num_blocks=blocks,
        max_model_len=16_384,
        scheduler={
            "max_num_seqs": num_places,
            "max_num_batched_tokens": 2048,
            "tenants": with_batch_tenant(None),
        },
    )
    return SimEngine(settings, decode_stride=4)


def run_order(systems: Sequence[int], blocks: int, num_places: int) -> tuple[float, float]:
    """Return the share of prompt tokens that hit, and the seconds that all lines take."""
    engine = make_engine(blocks, num_places)
    unit = engine.hash_unit
    requests: list[LoadRequest] = [make_line(i, one, unit) for i, one in enumerate(systems)]
    result = ClockedRun(engine, CostModel.published_a3()).run(requests)
    seen = [s for s in result.seen if s.latency_s]
    assert len(seen) == len(systems)
    prompts = sum(s.num_prompt_tokens for s in seen)
    cached = sum(s.usage.cached_tokens or 0 for s in seen)
    return cached / prompts, max(s.start_s + s.chunk_s[-1] for s in seen)


def run_beside(rate: float, seconds: float, num_lines: int) -> tuple[float, float, int]:
    """Return the P50 and P90 TTFT of chats, and how many lines were answered meanwhile."""
    engine = make_engine(2400, 64)
    unit = engine.hash_unit
    requests: list[LoadRequest] = list(make_chats(rate, seconds, unit))
    requests += [
        make_line(i, i * NUM_SYSTEMS // num_lines, unit, i / LINES_PER_S) for i in range(num_lines)
    ]
    stop = partial(engine.scheduler.finish_requests, None, RequestStatus.FINISHED_ABORTED)
    run = ClockedRun(engine, CostModel.published_a3(), interruptions=[(seconds, stop)])
    seen = run.run(requests).seen
    chats = [s for s in seen if s.request_id.startswith("chat")]
    ttft = sorted(s.chunk_s[0] for s in chats if s.chunk_s)
    num_done = sum(bool(s.latency_s) for s in seen) - sum(bool(s.latency_s) for s in chats)
    return ttft[len(ttft) // 2], ttft[len(ttft) * 9 // 10], num_done


def main() -> None:
    """Run all cases and print their figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--lines", type=int, default=10_000)
    parser.add_argument("--blocks", type=int, default=420)
    parser.add_argument("--places", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    lines = make_file(args.lines, args.seed)
    orders = {"as in the file": lines, "by prefix": sorted(lines, key=lambda line: line[1])}
    print("| order of the lines | hit % | minutes |\n|---|--:|--:|")
    for name, order in orders.items():
        hits, seconds = run_order([system for system, _ in order], args.blocks, args.places)
        print(f"| {name} | {100 * hits:.1f} | {seconds / 60:.1f} |", flush=True)
    print(
        "\n| chats a second | lines | P50 TTFT ms | P90 | lines answered |\n|--:|--:|--:|--:|--:|"
    )
    for rate in (1.5, 3.0):
        for num_lines in (0, int(args.seconds * LINES_PER_S)):
            p50, p90, num_done = run_beside(rate, args.seconds, num_lines)
            row = f"| {rate} | {num_lines} | {1000 * p50:.0f} | {1000 * p90:.0f} | {num_done} |"
            print(row, flush=True)


if __name__ == "__main__":
    main()
