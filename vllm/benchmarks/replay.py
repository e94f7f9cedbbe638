"""``vllm bench replay``: a trace through the server's own scheduler and cache, at true scale."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from vllm.benchmarks.datasets.lines import BadLines
from vllm.benchmarks.datasets.timed_trace import TimedRequest, read_timed_trace
from vllm.benchmarks.fleet_replay import run_fleet_replay
from vllm.benchmarks.report.cache import cache_numbers
from vllm.benchmarks.report.metrics import measure, parse_metrics, parse_percentiles
from vllm.benchmarks.report.plot import check_can_plot, plot_lines, plot_run
from vllm.benchmarks.report.table import format_table
from vllm.cachelab.sim.clock import ClockedRun, SimResult
from vllm.cachelab.sim.cores import SimCores
from vllm.cachelab.sim.cost import CostModel
from vllm.cachelab.sim.engine import Acceptance, SimEngine
from vllm.cachelab.sim.grid import Variant, run_grid
from vllm.cachelab.sim.loads import trace_load
from vllm.cachelab.sim.settings import SimSettings, find_hf_config
from vllm.config.parallel import ParallelConfig

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class ReplayJob:
    """What every setting of a grid replays.

    Attributes:
        trace: The requests.
        settings: Of the server, but for what a variant says.
        cost: Time of a step.
        block: Tokens under one id of the trace.
        speed: How many times as fast they come; infinite: all at once.
        max_concurrency: Requests that clients have open.
        acceptance: Of drafts.
        decode_stride: Tokens a decode step brings.
        parallel: Engine cores, each with the pool of the setting, and how requests are shared out.
        shows_progress: Whether a bar follows the requests.
    """

    trace: tuple[TimedRequest, ...]
    settings: SimSettings
    cost: CostModel
    block: int
    speed: float = 1.0
    max_concurrency: int | None = None
    acceptance: Acceptance = field(default_factory=Acceptance)
    decode_stride: int = 1
    shows_progress: bool = False
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def run(self, variant: Variant) -> SimResult:
        """Replay under one setting."""
        settings = variant.apply(self.settings)
        silent = None if self.shows_progress else True
        with tqdm(total=len(self.trace), unit="req", disable=silent, mininterval=1.0) as bar:
            if self.parallel.data_parallel_size > 1:
                cores = SimCores(settings, self.parallel, self.acceptance, self.decode_stride)
                load = trace_load(self.trace, self.block, cores.hash_unit, self.speed)
                return cores.run(load, self.cost, self.max_concurrency, bar.update)
            engine = SimEngine(settings, self.acceptance, self.decode_stride)
            load = trace_load(self.trace, self.block, engine.hash_unit, self.speed)
            return ClockedRun(engine, self.cost, self.max_concurrency, bar.update).run(load)


def run_replay(args: argparse.Namespace) -> int:
    """Replay a trace; returns the exit code."""
    if args.servers is not None:
        return run_fleet_replay(args)
    metrics = parse_metrics(args.percentile_metrics)
    percents = parse_percentiles(args.metric_percentiles)
    check_can_plot(args.plot)
    variants = [
        Variant(policy, block_size, int(gib * _GIB))
        for policy in args.policies
        for block_size in args.block_size
        for gib in args.pool_gib
    ]
    job = make_job(args)
    job = replace(job, shows_progress=len(variants) == 1 and not args.disable_tqdm)
    results = run_grid(
        variants,
        partial(_run_job, job),
        args.processes,
        shows_progress=len(variants) > 1 and not args.disable_tqdm,
    )
    rows = {
        variant: _numbers(result, percents, args.goodput_ttft_ms)
        for variant, result in results.items()
    }
    if len(variants) == 1:
        ((variant, result),) = results.items()
        print(
            format_table(
                rows[variant],
                cache_numbers(result.seen, percents),
                metrics=metrics,
                percents=percents,
                request_rate=float("inf"),
                max_concurrency=args.max_concurrency,
            )
        )
        print(f"Preempted: {result.num_preemptions}; computed again: {result.recomputed_tokens}")
    else:
        print(format_grid(rows))
        print(f"\nMost hits: {_best(rows).flags()}")
    if args.plot is not None:
        _plot(args.plot, results, rows, args.trace.name)
    if args.output_json is not None:
        _write(args.output_json, args, rows)
    failed = sum(numbers["failed"] for numbers in rows.values())
    if failed:
        print(f"{failed} requests could never run: the pool is too small.", file=sys.stderr)
    return 0


def _run_job(job: ReplayJob, variant: Variant) -> SimResult:
    return job.run(variant)


def make_job(args: argparse.Namespace) -> ReplayJob:
    """Return what a command line asks to replay.

    Raises:
        ConfigError: The trace or a value is wrong.
    """
    bad = BadLines(args.trace, args.strict)
    trace = read_timed_trace(
        args.trace, block=args.trace_block_size, every=args.every, limit=args.limit, bad=bad
    )
    if not trace:
        raise bad.nothing_left()
    if args.max_output_tokens is not None:
        most = args.max_output_tokens
        trace = [replace(r, num_output_tokens=min(r.num_output_tokens, most)) for r in trace]
    longest = max(r.num_prompt_tokens + r.num_output_tokens for r in trace) + 1
    speculative = None
    if args.mtp:
        speculative = {"method": "mtp", "num_speculative_tokens": args.mtp}
    settings = SimSettings(
        find_hf_config(args.model),
        dtype=args.dtype,
        cache_dtype=args.kv_cache_dtype,
        max_model_len=longest,
        scheduler={
            "max_num_batched_tokens": args.max_num_batched_tokens,
            "max_num_seqs": args.max_num_seqs,
        },
        speculative=speculative,
    )
    cost = CostModel.load(args.cost) if args.cost is not None else CostModel.published_a3()
    return ReplayJob(
        tuple(trace),
        settings,
        cost,
        args.trace_block_size,
        args.trace_speed,
        args.max_concurrency,
        Acceptance(args.mtp_acceptance, args.seed),
        args.decode_stride,
        parallel=ParallelConfig(
            data_parallel_size=args.data_parallel_size, data_parallel_routing=args.dp_policy
        ),
    )


def _numbers(
    result: SimResult, percents: Sequence[float], limit_ms: float | None
) -> dict[str, Any]:
    goodput = {} if limit_ms is None else {"ttft": limit_ms}
    numbers = measure(result.seen, result.duration_s, percents, goodput).values
    cache = cache_numbers(result.seen, percents)
    return {
        **numbers,
        "hit_rate": cache.get("hit_rate", 0.0),
        "steps": result.num_steps,
        "preemptions": result.num_preemptions,
        "recomputed_tokens": result.recomputed_tokens,
        "miss_tokens": dict(result.miss_tokens),
    }


def format_grid(rows: dict[Variant, dict[str, Any]]) -> str:
    """Return a table with a line per setting."""
    lines = [
        "| policy | block size | GiB | hit % | computed again, M | mean TTFT ms | P99 | mean TPOT "
        "ms | tok/s | preempted |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for variant, n in rows.items():
        tail = next((n[key] for key in ("p99_ttft_ms", "p90_ttft_ms") if key in n), float("nan"))
        lines.append(
            f"| `{variant.policy}` | {variant.block_size} | {variant.pool_bytes / _GIB:g} "
            f"| {100 * n['hit_rate']:.1f} | {n['recomputed_tokens'] / 1e6:.2f} "
            f"| {n['mean_ttft_ms']:.0f} | {tail:.0f} | {n['mean_tpot_ms']:.1f} "
            f"| {n['output_throughput']:.0f} | {n['preemptions']} |"
        )
    return "\n".join(lines)


def _best(rows: dict[Variant, dict[str, Any]]) -> Variant:
    """Return the setting with the most hits; of equals the smallest pool."""
    return max(rows, key=lambda v: (round(rows[v]["hit_rate"], 4), -v.pool_bytes))


def _plot(
    path: Path,
    results: dict[Variant, SimResult],
    rows: dict[Variant, dict[str, Any]],
    title: str,
) -> None:
    if len(results) == 1:
        (result,) = results.values()
        plot_run(result.seen, path, f"{title}, replayed")
        return
    series: dict[str, list[tuple[float, float]]] = {}
    sizes = {variant.block_size for variant in rows}
    for variant, numbers in rows.items():
        name = variant.policy if len(sizes) == 1 else f"{variant.policy}, {variant.block_size}"
        point = (variant.pool_bytes / _GIB, 100 * numbers["hit_rate"])
        series.setdefault(name, []).append(point)
    plot_lines(
        series,
        path,
        x_label="pool (GiB)",
        y_label="prompt tokens hit (%)",
        title=title,
        is_log_x=True,
    )


def _write(path: Path, args: argparse.Namespace, rows: dict[Variant, dict[str, Any]]) -> None:
    config = {k: v for k, v in vars(args).items() if k != "run"}
    runs = [
        {
            "policy": variant.policy,
            "block_size": variant.block_size,
            "pool_bytes": variant.pool_bytes,
            **numbers,
        }
        for variant, numbers in rows.items()
    ]
    text = json.dumps({"config": config, "runs": runs}, default=str)
    path.write_text(text + "\n", encoding="utf-8")
