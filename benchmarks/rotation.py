"""Prompts that take turns in a pool: what does the second pass hit?

    python -m benchmarks.rotation [--prompts 18 36 45 60] [--units 32 64 128] [--passes 2]
        [--blocks packed|published] [--policies auto 0 none] [--concurrency 1]

Each pass serves every prompt once, in the same order: DeepSeek-V4-Flash at 40,000 tokens a prompt,
chunks of 8,192, a pool of 12 GiB. "Fit" is what the pool could hold of dense rows and one
checkpoint per prompt, in whole prompts; the share is the last pass's hit tokens of the tokens
that fit, ``boundary`` (the largest one <= n - 1) a prompt. Where not all prompts fit, least-
recently-used order gives up each prompt just before its turn and hits nothing; policy ``auto``
notices and keeps a part of them (``vllm.v1.core.retention.auto.duel``), which takes it a few
prompts of the second pass. Prints a table and one JSON line.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from tqdm import tqdm

from benchmarks.prefix_driver import PrefixDriver
from benchmarks.result import print_result
from benchmarks.v4_cache import PUBLISHED_BLOCK_BYTES, UNITS, flash_block_bytes, flash_config
from vllm.cachelab.sim.requests import PrefixUnits
from vllm.v1.core.geometry import CacheGeometry
from vllm.v1.core.retention.registry import make_policy

GIB = 1 << 30
# Span ids are per unit here: no two prompts share one.
_SPANS_PER_PROMPT = 1 << 20


@dataclass(frozen=True, slots=True)
class Rotation:
    """One measured rotation.

    Attributes:
        policy: What the cache kept.
        unit: Tokens of the smallest hit.
        num_prompts: Prompts of a pass.
        pool_blocks: Blocks of the pool.
        blocks_per_prompt: Dense blocks and those of one checkpoint.
        fitting_prompts: How many of the prompts the pool could hold.
        fitting_tokens: Their tokens below the resume boundary.
        hit_tokens: Of the last pass.
        missed_prompts: Prompts of the last pass that hit nothing.
        share: Hit tokens of fitting tokens.
    """

    policy: str
    unit: int
    num_prompts: int
    pool_blocks: int
    blocks_per_prompt: int
    fitting_prompts: int
    fitting_tokens: int
    hit_tokens: int
    missed_prompts: int
    share: float


def blocks_per_prompt(geometry: CacheGeometry, num_tokens: int) -> int:
    """Return the blocks that make a prompt reusable: dense ones and one checkpoint."""
    boundary = geometry.floor_unit(num_tokens - 1)
    dense = sum(group.num_dense_blocks(num_tokens) for group in geometry.dense)
    windows = sum(
        len(group.block_range(group.first_needed(boundary), boundary)) for group in geometry.windows
    )
    return dense + windows


def rotate(
    unit: int,
    num_prompts: int,
    pool_blocks: int,
    *,
    policy_name: str = "auto",
    num_tokens: int = 40_000,
    chunk: int = 8192,
    concurrency: int = 1,
    passes: int = 2,
) -> Rotation:
    """Serve every prompt once a pass, in order, and measure the last pass."""
    config = flash_config(unit, pool_blocks)
    geometry = CacheGeometry.from_config(config)
    policy = make_policy(policy_name, geometry, config.num_blocks - 1)
    driver = PrefixDriver(
        config, num_tokens + 1, policy=policy, chunk=chunk, max_running=concurrency
    )
    tokens = [0] * num_tokens
    for number in range(passes * num_prompts):
        first = number % num_prompts * _SPANS_PER_PROMPT
        span_ids = range(first, first + num_tokens // unit)
        driver.add(str(number), tokens, PrefixUnits(number, span_ids, unit, span=unit))
    driver.run_all()
    # Concurrent requests may be admitted in another order than they came.
    first_of_last = (passes - 1) * num_prompts
    last = [o.hit_tokens for o in driver.outcomes if int(o.request_id) >= first_of_last]
    each = blocks_per_prompt(geometry, num_tokens)
    fitting = min(num_prompts, (pool_blocks - 1) // each)
    fitting_tokens = fitting * geometry.floor_unit(num_tokens - 1)
    return Rotation(
        policy=policy_name,
        unit=unit,
        num_prompts=num_prompts,
        pool_blocks=pool_blocks,
        blocks_per_prompt=each,
        fitting_prompts=fitting,
        fitting_tokens=fitting_tokens,
        hit_tokens=sum(last),
        missed_prompts=last.count(0),
        share=round(sum(last) / fitting_tokens, 4) if fitting_tokens else 0.0,
    )


def format_table(rotations: Sequence[Rotation]) -> str:
    """Return a markdown table."""
    lines = [
        "| policy | unit | prompts | pool blocks | blocks/prompt | fit | missed | hit/fit |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for r in rotations:
        lines.append(
            f"| {r.policy} | {r.unit} | {r.num_prompts} | {r.pool_blocks:,} | "
            f"{r.blocks_per_prompt} | {r.fitting_prompts} | {r.missed_prompts} | {r.share:.1%} |"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure every combination and print the table and the JSON line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", nargs="+", type=int, default=[18, 36])
    parser.add_argument("--units", nargs="+", type=int, choices=UNITS, default=list(UNITS))
    parser.add_argument("--policies", nargs="+", default=["auto", "0", "none"])
    parser.add_argument("--blocks", choices=("packed", "published"), default="packed")
    parser.add_argument("--gib", type=float, default=12.0)
    parser.add_argument("--tokens", type=int, default=40_000)
    parser.add_argument("--chunk", type=int, default=8192)
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--passes", type=int, default=2)
    args = parser.parse_args(argv)
    cases = [(p, u, n) for p in args.policies for u in args.units for n in args.prompts]
    rotations = []
    for policy, unit, num_prompts in tqdm(cases, desc="rotations", disable=None):
        published = args.blocks == "published"
        block_bytes = PUBLISHED_BLOCK_BYTES[unit] if published else flash_block_bytes(unit)
        rotations.append(
            rotate(
                unit,
                num_prompts,
                int(args.gib * GIB) // block_bytes,
                policy_name=policy,
                num_tokens=args.tokens,
                chunk=args.chunk,
                concurrency=args.concurrency,
                passes=args.passes,
            )
        )
    print(format_table(rotations))
    print_result("rotation", vars(args), {"rotations": [asdict(r) for r in rotations]})


if __name__ == "__main__":
    main()
