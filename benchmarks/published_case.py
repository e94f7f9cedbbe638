"""What the two published cases gain by hits: predicted from their baselines, and asked of servers.

    python -m benchmarks.published_case [--cases first second] [--pool-gib 12 24] [--requests 160]
        [--live] [--plot PNG]

DeepSeek-V4-Flash on eight NPUs of an A3, answers of 1,024 tokens, 32 at a time: `first` has prompts
of 8,192 tokens, "repeat 0.9", and a baseline without hits; `second` a baseline that hits 44.53%,
and prompts of about 32,768 tokens (its settings were not published; its prefill throughput times
its time to first token say so). Two columns were published of each: before, and with a change of
the block size, copies of partly filled blocks and retention. Only the first one calibrates the cost
model, with a load that hits as much; then the same load is served by our scheduler and cache, under
each reading of "repeat 0.9" and several policies, and stands beside the second column.

Assumed: 32 requests start together; a step is at most 8,192 tokens; time grows with prompt tokens
and with running answers, not with context; a tenth of a decode step at batch 32 is the answers'
share; ``--block-size 32``, bf16 rows, no drafter; the pool's size; no time is lost to copies or
scheduling.

``--live`` also loads servers of the embedded model with the two shapes (``benchmarks.live_case``):
1,024 tokens, and 32,768, more than a whole block of the old behaviour, so that it hits too.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import live_case
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


@dataclass(frozen=True, slots=True)
class Case:
    """One published load.

    Attributes:
        input_len: Tokens of a prompt.
        baseline: The column before the change: hit rate, times in ms, output tokens per second.
        published: The same with the change.
        live: Flags of ``benchmarks.live_case`` for its shape on a small machine.
    """

    input_len: int
    baseline: Mapping[str, float]
    published: Mapping[str, float]
    live: Sequence[str]

    @property
    def shape(self) -> RepeatShape:
        """The load."""
        return RepeatShape(
            input_len=self.input_len, output_len=1024, share=0.9, rate=0.9, pool=CONCURRENCY
        )

    @property
    def columns(self) -> list[str]:
        """What was published of both."""
        return [name for name in _COLUMNS if name in self.baseline]


_COLUMNS = ("hit_rate", "mean_ttft_ms", "p90_ttft_ms", "mean_tpot_ms", "output_throughput")
CONCURRENCY = 32
CASES: Mapping[str, Case] = {
    "first": Case(
        8192,
        {
            "hit_rate": 0.0,
            "mean_ttft_ms": 14593.2,
            "p90_ttft_ms": 24798.3,
            "mean_tpot_ms": 36.9,
            "output_throughput": 616.8,
        },
        {
            "hit_rate": 0.8154,
            "mean_ttft_ms": 6098.9,
            "p90_ttft_ms": 7018.8,
            "mean_tpot_ms": 27.9,
            "output_throughput": 886.6,
        },
        ("--input-len", "1024", "--output-len", "64", "--concurrency", "8", "--rounds", "4"),
    ),
    # Throughput was published with the prompts' tokens: a 33rd of it is the answers'.
    "second": Case(
        32_768,
        {
            "hit_rate": 0.4453,
            "mean_ttft_ms": 14298.8,
            "mean_tpot_ms": 35.4,
            "output_throughput": 20945.7 / 33,
        },
        {
            "hit_rate": 0.7770,
            "mean_ttft_ms": 8623.7,
            "mean_tpot_ms": 33.7,
            "output_throughput": 24432.4 / 33,
        },
        (
            *("--input-len", "32768", "--output-len", "32", "--concurrency", "2"),
            *("--rounds", "4", "--pool-mib", "1024"),
        ),
    ),
}
POLICIES = ("none", "0", "4096", "auto")
_GIB = 1 << 30
_DECODE_SHARE = 0.1


def make_settings(case: Case, pool_gib: float) -> SimSettings:
    """Return the server of a case."""
    return SimSettings(
        find_hf_config("v4-flash"),
        block_size=32,
        pool_bytes=int(pool_gib * _GIB),
        max_model_len=2 * case.input_len,
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
    """Return the columns of a run.

    Args:
        result: A run.
        first: Requests before are left out of hits and times, not of the throughput.
    """
    seen = result.seen[first:]
    values = measure(seen, result.duration_s, (90,), {}).values
    whole = measure(result.seen, result.duration_s, (90,), {}).values
    cached = sum(o.usage.cached_tokens or 0 for o in seen)
    row = {key: float(values[key]) for key in _COLUMNS if key in values}
    row["output_throughput"] = float(whole["output_throughput"])
    row["hit_rate"] = cached / sum(o.num_prompt_tokens for o in seen)
    return row


def calibrate(case: Case, settings: SimSettings) -> tuple[CostModel, dict[str, float]]:
    """Fit two times to a baseline's column: of a prompt token, and of a decode step.

    The load shares as much of its prompts as the baseline hit.

    Returns:
        The model, and what it gives for the baseline.
    """
    hit_rate = case.baseline["hit_rate"]
    # Of the requests that start together the first hits nothing.
    share = hit_rate * CONCURRENCY / (CONCURRENCY - 1)
    load = replace(case.shape, reading=Reading.BEGINNING, share=share)
    prefill, decode = 1e-4, 0.024
    row: dict[str, float] = {}
    for _ in range(6):
        cost = CostModel(
            per_step=decode * (1 - _DECODE_SHARE),
            per_prefill_token=prefill,
            per_decode_token=decode * _DECODE_SHARE / CONCURRENCY,
        )
        row = numbers(serve(settings, cost, load, CONCURRENCY))
        prefill *= case.baseline["mean_ttft_ms"] / row["mean_ttft_ms"]
        decode *= case.baseline["mean_tpot_ms"] / row["mean_tpot_ms"]
    return cost, row


def predict(
    job: tuple[Case, SimSettings, CostModel, int], variant: Variant
) -> dict[str, dict[str, float]]:
    """Return the columns of every reading under one policy."""
    case, base, cost, num_requests = job
    rows = {}
    for reading in Reading:
        result = serve(
            variant.apply(base), cost, replace(case.shape, reading=reading), num_requests
        )
        rows[reading.value] = numbers(result)
        if reading is Reading.ROUNDS:
            rows["rounds, warm"] = numbers(result, CONCURRENCY)
    return rows


def format_row(name: str, row: Mapping[str, float], baseline: Mapping[str, float]) -> str:
    """Return a line of the table; a dash where a figure was not published."""
    gain = row["output_throughput"] / baseline["output_throughput"]
    p90 = f"{row['p90_ttft_ms']:.0f}" if "p90_ttft_ms" in row else "-"
    return (
        f"| {name} | {100 * row['hit_rate']:.2f} | {row['mean_ttft_ms']:.0f} | {p90} "
        f"| {row['mean_tpot_ms']:.1f} | {row['output_throughput']:.1f} | {gain:.2f}x |"
    )


def plot(case: Case, path: Path, predicted: dict[str, dict[str, dict[str, float]]]) -> None:
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
        axis.axhline(scale * case.published[key], color="black", linestyle="--", label="published")
        axis.set_xticks([n + 0.3 for n in range(len(readings))], readings)
        axis.set_ylabel(label)
    axes[1].axhline(
        case.baseline["mean_ttft_ms"] / 1e3, color="grey", linestyle=":", label="baseline"
    )
    axes[1].legend(fontsize=7)
    save(figure, path)


def run_case(name: str, pool_gib: float, args: argparse.Namespace) -> dict[str, Any]:
    """Calibrate and predict one case; print its table."""
    case = CASES[name]
    settings = make_settings(case, pool_gib)
    cost, fitted = calibrate(case, settings)
    variants = [Variant(policy, 32, settings.pool_bytes) for policy in args.policies]
    job = (case, settings, cost, args.requests)
    found = run_grid(variants, partial(predict, job), args.processes)
    predicted: dict[str, Any] = {variant.policy: rows for variant, rows in found.items()}
    print(f"\n{name}: {case.input_len} tokens in, a pool of {pool_gib:g} GiB\n")
    print("| | hit % | TTFT ms | P90 | TPOT ms | tok/s | to baseline |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    print(format_row("published baseline", case.baseline, case.baseline))
    print(format_row("calibrated baseline", fitted, case.baseline))
    print(format_row("published change", case.published, case.baseline))
    for policy, rows in predicted.items():
        for reading, row in rows.items():
            print(format_row(f"`{policy}`, {reading}", row, case.baseline))
    if args.plot is not None:
        plot(
            case,
            args.plot.with_stem(f"{args.plot.stem}{'' if name == 'first' else '_' + name}"),
            predicted,
        )
    coefficients = {field: getattr(cost, field) for field in cost.__dataclass_fields__}
    return {"cost": coefficients, "calibrated": fitted, "predicted": predicted}


def main(argv: Sequence[str] | None = None) -> None:
    """Calibrate, predict, ask servers if wanted; print tables and the JSON line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--pool-gib", nargs="+", type=float, default=[12.0, 24.0])
    parser.add_argument("--requests", type=int, default=160)
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--live", action="store_true")
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args(argv)
    pools = {name: args.pool_gib[min(i, len(args.pool_gib) - 1)] for i, name in enumerate(CASES)}
    values = {name: run_case(name, pools[name], args) for name in args.cases}
    for name in args.cases if args.live else ():
        print(f"\n{name}, live: {' '.join(CASES[name].live)}\n", flush=True)
        values[name]["live"] = live_case.measure_all(live_case.read_flags(CASES[name].live))
    print_result("published_case", json.loads(json.dumps(vars(args), default=str)), values)


if __name__ == "__main__":
    main()
