"""``vllm cache simulate``: the recorded run again, and under other settings."""

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from vllm.benchmarks.report.plot import check_can_plot, plot_lines
from vllm.cachelab.sim.clock import SimResult
from vllm.cachelab.sim.grid import NO_CACHE, Variant, run_grid
from vllm.cachelab.twin.exact import ExactTwin, TwinResult
from vllm.cachelab.twin.rebuild import check_rebuilt, environment_of, settings_of
from vllm.cachelab.twin.trace_file import CacheTrace, RecordedRequest, read_trace
from vllm.cachelab.twin.whatif import (
    WhatIf,
    check_block_sizes,
    fit_acceptance,
    fit_cost,
    recorded_variant,
)
from vllm.exceptions import ConfigError
from vllm.v1.messages import PrefillStats

_GIB = 1 << 30
_MAX_SHOWN = 3


def run_simulate(args: argparse.Namespace) -> int:
    """Replay a trace; returns the exit code (1: the twin is not the run that was recorded)."""
    check_can_plot(args.plot)
    trace = read_trace(args.trace, is_strict=args.strict)
    header = trace.header
    if not trace.requests:
        raise ConfigError(f"{args.trace} holds no request.")
    settings = settings_of(header)
    with environment_of(header):
        check_rebuilt(header, settings)
    check_block_sizes(trace, args.block_size or ())
    twin = ExactTwin(trace).run()
    is_equal = print_comparison(trace, twin)
    if args.per_request is not None:
        write_per_request(args.per_request, trace, twin)
    if args.save_cost is not None:
        fit_cost(twin).save(args.save_cost)
    own = recorded_variant(trace)
    variants = _variants(args, own)
    if len(variants) > 1:
        _run_grid(args, trace, twin, own, variants)
    return 0 if is_equal or not trace.is_whole else 1


def print_comparison(trace: CacheTrace, twin: TwinResult) -> bool:
    """Print how the twin's hits compare with life's; returns whether they are equal."""
    pairs = [
        (request, twin.cached_tokens.get(number))
        for number, request in trace.requests.items()
        if request.cached_tokens is not None
    ]
    wrong = [(r, found) for r, found in pairs if found != r.cached_tokens]
    told = [(r, twin.misses.get(number)) for number, r in trace.requests.items() if r.told]
    unlike = [r for r, stats in told if not _is_as_told(r, stats)]
    prompts = sum(r.added.num_prompt_tokens for r, _ in pairs)
    cached = sum(r.cached_tokens or 0 for r, _ in pairs)
    share = cached / prompts if prompts else 0.0
    print(
        f"{len(pairs)} requests, {twin.num_steps} steps, {twin.num_preemptions} preemptions; "
        f"recorded: {cached} of {prompts} prompt tokens hit ({100 * share:.2f}%)."
    )
    print(f"Twin: cached tokens equal for {len(pairs) - len(wrong)} of {len(pairs)} requests.")
    for request, found in wrong[:_MAX_SHOWN]:
        print(f"  {request.response_id}: recorded {request.cached_tokens}, twin {found}")
    if told:
        print(
            f"Sources of hits and reasons of misses equal for {len(told) - len(unlike)} of "
            f"{len(told)} requests."
        )
        for request in unlike[:_MAX_SHOWN]:
            print(f"  {request.response_id}: recorded {request.told}")
    if not trace.is_whole or trace.num_lost:
        print(
            "The trace begins in the middle of the run: its first part was dropped "
            "(--cache-trace-max-bytes), so what the cache held then is not known."
        )
    elif twin.diverged_at is not None:
        print(f"The twin's steps differ from step {twin.diverged_at} on.")
    return not (wrong or unlike)


def _is_as_told(request: RecordedRequest, stats: PrefillStats | None) -> bool:
    """Whether the twin's tokens came from where they came in life."""
    told = request.told
    assert told is not None
    return (
        stats is not None
        and stats.hit_sources() == told.sources
        and stats.miss_tokens == told.misses
    )


def write_per_request(path: Path, trace: CacheTrace, twin: TwinResult) -> None:
    """Write a line of JSON for each request that was admitted; prompts of one response add up."""
    rows: dict[str, dict[str, Any]] = {}
    for number, request in trace.requests.items():
        cached = twin.cached_tokens.get(number)
        if cached is None or request.added.is_extra_answer:
            continue
        row = rows.setdefault(
            request.response_id,
            {"request_id": request.response_id, "prompt_tokens": 0, "cached_tokens": 0},
        )
        row["prompt_tokens"] += request.added.num_prompt_tokens
        row["cached_tokens"] += cached
        if request.told is not None:
            sources = row.setdefault("sources", {})
            for source, count in twin.misses[number].hit_sources().items():
                sources[source] = sources.get(source, 0) + count
    with path.open("w", encoding="utf-8") as file:
        for row in rows.values():
            file.write(json.dumps(row) + "\n")


def _variants(args: argparse.Namespace, own: Variant) -> list[Variant]:
    """Return the grid that was asked for, with the recorded settings first."""
    # A record without a cache asks what one would hit.
    policies = args.policies or ["auto" if own.policy == NO_CACHE else own.policy]
    pools = [int(gib * _GIB) for gib in args.pool_gib or ()] or [own.pool_bytes]
    disks: list[int | None] = [int(gib * _GIB) for gib in args.disk_gib or ()]
    disks = disks or [own.disk_bytes]
    if args.disk_gib and own.disk_bytes is None:
        raise ConfigError(
            "--disk-gib is about a cache folder of a set size, and none was recorded: record with "
            "--prefix-cache-dir and --prefix-cache-disk-size."
        )
    grid = [
        Variant(policy, size, pool, disk)
        for policy in policies
        for size in args.block_size or [own.block_size]
        for pool in pools
        for disk in disks
    ]
    return [own, *(variant for variant in grid if variant != own)]


@dataclass(frozen=True, slots=True)
class GridRow:
    """What one setting came to.

    Attributes:
        hit_rate: Share of prompt tokens.
        computed: Prompt tokens that were computed.
        recomputed: Of those, computed before.
        mean_ttft_ms: By the fitted clock.
        num_preemptions: Requests that computed again.
    """

    hit_rate: float
    computed: int
    recomputed: int
    mean_ttft_ms: float
    num_preemptions: int

    @classmethod
    def of(cls, result: SimResult) -> "GridRow":
        """Return the row of a replay."""
        done = [o for o in result.seen if o.success]
        prompts = sum(o.num_prompt_tokens for o in done)
        cached = sum(o.usage.cached_tokens or 0 for o in done)
        ttft = sum(o.ttft_s for o in done) / max(1, len(done))
        return cls(
            cached / max(1, prompts),
            prompts - cached,
            result.recomputed_tokens,
            1e3 * ttft,
            result.num_preemptions,
        )


def _measure(job: WhatIf, variant: Variant) -> GridRow:
    return GridRow.of(job.run(variant))


def _run_grid(
    args: argparse.Namespace,
    trace: CacheTrace,
    twin: TwinResult,
    own: Variant,
    variants: list[Variant],
) -> None:
    job = WhatIf(trace, fit_cost(twin), fit_acceptance(trace, twin))
    rows = run_grid(
        variants, partial(_measure, job), args.processes, shows_progress=not args.disable_tqdm
    )
    print()
    print(format_rows(rows, own))
    best = max(rows, key=lambda v: (round(rows[v].hit_rate, 4), -v.pool_bytes))
    print(f"\nMost hits: {best.flags()}")
    if args.plot is not None:
        _plot(args.plot, rows, args.trace.name)
    if args.output_json is not None:
        runs = [
            {
                "policy": v.policy,
                "block_size": v.block_size,
                "pool_bytes": v.pool_bytes,
                "disk_bytes": v.disk_bytes,
                "flags": v.flags(),
                **{name: getattr(row, name) for name in GridRow.__dataclass_fields__},
            }
            for v, row in rows.items()
        ]
        args.output_json.write_text(json.dumps({"runs": runs}, indent=2) + "\n", encoding="utf-8")


def format_rows(rows: Mapping[Variant, GridRow], own: Variant) -> str:
    """Return the table of a grid; times are those of the clock fitted to the record."""
    lines = [
        "| policy | block size | pool GiB | disk GiB | hit % | computed | computed again "
        "| mean TTFT ms | preempted |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for variant, row in rows.items():
        name = f"`{variant.policy}`" + (" (recorded)" if variant == own else "")
        lines.append(
            f"| {name} | {variant.block_size} | {variant.pool_bytes / _GIB:.4g} "
            f"| {_gib(variant.disk_bytes)} | {100 * row.hit_rate:.2f} | {row.computed} "
            f"| {row.recomputed} | {row.mean_ttft_ms:.1f} | {row.num_preemptions} |"
        )
    return "\n".join(lines)


def _gib(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / _GIB:.4g}"


def _plot(path: Path, rows: Mapping[Variant, GridRow], title: str) -> None:
    series: dict[str, list[tuple[float, float]]] = {}
    for variant, row in rows.items():
        name = f"{variant.policy}, {variant.block_size}"
        if variant.disk_bytes is not None:
            name += f", disk {_gib(variant.disk_bytes)} GiB"
        series.setdefault(name, []).append((variant.pool_bytes / _GIB, 100 * row.hit_rate))
    plot_lines(
        {name: sorted(points) for name, points in series.items()},
        path,
        x_label="pool (GiB)",
        y_label="prompt tokens hit (%)",
        title=title,
        is_log_x=True,
    )
