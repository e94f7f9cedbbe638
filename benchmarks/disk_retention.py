"""What should a full disk give up? Hits and restore times of the tier's own order and of others.

    python -m benchmarks.disk_retention NAME=TRACE ... [--limit 600] [--every 1] [--block 512]
        [--pool-gib 2] [--disks 8 32 128] [--orders ours lru] [--results FILE]

Serves a trace through the server's own scheduler, cache and tier policy (``vllm.cachelab.sim``):
rows have no bytes, steps and the disk take the time that a cost model and given rates say. The
first ``--limit`` of each ``--every``-th line are served, in their order, four at a time and as fast
as they go; of answers one token is computed, as traces say nothing of their text. ``ours`` gives up
superseded states first, then what was used least recently; ``lru`` does without the former;
``unlimited`` is ours, and writes over what is there without asking whether that pays. Sizes are
GiB; a disk of 0 is none, and one without end holds all.

Written down for each: prompt tokens hit in the pool and from the disk, bytes written and read, and
of restores the time against that of computing the same tokens by the same clock (p50, p99, worst).
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.disk_orders import LruTier, NotingTier
from benchmarks.result import describe_machine, find_commit
from vllm.benchmarks.datasets.timed_trace import TimedRequest, read_timed_trace
from vllm.cachelab.sim.clock import ClockedRun
from vllm.cachelab.sim.cost import CostModel
from vllm.cachelab.sim.engine import SimEngine
from vllm.cachelab.sim.geometries import GEOMETRIES
from vllm.cachelab.sim.loads import trace_load
from vllm.cachelab.sim.settings import SimSettings
from vllm.cachelab.sim.tier import DiskRates

_GIB = 1 << 30
_ENDLESS_GIB = 1 << 9
_AT_ONCE = 4


TIERS = {"ours": NotingTier, "lru": LruTier, "unlimited": NotingTier}
# Who sets a limit that nobody reaches writes whatever is computed.
_NO_LIMIT = {"unlimited": {"write_budget_per_day": 1 << 60}}


@dataclass(frozen=True, slots=True)
class Case:
    """One run.

    Attributes:
        order: Of giving up.
        disk_gib: Of the folder.
    """

    order: str
    disk_gib: float

    def apply(self, settings: SimSettings) -> SimSettings:
        """Return the settings with this disk."""
        if not self.disk_gib:
            return settings
        folder = {"type": "fs", "root_dir": "-", "max_size": int(self.disk_gib * _GIB)}
        folder |= _NO_LIMIT.get(self.order, {})
        tier = {
            "class": f"{NotingTier.__module__}:{TIERS[self.order].__name__}",
            "extra": {"secondary_tiers": [folder], "warm": 0},
        }
        return replace(settings, tier=tier)


def run_case(
    case: Case,
    settings: SimSettings,
    trace: Sequence[TimedRequest],
    block: int,
    cost: CostModel,
    rates: DiskRates,
) -> dict[str, Any]:
    """Serve a trace; returns what came of it."""
    began = time.process_time()
    engine = SimEngine(case.apply(settings))
    if engine.tier is not None:
        engine.tier.use_rates(rates)
    load = trace_load(trace, block, engine.hash_unit, float("inf"))
    result = ClockedRun(engine, cost, _AT_ONCE).run(load)
    prompts = sum(seen.num_prompt_tokens for seen in result.seen if seen.success)
    cached = sum(seen.usage.cached_tokens or 0 for seen in result.seen if seen.success)
    ttft = sorted(seen.ttft_s for seen in result.seen if seen.success)
    found: dict[str, Any] = {
        "order": case.order if case.disk_gib else None,
        "disk_gib": case.disk_gib if case.disk_gib < _ENDLESS_GIB else None,
        "prompt_tokens": prompts,
        "hit_pct": round(100 * cached / prompts, 2),
        "ttft_s": {f"p{p}": round(_quantile(ttft, p / 100), 4) for p in (50, 99)},
        "simulated_s": round(result.duration_s, 1),
        "failed": sum(not seen.success for seen in result.seen),
    }
    tier = engine.tier
    if isinstance(tier, NotingTier):
        external = sum(count for count, _ in tier.restored.values())
        found["from_disk_pct"] = round(100 * external / prompts, 2)
        found["written_gib"] = round(tier.device.written_bytes / _GIB, 2)
        found["read_gib"] = round(tier.device.read_bytes / _GIB, 2)
        found["restores"] = _compare_times(tier, cost)
    found["processor_s"] = round(time.process_time() - began, 1)
    return found


def _compare_times(tier: NotingTier, cost: CostModel) -> dict[str, float]:
    """Return how long restores took, as a share of computing the same tokens alone."""
    shares = []
    for request_id, seconds in tier.device.restore_s.items():
        if request_id not in tier.restored:
            # Rows alone: what they spare is seen when their request looks again.
            continue
        count, _ = tier.restored[request_id]
        shares.append(seconds / (count * cost.per_prefill_token))
    shares.sort()
    if not shares:
        return {"count": 0}
    made = {f"p{p}": round(_quantile(shares, p / 100), 3) for p in (50, 99)}
    slower = sum(share > 1 for share in shares)
    return {"count": len(shares), **made, "worst": round(shares[-1], 3), "slower": slower}


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[round(share * (len(ordered) - 1))]


def main() -> None:
    """Serve the traces, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", nargs="+", metavar="NAME=TRACE")
    parser.add_argument("--limit", type=int, default=600)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--block", type=int, default=512, help="Tokens under one id of a trace.")
    parser.add_argument("--geometry", choices=sorted(GEOMETRIES), default="v4-flash")
    parser.add_argument("--unit", type=int, default=128)
    parser.add_argument("--max-model-len", type=int, default=262_144)
    parser.add_argument("--pool-gib", type=float, default=2.0)
    parser.add_argument("--disks", nargs="+", type=float, default=[8, 32, 128])
    parser.add_argument("--orders", nargs="+", choices=sorted(TIERS), default=["ours", "lru"])
    parser.add_argument("--read-gb-per-s", type=float, default=1.1)
    parser.add_argument("--write-gb-per-s", type=float, default=0.8)
    parser.add_argument("--results", type=Path)
    args = parser.parse_args()
    rates = DiskRates(1e9 * args.read_gb_per_s, 1e9 * args.write_gb_per_s)
    cost = CostModel.published_a3()
    settings = SimSettings(
        GEOMETRIES[args.geometry],
        block_size=args.unit,
        pool_bytes=int(args.pool_gib * _GIB),
        max_model_len=args.max_model_len,
        scheduler={"max_num_batched_tokens": 8192},
    )
    cases = [Case("ours", 0.0)]
    cases += [Case(order, disk) for disk in args.disks for order in args.orders]
    cases.append(Case("ours", float(_ENDLESS_GIB)))
    runs = []
    for entry in args.traces:
        name, _, path = entry.partition("=")
        trace = [
            replace(request, num_output_tokens=1)
            for request in read_timed_trace(
                Path(path), block=args.block, every=args.every, limit=args.limit
            )
        ]
        for case in cases:
            found = {"trace": name, **run_case(case, settings, trace, args.block, cost, rates)}
            print(json.dumps(found), flush=True)
            runs.append(found)
    if args.results is not None:
        config = {key: str(value) for key, value in vars(args).items() if key != "results"}
        whole = {
            "benchmark": "disk_retention",
            "commit": find_commit(),
            "hardware": describe_machine(),
            "config": config,
            "runs": runs,
        }
        args.results.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
