"""``vllm bench replay --servers N``: a trace through many servers and what stands in front."""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from vllm.benchmarks.datasets.lines import BadLines
from vllm.benchmarks.datasets.timed_trace import TimedRequest, iterate_timed_trace
from vllm.cachelab.sim.balancers import Sessions
from vllm.cachelab.sim.cost import CostModel
from vllm.cachelab.sim.fleet import FleetLoad, FleetResult, Losses, Restarts, SimFleet
from vllm.cachelab.sim.grid import run_side_by_side
from vllm.cachelab.sim.requests import PrefixUnits, SimRequest, at_unit
from vllm.cachelab.sim.settings import SimSettings, find_hf_config
from vllm.cachelab.sim.warm_up import WarmUp
from vllm.exceptions import ConfigError
from vllm.v1.engine.data_parallel.router import EXACT

_GIB = 1 << 30
# One server with the memory and the speed of all: what no balancer can beat but by luck.
JOINT = "joint"
# Ids of another copy of a trace lie so far away.
_COPY = 1 << 40


@dataclass(frozen=True, slots=True)
class Bursts:
    """Times when more requests come, at the cost of the others.

    Attributes:
        factor: How many times as many.
        length_s: For how long.
        every_s: From the beginning of one to that of the next.
    """

    factor: float
    length_s: float
    every_s: float

    def __post_init__(self) -> None:
        if not (self.factor > 1 and 0 < self.factor * self.length_s < self.every_s):
            raise ConfigError(
                f"--burst {self.factor:g} {self.length_s:g} {self.every_s:g}: FACTOR must be above "
                "1, and FACTOR * SECONDS below EVERY, or nothing is left between bursts."
            )

    def move(self, time_s: float) -> float:
        """Return when a request of an even load comes; order and number are kept."""
        start, offset = divmod(time_s, self.every_s)
        drawn = self.factor * self.length_s
        if offset < drawn:
            moved = offset / self.factor
        else:
            scale = (self.every_s - self.length_s) / (self.every_s - drawn)
            moved = self.length_s + (offset - drawn) * scale
        return start * self.every_s + moved


@dataclass(frozen=True, slots=True)
class FleetJob:
    """What every balancer is tried with.

    Attributes:
        path: The trace.
        settings: Of a server.
        cost: Time of a step.
        num_servers: How many.
        block: Tokens under one id of the trace.
        every: Only each such line.
        limit: At most so many lines.
        copies: Of every line, each with prompts of its own.
        max_output_tokens: Of an answer.
        speed: How many times as fast they come.
        decode_stride: Tokens a decode step brings.
        news_delay_s: How late the balancer hears of a step.
        bursts: When more come.
        losses: Who dies.
        restarts: Who restarts.
        warm_up: What servers that come back pull before they serve.
        seed: Of who dies.
        num_requests: For the bar; 0: there is none.
    """

    path: Path
    settings: SimSettings
    cost: CostModel
    num_servers: int
    block: int
    every: int = 1
    limit: int | None = None
    copies: int = 1
    max_output_tokens: int | None = None
    speed: float = 1.0
    decode_stride: int = 1
    news_delay_s: float = 0.0
    bursts: Bursts | None = None
    losses: Losses | None = None
    restarts: Restarts | None = None
    warm_up: WarmUp | None = None
    seed: int = 0
    num_requests: int = 0

    def lines(self) -> Iterator[TimedRequest]:
        """Yield the lines of the trace, one in memory at a time."""
        bad = BadLines(self.path)
        return iterate_timed_trace(
            self.path, block=self.block, every=self.every, limit=self.limit, bad=bad
        )

    def loads(self, unit: int) -> Iterator[FleetLoad]:
        """Yield the requests in order of time."""
        sessions = Sessions()
        lines = self.lines()
        line = next(lines, None)
        start_s = line.arrival_s if line is not None else 0.0
        number = 0
        while line is not None:
            following = next(lines, None)
            until = following.arrival_s if following is not None else line.arrival_s
            for copy in range(self.copies):
                ids = tuple(_COPY * copy + i for i in line.span_ids)
                time_s = line.arrival_s + (until - line.arrival_s) * copy / self.copies
                time_s = (time_s - start_s) / self.speed
                num_output = max(1, line.num_output_tokens)
                if self.max_output_tokens is not None:
                    num_output = min(num_output, self.max_output_tokens)
                request = SimRequest(
                    str(number),
                    line.num_prompt_tokens,
                    num_output,
                    PrefixUnits(number, *at_unit(ids, self.block, unit)),
                    time_s if self.bursts is None else self.bursts.move(time_s),
                )
                session = sessions.find(ids, line.num_prompt_tokens // self.block)
                yield FleetLoad(request, session)
                number += 1
            line = following

    def run(self, balancer: str) -> FleetResult:
        """Try one balancer."""
        num, settings = self.num_servers, self.settings
        is_joint = balancer == JOINT
        if is_joint:
            limits = settings.scheduler
            settings = replace(
                settings,
                pool_bytes=settings.pool_bytes * num,
                scheduler={key: value * num for key, value in limits.items()},
            )
        fleet = SimFleet(
            settings,
            1 if is_joint else num,
            "round-robin" if is_joint else balancer,
            _joint_cost(self.cost, num) if is_joint else self.cost,
            self.decode_stride,
            self.news_delay_s,
            self.warm_up,
        )
        if self.losses is not None and not is_joint:
            fleet.plan_losses(self.losses, self.seed)
        if self.restarts is not None and not is_joint:
            fleet.plan_restarts(self.restarts)
        silent = None if self.num_requests else True
        with tqdm(total=self.num_requests, unit="req", disable=silent, mininterval=1.0) as bar:
            fleet.run(self.loads(fleet.hash_unit), bar.update)
        return fleet.result


def _joint_cost(cost: CostModel, num: int) -> CostModel:
    """Return the cost of one server that computes as fast as so many."""
    return replace(
        cost,
        per_prefill_token=cost.per_prefill_token / num,
        per_prefill_context=cost.per_prefill_context / num,
        per_decode_token=cost.per_decode_token / num,
        per_decode_context=cost.per_decode_context / num,
    )


def run_fleet_replay(args: argparse.Namespace) -> int:
    """Replay a trace through servers; returns the exit code."""
    job = make_fleet_job(args)
    names = list(args.balancer)
    results = run_side_by_side(
        names, partial(_run, job), args.processes, shows_progress=len(names) > 1
    )
    print(format_fleet(results, job.num_servers))
    if args.output_json is not None:
        rows = {name: describe(result, job.num_servers) for name, result in results.items()}
        config = {k: v for k, v in vars(args).items() if k != "run"}
        text = json.dumps({"config": config, "runs": rows}, default=str)
        args.output_json.write_text(text + "\n", encoding="utf-8")
    refused = sum(result.num_refused for result in results.values())
    if refused:
        print(f"{refused} requests could never run: the pool is too small.", file=sys.stderr)
    return 0


def _run(job: FleetJob, balancer: str) -> FleetResult:
    return job.run(balancer)


def make_fleet_job(args: argparse.Namespace) -> FleetJob:
    """Return what a command line asks to replay.

    Raises:
        ConfigError: The trace or a value is wrong.
    """
    for flag, values in (
        ("policies", args.policies),
        ("block_size", args.block_size),
        ("pool_gib", args.pool_gib),
    ):
        if len(values) != 1:
            raise ConfigError(
                f"--servers takes one --{flag.replace('_', '-')}, not {len(values)}: "
                "balancers are what it compares."
            )
    for flag in ("max_concurrency", "plot", "mtp"):
        if getattr(args, flag):
            raise ConfigError(f"--servers does not go with --{flag.replace('_', '-')}.")
    if args.servers < 1 or args.copies < 1:
        raise ConfigError(
            f"--servers {args.servers} --copies {args.copies}: both must be 1 or more."
        )
    bad = BadLines(args.trace, args.strict)
    lines = iterate_timed_trace(
        args.trace, block=args.trace_block_size, every=args.every, limit=args.limit, bad=bad
    )
    number = longest = 0
    last_s = float("-inf")
    for line in lines:
        number += 1
        if line.arrival_s < last_s:
            raise ConfigError(
                f"{args.trace}: request {number} comes before the one above it. --servers reads a "
                "trace line by line: sort it by timestamp."
            )
        last_s = line.arrival_s
        longest = max(longest, line.num_prompt_tokens + line.num_output_tokens)
    if not number:
        raise bad.nothing_left()
    if args.trace_speed == float("inf"):
        raise ConfigError("--servers needs times: --trace-speed inf has none.")
    settings = SimSettings(
        find_hf_config(args.model),
        dtype=args.dtype,
        cache_dtype=args.kv_cache_dtype,
        block_size=args.block_size[0],
        interval=args.policies[0],
        pool_bytes=int(args.pool_gib[0] * _GIB),
        max_model_len=longest + 1,
        scheduler={
            "max_num_batched_tokens": args.max_num_batched_tokens,
            "max_num_seqs": args.max_num_seqs,
        },
    )
    shows = len(args.balancer) == 1 and not args.disable_tqdm
    return FleetJob(
        args.trace,
        settings,
        CostModel.load(args.cost) if args.cost is not None else CostModel.published_a3(),
        args.servers,
        args.trace_block_size,
        args.every,
        args.limit,
        args.copies,
        args.max_output_tokens,
        args.trace_speed,
        args.decode_stride,
        args.news_delay_ms / 1000,
        None if args.burst is None else Bursts(*args.burst),
        None if args.lose is None else Losses(int(args.lose[0]), *args.lose[1:]),
        None if args.rolling_restart is None else Restarts(*args.rolling_restart),
        None if args.warm_up is None else _read_warm_up(args.warm_up),
        args.seed,
        number * args.copies if shows else 0,
    )


def _read_warm_up(values: Sequence[float]) -> WarmUp:
    seconds, gib, gib_per_s = values
    return WarmUp(seconds, gib * _GIB, gib_per_s * _GIB)


def describe(result: FleetResult, num_servers: int) -> dict[str, Any]:
    """Return the figures of a run."""
    placed = [result.placed[rank] for rank in range(num_servers)]
    foretold = sum(result.outcomes.values())
    return {
        "requests": len(result.ttft_s),
        "hit_rate": result.hit_rate,
        "p50_ttft_ms": result.ttft_ms(50),
        "p90_ttft_ms": result.ttft_ms(90),
        "p99_ttft_ms": result.ttft_ms(99),
        "most_placed_of_mean": max(placed) * num_servers / max(1, sum(placed)),
        "foretold_exactly": result.outcomes[EXACT] / foretold if foretold else None,
        "differences": {r: n for r, n in result.outcomes.items() if r != EXACT},
        "different_tokens": {r: n for r, n in result.missed_by.items() if r != EXACT},
        "retried": result.num_retried,
        "cut": result.num_cut,
        "refused": result.num_refused,
        "duration_s": result.duration_s,
        "fresh_hit_rate": result.fresh_hit_rate,
        "pulled_gib": result.pulled_bytes / _GIB,
        "pulled_s": result.pulled_s,
    }


def format_fleet(results: dict[str, FleetResult], num_servers: int) -> str:
    """Return a table with a line per balancer."""
    lines = [
        "| balancer | hit % | P50 TTFT ms | P90 | P99 | busiest / mean | foretold % | differences "
        "| retried | cut |",
        "|---|--:|--:|--:|--:|--:|--:|---|--:|--:|",
    ]
    for name, result in results.items():
        n = describe(result, num_servers)
        told = "" if n["foretold_exactly"] is None else f"{100 * n['foretold_exactly']:.2f}"
        why = ", ".join(f"{reason} {count}" for reason, count in n["differences"].items())
        busiest = "" if name == JOINT else f"{n['most_placed_of_mean']:.2f}"
        lines.append(
            f"| {name} | {100 * n['hit_rate']:.1f} | {n['p50_ttft_ms']:.0f} "
            f"| {n['p90_ttft_ms']:.0f} | {n['p99_ttft_ms']:.0f} | {busiest} | {told} | {why} "
            f"| {n['retried']} | {n['cut']} |"
        )
    for name, result in results.items():
        if result.fresh_hit_rate is not None:
            lines.append(
                f"{name}: servers hit {100 * result.fresh_hit_rate:.1f}% in the first minute after "
                f"they came back, with {result.pulled_bytes / _GIB:.2f} GiB pulled in "
                f"{result.pulled_s:.1f} s."
            )
    return "\n".join(lines)
