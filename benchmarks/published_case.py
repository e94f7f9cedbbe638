"""What the published case gains by hits: predicted from its baseline alone.

    python -m benchmarks.published_case [--pool-gib 12] [--requests 160] [--plot PNG]

The case: DeepSeek-V4-Flash on eight NPUs of an A3, 8,192 tokens in, 1,024 out, 32 at a time,
"repeat 0.9". Two columns were published: without hits, and with a change of the block size, copies
of partly filled blocks and retention. Only the first one calibrates the cost model; then the same
load is served by our scheduler and cache, under each reading of "repeat 0.9" and several policies,
and stands beside the second column.

Assumed: 32 requests start together; a step is at most 8,192 tokens; time grows with prompt tokens
and with running answers, not with context; a tenth of a decode step at batch 32 is the answers'
share; ``--block-size 32``, bf16 rows, no drafter; the pool's size; no time is lost to copies or
scheduling.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.result import print_result
from vllm.benchmarks.datasets.synthetic import Reading, RepeatShape
from vllm.benchmarks.report.metrics import measure
from vllm.benchmarks.report.plot import make_figure, save
from vllm.cachelab.sim.clock import ClockedRun, SimResult
from vllm.cachelab.sim.cost import CostModel
from vllm.cachelab.sim.engine import SimEngine
from vllm.cachelab.sim.grid import Variant, run_grid
from vllm.cachelab.sim.loads import repeat_load
from vllm.cachelab.sim.settings import SimSettings, find_hf_config

BASELINE = {
    "hit_rate": 0.0,
    "mean_ttft_ms": 14593.0,
    "p90_ttft_ms": 24798.0,
    "mean_tpot_ms": 36.9,
    "output_throughput": 616.8,
    "mean_e2el_ms": 53100.0,
}
PUBLISHED = {
    "hit_rate": 0.8154,
    "mean_ttft_ms": 6099.0,
    "p90_ttft_ms": 7019.0,
    "mean_tpot_ms": 27.9,
    "output_throughput": 886.6,
}
POLICIES = ("none", "0", "4096", "auto")
CONCURRENCY = 32
_GIB = 1 << 30
_SHAPE = RepeatShape(input_len=8192, output_len=1024, share=0.9, rate=0.9, pool=CONCURRENCY)
_DECODE_SHARE = 0.1


def make_settings(pool_gib: float) -> SimSettings:
    """Return the server of the case."""
    return SimSettings(
        find_hf_config("v4-flash"),
        block_size=32,
        pool_bytes=int(pool_gib * _GIB),
        max_model_len=16_384,
        scheduler={"max_num_batched_tokens": 8192, "max_num_seqs": 64},
    )


def serve(
    settings: SimSettings, cost: CostModel, shape: RepeatShape, num_requests: int
) -> SimResult:
    """Serve a load, 32 at a time."""
    engine = SimEngine(settings)
    load = repeat_load(shape, num_requests, engine.hash_unit, seed=0)
    return ClockedRun(engine, cost, CONCURRENCY).run(load)


def numbers(result: SimResult, first: int = 0) -> dict[str, float]:
    """Return the columns of the case.

    Args:
        result: A run.
        first: Requests before are left out of hits and times, not of the throughput.
    """
    seen = result.seen[first:]
    values = measure(seen, result.duration_s, (90,), {}).values
    whole = measure(result.seen, result.duration_s, (90,), {}).values
    cached = sum(o.usage.cached_tokens or 0 for o in seen)
    row = {key: float(values[key]) for key in BASELINE if key in values}
    row["output_throughput"] = float(whole["output_throughput"])
    row["hit_rate"] = cached / sum(o.num_prompt_tokens for o in seen)
    return row


def calibrate(settings: SimSettings) -> tuple[CostModel, dict[str, float]]:
    """Fit two times to the baseline column: of a prompt token, and of a decode step.

    Returns:
        The model, and what it gives for the baseline.
    """
    unrelated = replace(_SHAPE, reading=Reading.BEGINNING, share=0.0)
    prefill, decode = 1e-4, 0.024
    row: dict[str, float] = {}
    for _ in range(6):
        cost = CostModel(
            per_step=decode * (1 - _DECODE_SHARE),
            per_prefill_token=prefill,
            per_decode_token=decode * _DECODE_SHARE / CONCURRENCY,
        )
        row = numbers(serve(settings, cost, unrelated, CONCURRENCY))
        prefill *= BASELINE["mean_ttft_ms"] / row["mean_ttft_ms"]
        decode *= BASELINE["mean_tpot_ms"] / row["mean_tpot_ms"]
    return cost, row


def predict(
    job: tuple[SimSettings, CostModel, int], variant: Variant
) -> dict[str, dict[str, float]]:
    """Return the columns of every reading under one policy."""
    base, cost, num_requests = job
    rows = {}
    for reading in Reading:
        result = serve(variant.apply(base), cost, replace(_SHAPE, reading=reading), num_requests)
        rows[reading.value] = numbers(result)
        if reading is Reading.ROUNDS:
            rows["rounds, warm"] = numbers(result, CONCURRENCY)
    return rows


def format_row(name: str, row: dict[str, float]) -> str:
    """Return a line of the table."""
    gain = row["output_throughput"] / BASELINE["output_throughput"]
    return (
        f"| {name} | {100 * row['hit_rate']:.2f} | {row['mean_ttft_ms']:.0f} "
        f"| {row['p90_ttft_ms']:.0f} | {row['mean_tpot_ms']:.1f} "
        f"| {row['output_throughput']:.1f} | {gain:.2f}x |"
    )


def plot(path: Path, predicted: dict[str, dict[str, dict[str, float]]]) -> None:
    """Plot hit rates and times to first token by reading and policy."""
    figure, axes = make_figure(2)
    readings = list(next(iter(predicted.values())))
    for i, (policy, rows) in enumerate(predicted.items()):
        places = [n + 0.2 * i for n in range(len(readings))]
        axes[0].bar(places, [100 * rows[r]["hit_rate"] for r in readings], 0.19, label=policy)
        axes[1].bar(places, [rows[r]["mean_ttft_ms"] / 1e3 for r in readings], 0.19, label=policy)
    for axis, key, label in (
        (axes[0], "hit_rate", "hit (%)"),
        (axes[1], "mean_ttft_ms", "TTFT (s)"),
    ):
        scale = 100 if key == "hit_rate" else 1e-3
        axis.axhline(scale * PUBLISHED[key], color="black", linestyle="--", label="published")
        axis.set_xticks([n + 0.3 for n in range(len(readings))], readings)
        axis.set_ylabel(label)
    axes[1].axhline(BASELINE["mean_ttft_ms"] / 1e3, color="grey", linestyle=":", label="baseline")
    axes[1].legend(fontsize=7)
    save(figure, path)


def main(argv: Sequence[str] | None = None) -> None:
    """Calibrate, predict, and print the table and the JSON line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pool-gib", type=float, default=12.0)
    parser.add_argument("--requests", type=int, default=160)
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args(argv)
    settings = make_settings(args.pool_gib)
    cost, fitted = calibrate(settings)
    variants = [Variant(policy, 32, settings.pool_bytes) for policy in args.policies]
    found = run_grid(variants, partial(predict, (settings, cost, args.requests)), args.processes)
    predicted: dict[str, Any] = {variant.policy: rows for variant, rows in found.items()}
    print(
        "| | hit % | TTFT ms | P90 | TPOT ms | tok/s | to baseline |\n|---|--:|--:|--:|--:|--:|--:|"
    )
    print(format_row("published baseline", BASELINE))
    print(format_row("calibrated baseline", fitted))
    print(format_row("published change", PUBLISHED))
    for policy, rows in predicted.items():
        for reading, row in rows.items():
            print(format_row(f"`{policy}`, {reading}", row))
    if args.plot is not None:
        plot(args.plot, predicted)
    config = json.loads(json.dumps(vars(args), default=str))
    coefficients = {name: getattr(cost, name) for name in cost.__dataclass_fields__}
    values = {"cost": coefficients, "calibrated": fitted, "predicted": predicted}
    print_result("published_case", config, values)


if __name__ == "__main__":
    main()
