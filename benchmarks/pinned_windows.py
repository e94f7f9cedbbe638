"""Long prefixes that come back while windows wash them away: what do pins gain, and `auto`?

    python -m benchmarks.pinned_windows [--prefixes 30] [--tokens 28000] [--requests 200]
        [--blocks 14000 16000 18000 | --cache-tokens 1470000] [--shares 0.25]

The case of the proposal that brought ``VLLM_PIN_SWA_TOKENS``: 30 prefixes of 28,000 tokens on a
Gemma with ten layers of full attention and fifty with windows of 1,024, no retention interval. It
used 15 to 60 prefixes, chunks of 8,192 tokens and a cache of 1.47 million tokens as that engine
counts them (``--cache-tokens``). Each
request is one of the prefixes, drawn at random, and 435 tokens of its own; requests come one after
another, through the real cache manager, in blocks of 64 tokens. ``vllm-`` policies take window
blocks from the pool for every row of a chunk, as engines without private windows do; the others are
ours. ``held`` is `auto` with every prefix kept by its first request (``/v1/cache/prefixes``).
"""

import argparse
import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

from tqdm import tqdm

from benchmarks.prefix_driver import PrefixDriver
from benchmarks.replay import make_pinning, make_policy
from benchmarks.result import print_result
from tests.v1.core.window_geometry import window_config
from vllm.cachelab.sim.requests import PrefixUnits

_UNIT = 64
_SUFFIX_TOKENS = 435
_KINDS = "wwwwwf" * 10
_WINDOW = 1024
_CHUNK = 8192
_LONGEST = 131_072
POLICIES = ("vllm-none", "vllm-pinned", "none", "pinned", "0", "auto", "auto+pinned", "held")


def blocks_for(cache_tokens: int) -> int:
    """Return the blocks of a pool that the other engine says holds so many tokens.

    It counts how many of the longest requests fit side by side, whose window groups hold a chunk
    and a window each.
    """
    groups = window_config(_UNIT, 2, window=_WINDOW, kinds=_KINDS).kv_cache_groups
    windows = (len(groups) - 1) * -(-(_WINDOW + _CHUNK) // _UNIT)
    return cache_tokens * (_LONGEST // _UNIT + windows) // _LONGEST + 1


def hit_rate(
    policy_name: str, num_blocks: int, share: float, num_prefixes: int, args: argparse.Namespace
) -> dict[str, float]:
    """Serve the requests under a policy; returns the share of prompt tokens that hit."""
    config = replace(
        window_config(_UNIT, num_blocks, window=_WINDOW, kinds=_KINDS),
        prefix_cache_pinned_share=share,
    )
    policy = make_policy("auto" if policy_name == "held" else policy_name, config)
    num_tokens = args.tokens + _SUFFIX_TOKENS
    driver = PrefixDriver(
        config,
        num_tokens + 1,
        policy=policy,
        pinning=make_pinning(policy_name, share),
        decode_stride=_UNIT,
    )
    rng = random.Random(0)
    num_units = -(-num_tokens // _UNIT)
    seen: set[int] = set()
    for number in tqdm(range(args.requests), desc=policy_name, mininterval=2.0, disable=None):
        prefix = rng.randrange(num_prefixes)
        common = args.tokens // _UNIT
        ids = [prefix * num_units + i for i in range(common)]
        ids += [(1 << 40) + number * num_units + i for i in range(num_units - common)]
        hasher = PrefixUnits(number, ids, _UNIT, _UNIT)
        request = driver.add(str(number), [0] * num_tokens, hasher)
        if policy_name == "held" and prefix not in seen:
            request.cache_boundaries = (args.tokens,)
            request.cache_ttls = {args.tokens: float("inf")}
        seen.add(prefix)
        driver.run_all()
    return {
        "hit_rate": round(driver.stats.hit_rate, 4),
        "ideal": round((args.requests - len(seen)) / args.requests * args.tokens / num_tokens, 4),
    }


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prefixes", nargs="+", type=int, default=[30])
    parser.add_argument("--tokens", type=int, default=28_000)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--blocks", nargs="+", type=int, default=[14_000, 16_000, 18_000])
    parser.add_argument("--cache-tokens", type=int, help="instead of --blocks")
    parser.add_argument("--shares", nargs="+", type=float, default=[0.25])
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Print a table and one JSON line."""
    args = parse_args(argv)
    runs = []
    pools = args.blocks if args.cache_tokens is None else [blocks_for(args.cache_tokens)]
    for num_blocks, share, prefixes in itertools.product(pools, args.shares, args.prefixes):
        for name in args.policies:
            rates = hit_rate(name, num_blocks, share, prefixes, args)
            where = {"blocks": num_blocks, "share": share, "prefixes": prefixes}
            runs.append({"policy": name, **where, **rates})
            print(f"{where}: {name:12s} {rates}", flush=True)
    print_result("pinned_windows", vars(args), {"runs": runs})


if __name__ == "__main__":
    main()
