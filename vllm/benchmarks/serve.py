"""``vllm bench serve``: load for an OpenAI-compatible server, with the prefix cache in view."""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import aiohttp

from vllm.benchmarks.arrivals import Arrivals, trace_times_s
from vllm.benchmarks.client.counters import counted_between, read_miss_tokens
from vllm.benchmarks.client.load import Load, run_load
from vllm.benchmarks.client.observation import Observation
from vllm.benchmarks.client.probes import check_rate, probe_numbers, with_probes
from vllm.benchmarks.client.setup import make_arrivals, make_target
from vllm.benchmarks.client.target import Target, find_model, open_session, wait_ready
from vllm.benchmarks.datasets.build import make_prompts
from vllm.benchmarks.datasets.prompt import BenchRequest
from vllm.benchmarks.datasets.words import Words, load_words
from vllm.benchmarks.draws import Draws
from vllm.benchmarks.report.cache import cache_numbers
from vllm.benchmarks.report.metrics import (
    detailed,
    measure,
    parse_goodput,
    parse_metrics,
    parse_percentiles,
)
from vllm.benchmarks.report.plot import check_can_plot, plot_run, plot_timeline
from vllm.benchmarks.report.table import format_table
from vllm.exceptions import ConfigError
from vllm.logger import init_logger

logger = init_logger(__name__)

_WARM_STREAM = 99
_SHORT_WORDS = 16
_MAX_SHOWN_ERRORS = 3


def run_serve(args: argparse.Namespace) -> int:
    """Run the benchmark; return the exit code (1: no request succeeded)."""
    metrics = parse_metrics(args.percentile_metrics)
    percents = parse_percentiles(args.metric_percentiles)
    limits = parse_goodput(args.goodput)
    arrivals = make_arrivals(args)
    metadata = _parse_metadata(args.metadata)
    check_can_plot(args.plot)
    check_can_plot(args.plot_timeline)
    check_rate(args.probe_request_rate)
    _check_result_place(args)
    for flag in args.ignored_flags:
        logger.warning("%s is accepted and has no effect: %s.", flag.names[0], flag.why)
    done = asyncio.run(_measure(args, arrivals))
    seen, model = done.seen, done.model
    run = measure(seen, done.duration_s, percents, limits)
    cache = cache_numbers(seen, percents, done.miss_tokens)
    probes = probe_numbers(done.probes, percents) if args.probe_request_rate else None
    print(
        format_table(
            run.values,
            cache,
            metrics=metrics,
            percents=percents,
            request_rate=args.request_rate,
            max_concurrency=args.max_concurrency,
            probes=probes,
        )
    )
    _print_errors(seen)
    result = {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": args.backend,
        "backend": args.backend,
        "label": args.label,
        "model_id": model,
        "tokenizer_id": done.tokenizer,
        "num_prompts": len(seen),
        **metadata,
        "request_rate": "inf" if args.request_rate == float("inf") else args.request_rate,
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
        **run.values,
        "prefix_cache": cache or None,
    }
    if probes is not None:
        result["probes"] = probes
    if args.save_detailed:
        result |= detailed(seen)
    _save(args, result, model)
    title = f"{model}, {args.dataset_name}, {len(seen)} requests"
    if args.plot is not None:
        plot_run(seen, args.plot, title)
    if args.plot_timeline is not None:
        plot_timeline(seen, args.plot_timeline, title)
    return 0 if run.values["completed"] else 1


@dataclass(frozen=True, slots=True)
class _Done:
    """A run.

    Attributes:
        seen: An observation for each request.
        duration_s: Of the load.
        probes: The same for each probe.
        model: As the server names it.
        tokenizer: By which prompts were counted; None: words were.
        miss_tokens: By reason, as the server counted meanwhile; None: it does not.
    """

    seen: list[Observation]
    duration_s: float
    probes: list[Observation]
    model: str
    tokenizer: str | None
    miss_tokens: dict[str, int] | None


async def _measure(args: argparse.Namespace, arrivals: Arrivals) -> _Done:
    """Send everything."""
    target = make_target(args, "")
    async with open_session(args.max_concurrency or 0) as session:
        model, root = args.served_model_name or args.model, args.model
        if model is None:
            model, root = await find_model(session, target)
        target = replace(target, model=model)
        tokenizer = args.tokenizer or root
        words = load_words(tokenizer, skip=args.skip_tokenizer_init)
        requests = make_prompts(args, words)
        warm = _short_request(words)
        if args.ready_check_timeout_sec > 0:
            await wait_ready(session, target, warm, args.ready_check_timeout_sec)
        await _warm_up(session, target, warm, args)
        if args.profile:
            await _post(session, target, "/start_profile")
        load = Load(
            requests,
            _times(requests, arrivals, args),
            args.max_concurrency,
            args.request_id_prefix,
            not args.disable_tqdm,
        )
        before = await read_miss_tokens(session, target)
        (seen, duration_s), probes = await with_probes(
            session,
            target,
            lambda number: _short_request(words, number + 1),
            args.probe_request_rate,
            run_load(session, target, load),
        )
        missed = counted_between(before, await read_miss_tokens(session, target))
        if args.profile:
            await _post(session, target, "/stop_profile")
    used = None if args.skip_tokenizer_init else tokenizer
    return _Done(seen, duration_s, probes, model, used, missed)


def _short_request(words: Words, number: int = 0) -> BenchRequest:
    """Return a short request of its own: warm-ups must not fill the cache with what is measured."""
    ids = words.draw(Draws(number, _WARM_STREAM), _SHORT_WORDS)
    return BenchRequest(words.text(ids), len(ids) + words.num_special, 8)


async def _warm_up(
    session: aiohttp.ClientSession, target: Target, request: BenchRequest, args: argparse.Namespace
) -> None:
    if not args.num_warmups:
        return
    load = Load(
        [request] * args.num_warmups,
        [0.0] * args.num_warmups,
        args.max_concurrency,
        "warm-",
        shows_progress=False,
    )
    seen, _ = await run_load(session, target, load)
    if not any(o.success for o in seen):
        raise ConfigError(f"No warm-up request succeeded: {seen[0].error}")


async def _post(session: aiohttp.ClientSession, target: Target, path: str) -> None:
    url = target.base_url.rstrip("/") + path
    async with session.post(url, headers=target.all_headers()) as response:
        if response.status != 200:
            raise ConfigError(f"{url} answered {response.status}: leave --profile out.")


def _times(
    requests: Sequence[BenchRequest], arrivals: Arrivals, args: argparse.Namespace
) -> list[float]:
    """Return when each request is sent: as a trace says, unless a rate was asked for."""
    times = [request.arrival_s for request in requests if request.arrival_s is not None]
    is_plain = arrivals.rate == float("inf") and arrivals.ramp_up is None
    if is_plain and len(times) == len(requests):
        return trace_times_s(times, args.trace_speed)
    return arrivals.times_s(len(requests), args.seed)


def _parse_metadata(entries: Sequence[str]) -> dict[str, str]:
    made = {}
    for entry in entries:
        key, equals, value = entry.partition("=")
        if not equals:
            raise ConfigError(f"--metadata {entry!r} must be KEY=VALUE.")
        made[key.strip()] = value.strip()
    return made


def _print_errors(seen: Sequence[Observation]) -> None:
    errors: dict[str, int] = {}
    for o in seen:
        if o.error:
            errors[o.error] = errors.get(o.error, 0) + 1
    for error, count in sorted(errors.items(), key=lambda item: -item[1])[:_MAX_SHOWN_ERRORS]:
        print(f"{count} failed: {error}", file=sys.stderr)


def _check_result_place(args: argparse.Namespace) -> None:
    if args.result_dir is not None and args.result_dir.exists() and not args.result_dir.is_dir():
        raise ConfigError(f"--result-dir {args.result_dir} is no folder.")


def _save(args: argparse.Namespace, result: dict[str, Any], model: str) -> None:
    if not (args.save_result or args.append_result):
        return
    rate = result["request_rate"]
    limit = f"-concurrency{args.max_concurrency}" if args.max_concurrency else ""
    base = model.rstrip("/").rsplit("/", 1)[-1]
    default = f"{args.backend}-{rate}qps{limit}-{base}-{result['date']}.json"
    path = (args.result_dir or Path()) / (args.result_filename or default)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a" if args.append_result else "w", encoding="utf-8") as file:
        json.dump(result, file)
        file.write("\n")
    print(f"Result: {path}")
