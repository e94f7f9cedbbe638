"""Replay a trace of prompts through the real cache manager: which share of their tokens hits?

    python -m benchmarks.replay TRACE [--policies none 0 4096 16384 pinned auto today]
        [--pages 8192 16384 32768 65536 131072] [--blocks vllm|flash] [--unit 128]
        [--tail drop|keep|aligned] [--concurrency 1] [--outputs] [--every 10] [--limit N]

TRACE holds one JSON object a line: ``input_length``, ``output_length`` and ``hash_ids``, one id per
512 tokens of the prompt (equal ids: equal prefix up to there). Requests come in the order of the
file; timestamps are ignored. Answers take part only with ``--outputs``, and never hit.

Most prompts end inside a span, and such an id says less than the tokens would: the conversation's
next turn goes on with the same tokens, but its span is full and has another id. ``--tail drop``,
the default, serves the whole spans and one token more (a next turn resumes at the prompt's end, as
it would in life) and counts the rest as missed; ``--tail keep`` serves all tokens, so that every
next turn seems to part from its predecessor up to 511 tokens before its end; ``--tail aligned``
serves whole spans only, which makes every prompt end on a boundary, as one in 128 does in life, and
leave a second checkpoint one unit below.

Pools are given in pages of 1,002,240 bytes, 256 tokens of dense rows in the arrangement of
vLLM 0.32 (``--blocks vllm``, the default, so that a page is a block); ``--blocks flash`` spends the
same bytes on our own bf16 blocks at ``--unit``, whose dense tokens weigh 1.7 times as much.

Policies: ``none``, ``0``, N, ``auto`` as operators write them; ``pinned`` is ``none`` with pins on
a quarter of the pool, and so are others with ``+pinned`` behind their names. ``today`` is vLLM's
own policy (interval 0 and junctions) with vLLM's whole-block hits at 256, transient window blocks
taken from the pool and compressor windows demanded everywhere; ``vllm-none``, ``vllm-pinned``,
``vllm-0`` and ``vllm-N`` are its other policies on the same terms, without junctions.
``today+lean``, ``today+superseded``, ``today+private`` (with lean) and ``today+all`` add one idea
at a time. Prints a markdown table and one JSON line.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from tqdm import tqdm

from benchmarks.policies import VariantPolicy
from benchmarks.prefix_driver import DriverStats, PrefixDriver
from benchmarks.result import print_result
from benchmarks.v4_cache import (
    UNITS,
    VLLM_PAGE_BYTES,
    VLLM_PAGE_TOKENS,
    VLLM_WINDOW_BLOCK,
    flash_block_bytes,
    flash_config,
    vllm_config,
)
from vllm.cachelab.sim.requests import PrefixUnits
from vllm.v1.core.geometry import CacheGeometry
from vllm.v1.core.retention.fixed import FixedPolicy
from vllm.v1.core.retention.pinning import PinSettings
from vllm.v1.core.retention.policy import RetentionPolicy
from vllm.v1.core.retention.registry import make_policy as make
from vllm.v1.kv_cache_interface import KVCacheConfig

SPAN = 512

# Token hit rates (%) of a block-level simulation on the Mooncake conversation trace, by pages. It
# gave vLLM's blocks and terms to every policy but the last ones.
SIMULATED: dict[str, dict[int, float]] = {
    "bound: LRU, dense groups only": {16384: 19.0, 32768: 27.5, 65536: 34.5, 131072: 36.7},
    "pinned": {16384: 5.9, 32768: 13.5, 65536: 23.2, 131072: 30.8},
    "none": {16384: 4.3, 32768: 4.4, 65536: 4.8, 131072: 6.6},
    "4096": {16384: 6.1, 32768: 13.7, 65536: 23.4, 131072: 31.0},
    "16384": {16384: 8.6, 32768: 19.0, 65536: 27.3, 131072: 33.8},
    "0": {16384: 9.1, 32768: 19.9, 65536: 27.6, 131072: 33.6},
    "today": {16384: 9.2, 32768: 20.1, 65536: 28.0, 131072: 34.4},
    "today+lean": {16384: 13.0, 32768: 23.1, 65536: 30.9, 131072: 35.0},
    "today+superseded": {16384: 9.3, 32768: 20.1, 65536: 28.2, 131072: 34.4},
    "today+private": {16384: 15.7, 32768: 24.2, 65536: 31.3, 131072: 35.0},
    "auto": {16384: 15.7, 32768: 24.2, 65536: 31.3, 131072: 35.0},
    "A + B + C + E": {16384: 16.5, 32768: 25.2, 65536: 32.3, 131072: 35.9},
}
DEFAULT_PAGES = (8192, 16384, 32768, 65536, 131072)
DEFAULT_POLICIES = ("none", "0", "4096", "16384", "pinned", "auto", "today")
PINNED_SHARE = 0.25

_PINNED_SUFFIX = "+pinned"
_VLLM_PREFIX = "vllm-"
_TODAY = {
    "keeps_lean": False,
    "keeps_coarse": False,
    "supersedes": False,
    "private_window": False,
}
_VARIANTS: dict[str, dict[str, bool]] = {
    "today": {},
    "today+lean": {"keeps_lean": True},
    "today+superseded": {"supersedes": True},
    "today+private": {"keeps_lean": True, "private_window": True},
    "today+all": {"keeps_lean": True, "private_window": True, "supersedes": True},
}


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One line of a trace."""

    num_prompt_tokens: int
    num_output_tokens: int
    span_ids: tuple[int, ...]

    def num_served_tokens(self, tail: str) -> int:
        """Return the prompt tokens to serve; all of a prompt shorter than a span.

        Args:
            tail: "keep": all; "drop": whole spans and a token more; "aligned": whole spans.
        """
        n = self.num_prompt_tokens
        if tail == "keep" or n < SPAN:
            return n
        return n // SPAN * SPAN if tail == "aligned" else min(n, n // SPAN * SPAN + 1)


def read_trace(path: Path, every: int = 1, limit: int | None = None) -> Iterator[TraceRequest]:
    """Yield a trace's requests in order.

    Args:
        path: JSON lines.
        every: Only each such line.
        limit: At most so many.

    Raises:
        ValueError: A line lacks a field, or has too few ids for its prompt.
    """
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(islice(file, 0, None, every)):
            if limit is not None and number >= limit:
                return
            raw = json.loads(line)
            try:
                request = TraceRequest(
                    int(raw["input_length"]), int(raw["output_length"]), tuple(raw["hash_ids"])
                )
            except KeyError as error:
                raise ValueError(f"line {number * every + 1} of {path} has no {error}") from error
            if len(request.span_ids) * SPAN < request.num_prompt_tokens:
                raise ValueError(
                    f"line {number * every + 1} of {path} has {len(request.span_ids)} hash_ids for "
                    f"{request.num_prompt_tokens} tokens: it needs one per {SPAN}."
                )
            yield request


def ideal_hit_rate(trace: Sequence[TraceRequest], unit: int) -> float:
    """Return the hit rate of an infinite cache that resumes at any unit."""
    seen: set[int] = set()
    hits = total = 0
    for request in trace:
        n = request.num_prompt_tokens
        matched = 0
        for span_id in request.span_ids:
            if span_id not in seen:
                break
            matched += SPAN
        hits += min(matched, n - 1) // unit * unit
        total += n
        seen.update(request.span_ids)
    return hits / total if total else 0.0


def make_policy(name: str, config: KVCacheConfig) -> RetentionPolicy:
    """Return a new policy by the name it has on the command line, pins left out."""
    geometry = CacheGeometry.from_config(config)
    if name in _VARIANTS:
        return VariantPolicy(geometry, name, **(_TODAY | _VARIANTS[name]))
    if name.startswith(_VLLM_PREFIX):
        written = name.removeprefix(_VLLM_PREFIX)
        wanted = make(_without_pins(written), geometry, config.num_blocks - 1)
        assert isinstance(wanted, FixedPolicy)
        interval = wanted.interval
        return VariantPolicy(geometry, name, interval=interval, keeps_junctions=False, **_TODAY)
    return make(_without_pins(name), geometry, config.num_blocks - 1)


def _without_pins(name: str) -> str:
    return "none" if name == "pinned" else name.removesuffix(_PINNED_SUFFIX)


def make_pinning(name: str, share: float = PINNED_SHARE) -> PinSettings | None:
    """Return what a policy of that name pins; None: nothing."""
    return PinSettings(share) if _without_pins(name) != name or name == "vllm-pinned" else None


def make_config(name: str, blocks: str, unit: int, num_pages: int) -> KVCacheConfig:
    """Return the cache a policy is tried on: vLLM's own variants keep vLLM's blocks and hits."""
    if name in _VARIANTS or name.startswith(_VLLM_PREFIX):
        is_strict = not _VARIANTS.get(name, {}).get("keeps_lean", False)
        return vllm_config(num_pages, VLLM_PAGE_TOKENS, is_strict=is_strict)
    if blocks == "vllm":
        return vllm_config(num_pages, unit, is_strict=False)
    return flash_config(unit, num_pages * VLLM_PAGE_BYTES // flash_block_bytes(unit))


def replay(
    trace: Sequence[TraceRequest],
    config: KVCacheConfig,
    policy: RetentionPolicy,
    pinning: PinSettings | None = None,
    *,
    chunk: int = 8192,
    concurrency: int = 1,
    outputs: bool = False,
    tail: str = "drop",
    label: str = "",
) -> DriverStats:
    """Run a trace through one cache.

    Args:
        trace: The requests.
        config: The cache.
        policy: What it keeps; one that no other cache had.
        pinning: What it pins.
        chunk: Tokens of a step.
        concurrency: Requests that run side by side.
        outputs: Whether answers take blocks too.
        tail: What becomes of prompts' last, partial spans; see ``num_served_tokens``.
        label: For the progress bar.
    """
    unit = config.hit_unit
    assert unit is not None
    longest = max(r.num_prompt_tokens + r.num_output_tokens for r in trace)
    driver = PrefixDriver(
        config,
        longest + 1,
        policy=policy,
        pinning=pinning,
        chunk=chunk,
        max_running=concurrency,
        waits=concurrency > 1,
        decode_stride=unit,
    )
    tokens = [0] * longest
    for number, request in enumerate(tqdm(trace, desc=label, mininterval=2.0, disable=None)):
        driver.add(
            str(number),
            tokens[: request.num_served_tokens(tail)],
            PrefixUnits(number, request.span_ids, unit, SPAN),
            max(1, request.num_output_tokens) if outputs else 1,
        )
        while len(driver.waiting) + len(driver.running) >= concurrency:
            driver.step()
        driver.outcomes.clear()
    driver.run_all()
    stats = driver.stats
    dropped = sum(r.num_prompt_tokens for r in trace) - stats.prompt_tokens
    if dropped:
        stats.prompt_tokens += dropped
        stats.miss_tokens["dropped_tail"] = dropped
    return stats


def format_table(
    rates: dict[str, dict[int, float]], pages: Sequence[int], *, is_whole_trace: bool
) -> str:
    """Return a markdown table of hit rates (%), simulated ones beside them."""
    header = "| policy | " + " | ".join(f"{n:,} pages" for n in pages) + " |"
    lines = [header, "|---|" + "--:|" * len(pages)]
    for name, by_pages in rates.items():
        cells = []
        for n in pages:
            cell = f"{by_pages[n]:.1f}" if n in by_pages else "-"
            simulated = SIMULATED.get(name, {}).get(n)
            if simulated is not None and is_whole_trace:
                cell += f" ({simulated})"
            cells.append(cell)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    if is_whole_trace:
        lines.append("\nIn brackets: an earlier simulation on the Mooncake conversation trace.")
    return "\n".join(lines)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--policies", nargs="+", default=list(DEFAULT_POLICIES))
    parser.add_argument("--pages", nargs="+", type=int, default=list(DEFAULT_PAGES))
    parser.add_argument("--blocks", choices=("vllm", "flash"), default="vllm")
    parser.add_argument("--unit", type=int, choices=UNITS, default=128)
    parser.add_argument("--chunk", type=int, default=8192)
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--outputs", action="store_true")
    parser.add_argument("--tail", choices=("drop", "keep", "aligned"), default="drop")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--limit", type=int, default=None)
    args = parser.parse_args(argv)
    if args.blocks == "vllm" and args.unit % VLLM_WINDOW_BLOCK:
        parser.error(
            f"--unit {args.unit} is less than vLLM's window blocks of {VLLM_WINDOW_BLOCK} tokens: "
            "use --unit 64 or 128, or --blocks flash."
        )
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Replay a trace for every policy and pool size and print the table and the JSON line."""
    args = parse_args(argv)
    trace = list(read_trace(args.trace, args.every, args.limit))
    rates: dict[str, dict[int, float]] = {}
    runs = []
    for name in args.policies:
        for num_pages in args.pages:
            config = make_config(name, args.blocks, args.unit, num_pages)
            begin = time.perf_counter()
            stats = replay(
                trace,
                config,
                make_policy(name, config),
                make_pinning(name),
                chunk=args.chunk,
                concurrency=args.concurrency,
                outputs=args.outputs,
                tail=args.tail,
                label=f"{name} {num_pages}",
            )
            rates.setdefault(name, {})[num_pages] = 100 * stats.hit_rate
            runs.append(
                {
                    "policy": name,
                    "pages": num_pages,
                    "unit": config.hit_unit,
                    "blocks": config.num_blocks,
                    "hit_rate": round(stats.hit_rate, 5),
                    "miss_tokens": stats.miss_tokens,
                    "preemptions": stats.num_preemptions,
                    "seconds": round(time.perf_counter() - begin, 1),
                }
            )
    ideal = ideal_hit_rate(trace, args.unit)
    whole = args.every == 1 and args.limit is None
    print(f"Hit rate of prompt tokens (%), infinite cache: {100 * ideal:.2f}\n")
    print(format_table(rates, args.pages, is_whole_trace=whole))
    config_line = {key: str(v) if key == "trace" else v for key, v in vars(args).items()}
    config_line["requests"] = len(trace)
    print_result("replay", config_line, {"ideal_hit_rate": round(ideal, 5), "runs": runs})


if __name__ == "__main__":
    main()
