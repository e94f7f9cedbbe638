"""Which setting of the prefix cache hits most, workload by workload, and where does `auto` stand?

    python -m benchmarks.workloads [--synthetic TRACE] [--conversation TRACE] [--trace NAME=TRACE]
        [--only NAME ...] [--policies auto none 0 512 ... today] [--processes 2] [--quick]

Serves every workload under every policy through the real cache manager (``benchmarks.replay`` tells
of traces, policies, pages and tails) and prints one table of hit rates, in % of prompt tokens: the
policies, the best fixed setting, how far `auto` is from it, and vLLM's policy (`today`). Traces are
given by path and left out otherwise; the other workloads are made up by rule (``shapes``):

    synthetic, conversation    whole traces at several pool sizes; with their tails kept or aligned;
                               with answers, 16 requests side by side
    phases                     conversation, synthetic, a loop of prompts, and the first two again
    agents                     coding agents' sessions at several pool sizes; nothing was tuned on
                               them, or on a trace given by --trace, served at 8k to 32k pages
    tool_loops, user_suffixes, shuffled_documents, bursts
                               other made-up applications (``agent_shapes``); nothing was tuned on
                               them either
    published                  32 prompts of 8,192 tokens, 90% of which comes back each round, side
                               by side, answers of 1,024 tokens; the first round is not counted
    published_serial           the same, one after the other
    rotation                   prompts of 40,000 tokens that take turns; % of what can hit of what
                               fits, first pass left out
    prefix_repetition          8 prefixes of 3,840 tokens and 256 others behind, 40 requests

A dash stands for what was not asked for, or cannot be served: a pool too small for one chunk.
``--quick`` serves a sample: few sizes, every tenth line of a trace, fewer fixed settings.
"""

import argparse
import json
import sys
import time
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from tqdm import tqdm

from benchmarks.agent_shapes import SHAPES
from benchmarks.prefix_driver import Outcome, PoolTooSmall, PrefixDriver
from benchmarks.replay import SPAN, TraceRequest, make_config, make_pinning, make_policy, read_trace
from benchmarks.result import print_result
from benchmarks.rotation import GIB, blocks_per_prompt
from benchmarks.shapes import AgentTraffic, Prompt, prefix_repetition, returning, rotation
from benchmarks.v4_cache import flash_block_bytes, flash_config
from vllm.cachelab.sim.requests import PrefixUnits, at_unit
from vllm.v1.core.geometry import CacheGeometry
from vllm.v1.kv_cache_interface import KVCacheConfig

FIXED = ("none", "0", "512", "1024", "2048", "4096", "8192", "16384", "32768")
FEW_FIXED = ("none", "0", "1024", "4096", "16384")
POLICIES = ("auto", *FIXED, "today")
_UNIT = 128
_ROTATED_TOKENS = 40_000
_NUM_AGENT_PROMPTS = 1_200
_NUM_SHAPED_PROMPTS = 600


@dataclass(frozen=True, slots=True)
class Workload:
    """One line of the table.

    Attributes:
        name: As ``--only`` selects it, up to the first blank.
        source: What is served: "trace", "phases", "agents", "published", "rotation", "repetition".
        size: Pages of the pool for traces and agents, else GiB.
        paths: Of traces.
        number: Of agents' sessions side by side, or of prompts in a rotation.
        passes: Of a rotation.
        tail: What becomes of a trace's last, partial spans.
        concurrency: Requests side by side.
        outputs: Whether answers take blocks.
        every: Only each such line of a trace.
        is_coarse: Whether few fixed settings are enough.
    """

    name: str
    source: str
    size: int
    paths: tuple[Path, ...] = ()
    number: int = 0
    passes: int = 0
    tail: str = "drop"
    concurrency: int = 1
    outputs: bool = False
    every: int = 1
    is_coarse: bool = False


@dataclass(slots=True)
class Traffic:
    """What a workload serves.

    Attributes:
        prompts: In order.
        span: Tokens under one id.
        num_warm: Requests at the beginning that are not counted.
        num_dropped: Tokens that count as missed without being served.
    """

    prompts: list[Prompt]
    span: int
    num_warm: int = 0
    num_dropped: int = 0


def from_trace(requests: Iterable[TraceRequest], tail: str, outputs: bool, shift: int) -> Traffic:
    """Return a trace's prompts, their ids shifted so that no other trace shares them."""
    traffic = Traffic([], SPAN)
    for request in requests:
        num_tokens = request.num_served_tokens(tail)
        traffic.num_dropped += request.num_prompt_tokens - num_tokens
        ids = tuple(span_id + shift for span_id in request.span_ids)
        num_output = max(1, request.num_output_tokens) if outputs else 1
        traffic.prompts.append(Prompt(num_tokens, ids, num_output))
    return traffic


def phases(conversation: Path, synthetic: Path, every: int) -> Traffic:
    """Chain parts of two traces and a loop."""
    shift = 1 << 32
    chats = from_trace(read_trace(conversation, limit=6000 // every), "drop", False, 0)
    made = from_trace(read_trace(synthetic, limit=2600 // every), "drop", False, shift)
    # An id stands for the tokens up to there: the loop's are its own.
    loop = rotation(150, _ROTATED_TOKENS, max(1, 4 // every), SPAN)
    own = [replace(p, span_ids=tuple(i + 2 * shift for i in p.span_ids)) for p in loop]
    c, s = len(chats.prompts) // 2, len(made.prompts) // 2
    parts = (chats.prompts[:c], made.prompts[:s], own, chats.prompts[c:], made.prompts[s:])
    prompts = [prompt for part in parts for prompt in part]
    return Traffic(prompts, SPAN, num_dropped=chats.num_dropped + made.num_dropped)


def make_traffic(workload: Workload) -> Traffic:
    """Return what a workload serves."""
    if workload.source == "trace":
        requests = read_trace(workload.paths[0], workload.every)
        return from_trace(requests, workload.tail, workload.outputs, 0)
    if workload.source == "phases":
        return phases(*workload.paths, workload.every)
    if workload.source == "agents":
        longest = 120_000 if workload.number <= 32 else 60_000
        agents = AgentTraffic(workload.number, workload.number, longest)
        count = _NUM_AGENT_PROMPTS // workload.every
        return Traffic(list(islice(agents.prompts(), count)), 128)
    if workload.source in SHAPES:
        prompts = SHAPES[workload.source](workload.number, _NUM_SHAPED_PROMPTS // workload.every)
        return Traffic(list(prompts), 128)
    if workload.source == "published":
        outputs = 1024 if workload.outputs else 1
        return Traffic(returning(32, 8192, 0.9, 4, 32, outputs), 32, num_warm=32)
    if workload.source == "rotation":
        prompts = rotation(workload.number, _ROTATED_TOKENS, workload.passes, _UNIT)
        return Traffic(prompts, _UNIT, num_warm=workload.number * (workload.passes - 1))
    return Traffic(prefix_repetition(8, 3840, 256, 40, 32), 32)


def make_cache(workload: Workload, policy: str) -> KVCacheConfig:
    """Return the cache a workload is served with."""
    if workload.source in ("trace", "phases", "agents", *SHAPES):
        return make_config(policy, "vllm", _UNIT, workload.size)
    unit = 128 if workload.source == "rotation" else 32
    num_blocks = workload.size * GIB // flash_block_bytes(unit)
    if policy == "today":
        # The same bytes in vLLM's blocks.
        return make_config(policy, "vllm", _UNIT, workload.size * GIB // 1_002_240)
    return flash_config(unit, num_blocks)


def measure(workload: Workload, policy_name: str) -> float:
    """Serve a workload under a policy.

    Returns:
        Hit tokens per prompt token; of a rotation, per token that can hit and fits.
    """
    traffic = make_traffic(workload)
    config = make_cache(workload, policy_name)
    assert config.hit_unit is not None
    geometry = CacheGeometry.from_config(config)
    # vLLM's blocks hit at 256 tokens: an id of 128 or less says too much, not too little.
    span = traffic.span
    prompts, unit = traffic.prompts, config.hit_unit
    longest = max(p.num_tokens + p.num_output_tokens for p in prompts)
    driver = PrefixDriver(
        config,
        longest + 1,
        policy=make_policy(policy_name, config),
        pinning=make_pinning(policy_name),
        max_running=workload.concurrency,
        waits=workload.concurrency > 1,
        decode_stride=unit,
    )
    tokens = [0] * longest
    outcomes: list[Outcome] = []
    for number, prompt in enumerate(prompts):
        ids = PrefixUnits(number, *at_unit(prompt.span_ids, span, unit))
        driver.add(str(number), tokens[: prompt.num_tokens], ids, prompt.num_output_tokens)
        while len(driver.waiting) + len(driver.running) >= workload.concurrency:
            driver.step()
        outcomes += driver.outcomes
        driver.outcomes.clear()
    driver.run_all()
    outcomes += driver.outcomes
    counted = [o for o in outcomes if int(o.request_id) >= traffic.num_warm]
    hits = sum(outcome.hit_tokens for outcome in counted)
    if workload.source == "rotation":
        fitting = (config.num_blocks - 1) // blocks_per_prompt(geometry, _ROTATED_TOKENS)
        can_hit = min(fitting, workload.number) * geometry.floor_unit(_ROTATED_TOKENS - 1)
        return hits / can_hit
    return hits / (sum(outcome.num_tokens for outcome in counted) + traffic.num_dropped)


def make_workloads(args: argparse.Namespace) -> list[Workload]:
    """Return the workloads that a command line asks for."""
    every = 10 if args.quick else 1
    kilo = 1024
    made = []
    traces = [
        (name, path)
        for name, path in (("synthetic", args.synthetic), ("conversation", args.conversation))
        if path
    ]
    for name, path in traces:
        sizes = (16,) if args.quick else (16, 32, 64, 128)[: 3 if name == "synthetic" else 4]
        made += [
            Workload(
                f"{name} {k}k pages",
                "trace",
                k * kilo,
                (path,),
                every=every,
                is_coarse=name == "conversation",
            )
            for k in sizes
        ]
        common = {"paths": (path,), "every": 10 if args.quick else 2, "is_coarse": True}
        made += [
            Workload(f"{name}_{tail} 16k pages", "trace", 16 * kilo, tail=tail, **common)
            for tail in ("keep", "aligned")
        ]
        made.append(
            Workload(
                f"{name}_answers 16k pages",
                "trace",
                16 * kilo,
                concurrency=16,
                outputs=True,
                **common,
            )
        )
    if args.synthetic and args.conversation:
        paths = (args.conversation, args.synthetic)
        made.append(
            Workload("phases 16k pages", "phases", 16 * kilo, paths, every=every, is_coarse=True)
        )
    for entry in args.trace:
        name, _, path = entry.partition("=")
        made += [
            Workload(f"{name} {k}k pages", "trace", k * kilo, (Path(path),), every=every)
            for k in (8, 16, 24, 32)
        ]
    for number, sizes in ((24, (4, 8, 16)), (60, (8, 16, 24))):
        sizes = sizes[:1] if args.quick else sizes
        made += [
            Workload(
                f"agents_{number} {k}k pages",
                "agents",
                k * kilo,
                number=number,
                every=4 if args.quick else 1,
            )
            for k in sizes
        ]
    for name in SHAPES:
        made += [
            Workload(
                f"{name}{suffix} {k}k pages",
                name,
                k * kilo,
                number=1,
                concurrency=concurrency,
                every=4 if args.quick else 1,
                is_coarse=concurrency > 1,
            )
            for suffix, concurrency in (("", 1), ("_8", 8))
            for k in ((4,) if args.quick or concurrency > 1 else (2, 4, 8))
        ]
    for gib in (12, 4):
        made.append(
            Workload(f"published {gib} GiB", "published", gib, concurrency=32, outputs=True)
        )
        made.append(Workload(f"published_serial {gib} GiB", "published", gib))
    for number in (18, 45) if args.quick else (18, 36, 45, 60, 100):
        for passes in (2,) if args.quick else (2, 3):
            made.append(
                Workload(
                    f"rotation {number} prompts, pass {passes}",
                    "rotation",
                    12,
                    number=number,
                    passes=passes,
                    is_coarse=True,
                )
            )
    made.append(Workload("prefix_repetition 8 GiB", "repetition", 8))
    made.append(Workload("prefix_repetition_8 8 GiB", "repetition", 8, concurrency=8))
    if args.only:
        made = [w for w in made if w.name.split()[0] in args.only]
    return made


def format_table(
    rates: dict[str, dict[str, float]],
    policies: Sequence[str],
    intervals: Collection[str] = FIXED,
) -> str:
    """Return a markdown table of hit rates (%), and how `auto` compares with fixed intervals."""
    fixed = [name for name in policies if name in intervals]
    lines = [
        "| workload | " + " | ".join(f"`{name}`" for name in policies) + " | auto - best fixed |",
        "|---|" + "--:|" * (len(policies) + 1),
    ]
    for workload, by_policy in rates.items():
        cells = [f"{100 * by_policy[p]:.1f}" if p in by_policy else "-" for p in policies]
        best = max((by_policy[p] for p in fixed if p in by_policy), default=None)
        gain = "-"
        if best is not None and "auto" in by_policy:
            gain = f"{100 * (by_policy['auto'] - best):+.1f}"
        lines.append(f"| {workload} | " + " | ".join(cells) + f" | {gain} |")
    return "\n".join(lines)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--synthetic", type=Path)
    parser.add_argument("--conversation", type=Path)
    parser.add_argument("--trace", action="append", default=[], metavar="NAME=TRACE")
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--quick", action="store_true")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Serve everything, and print the table and the JSON line."""
    args = parse_args(argv)
    begin = time.perf_counter()
    workloads = make_workloads(args)
    runs = [
        (workload, policy)
        for workload in workloads
        for policy in args.policies
        if policy not in FIXED or policy in FEW_FIXED or not (workload.is_coarse or args.quick)
    ]
    rates: dict[str, dict[str, float]] = {workload.name: {} for workload in workloads}
    with ProcessPoolExecutor(args.processes) as executor:
        waiting = {executor.submit(measure, w, policy): (w.name, policy) for w, policy in runs}
        done = as_completed(waiting)
        for future in tqdm(done, total=len(waiting), desc="runs", mininterval=2.0, disable=None):
            name, policy = waiting[future]
            error = future.exception()
            if isinstance(error, PoolTooSmall):
                # vLLM's policy takes window blocks for every row of a chunk.
                tqdm.write(f"{name} under {policy}: {error}", file=sys.stderr)
                continue
            if error is not None:
                executor.shutdown(cancel_futures=True)
                error.add_note(f"while serving {name} under {policy}")
                raise error
            rates[name][policy] = rate = future.result()
            tqdm.write(f"{name} under {policy}: {100 * rate:.2f}%", file=sys.stderr)
    print(format_table(rates, args.policies))
    config = json.loads(json.dumps(vars(args), default=str))
    seconds = round(time.perf_counter() - begin, 1)
    rounded = {n: {p: round(rate, 5) for p, rate in row.items()} for n, row in rates.items()}
    print_result("workloads", config, {"seconds": seconds, "hit_rates": rounded})


if __name__ == "__main__":
    main()
