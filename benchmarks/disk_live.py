"""Is any request slower for a cache on disk? A trace served with one and without, side by side.

    python -m benchmarks.disk_live TRACE [--limit 120] [--skip 0] [--scale 8] [--pool-mib 12]
        [--disk 1GiB]

Two engines of the embedded model in one process, with pools of one size, of which one has a folder.
Each request is asked of both, right after the other and in turns first, so that both see the same
machine; one at a time, and the folder's writes of it end before the next. Of the trace the first
conversations of several requests are taken: those that have their second block in common. Each
block stands for ``512 / scale`` tokens; too long prompts are cut.

Prints one line: prompt tokens hit by each, requests that the disk gave something, and of these the
seconds to the first token against those of the engine without a folder, by the clock and of a
processor (p50, p99, worst); of all requests p50 and p99 of both engines.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.restore import ask, make_engine, settle, wait_open
from benchmarks.result import print_result
from vllm.benchmarks.datasets.timed_trace import DEFAULT_BLOCK, TimedRequest, read_timed_trace

_VOCABULARY = (10, 2000)
_LAST_TOKEN = 2001
# Ids that are left above those.
_NUM_LAST = 47
# Of a conversation, at least.
_TURNS = 3


def choose(path: Path, limit: int, skip: int) -> list[TimedRequest]:
    """Return all requests of some conversations, in their order.

    Args:
        path: The trace.
        limit: Conversations are taken until there are so many requests.
        skip: Conversations to leave out before.
    """
    whole = [request for request in read_timed_trace(path) if len(request.span_ids) > 1]
    counts = Counter(request.span_ids[1] for request in whole)
    chosen: set[int] = set()
    num_requests = 0
    for head in dict.fromkeys(request.span_ids[1] for request in whole):
        if num_requests >= limit:
            break
        if counts[head] < _TURNS:
            continue
        if skip:
            skip -= 1
            continue
        chosen.add(head)
        num_requests += counts[head]
    return [request for request in whole if request.span_ids[1] in chosen][:limit]


def spell(request: TimedRequest, number: int, scale: int, most: int) -> list[int]:
    """Return a prompt: the tokens of its blocks, cut, and one that its neighbours do not have."""
    size = DEFAULT_BLOCK // scale
    prompt: list[int] = []
    for span in request.span_ids:
        rng = random.Random(span)
        prompt += [rng.randrange(*_VOCABULARY) for _ in range(size)]
    return [
        *prompt[: min(most, request.num_prompt_tokens // scale)],
        _LAST_TOKEN + number % _NUM_LAST,
    ]


def quantiles(values: list[float]) -> dict[str, float]:
    """Return p50, p99 and the highest; nothing of nothing."""
    if not values:
        return {}
    ordered = sorted(values)
    last = len(ordered) - 1
    found = {f"p{p}": round(ordered[round(p / 100 * last)], 4) for p in (50, 99)}
    return {**found, "worst": round(ordered[-1], 4)}


def serve(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Ask both engines all requests; returns what is to be printed."""
    pool, most = arguments.pool_mib << 20, arguments.longest
    # In this order: prefixes of a process are named by the root of the engine that came last.
    without = make_engine("deepseek-v4", None, most + 64, pool)
    with_disk = make_engine("deepseek-v4", folder, most + 64, pool, arguments.disk)
    wait_open(with_disk)
    answers: dict[str, list[dict[str, Any]]] = {"with": [], "without": []}
    num_tokens = 0
    tier = with_disk._core._core.scheduler.connector._tier  # type: ignore[attr-defined]
    from_disk = []
    for number, request in enumerate(choose(arguments.trace, arguments.limit, arguments.skip)):
        prompt = spell(request, number, arguments.scale, most)
        num_tokens += len(prompt)
        engines = {"with": with_disk, "without": without}
        before = tier.reports.counts.look({}).restores.get("restored", 0)
        for name in sorted(engines, reverse=number % 2 == 1):
            answers[name].append(ask(engines[name], prompt))
            settle(with_disk)
        assert answers["with"][-1]["tokens"] == answers["without"][-1]["tokens"]
        if tier.reports.counts.look({}).restores.get("restored", 0) > before:
            from_disk.append(number)
    restores = dict(tier.reports.counts.look({}).restores)
    with_disk.shutdown()
    without.shutdown()

    def compare(measure: str) -> dict[str, float]:
        return quantiles(
            [answers["with"][i][measure] / answers["without"][i][measure] for i in from_disk]
        )

    def hit_pct(name: str) -> float:
        return round(100 * sum(answer["cached"] for answer in answers[name]) / num_tokens, 2)

    return {
        "requests": len(answers["with"]),
        "prompt_tokens": num_tokens,
        "hit_pct": {name: hit_pct(name) for name in answers},
        "restores": restores,
        "from_disk": len(from_disk),
        "share_by_clock": compare("s"),
        "share_of_processor": compare("processor_s"),
        "ttft_s": {name: quantiles([a["s"] for a in told]) for name, told in answers.items()},
        "ttft_processor_s": {
            name: quantiles([a["processor_s"] for a in told]) for name, told in answers.items()
        },
    }


def main() -> None:
    """Serve, and print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--limit", type=int, default=120)
    parser.add_argument("--skip", type=int, default=0, help="Conversations.")
    parser.add_argument("--scale", type=int, default=8)
    parser.add_argument("--longest", type=int, default=8000, help="Tokens of a prompt.")
    parser.add_argument("--pool-mib", type=int, default=12)
    parser.add_argument("--disk", default="1GiB")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        values = serve(arguments, Path(place) / "cache")
    config = {key: str(value) for key, value in vars(arguments).items() if key != "trace"}
    config |= {"trace": arguments.trace.name, "load": f"{os.getloadavg()[0]:.1f}"}
    print_result("disk_live", config, json.loads(json.dumps(values)))


if __name__ == "__main__":
    main()
