"""Which ``--block-size`` for a model of windows and full attention: hits, work and speed.

    python -m benchmarks.block_sizes [--conversations 120] [--pools 24000 96000] [--no-speed]

Chats of several turns behind three system prompts, all lengths random and aligned to nothing, go
through the cache manager with the geometry of a Gemma 3 270M (15 layers of window 512, 3 of full
attention) under `auto`, in pools of equal bytes, given in tokens of all layers' rows. ``ideal``
is what an endless cache that hits to the token would reach. ``manager_us`` is the wall time of the
whole control plane per request. Then the random model of ``benchmarks.families`` decodes and
prefills at each block size. One JSON line.
"""

import argparse
import os
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine import compare, engine_generate
from benchmarks.families import CONFIGS, DECODE_TOKENS, build_reference
from benchmarks.prefix_driver import PrefixDriver
from benchmarks.result import print_result
from tests.v1.core.window_geometry import window_config
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher

BLOCK_SIZES = (16, 32, 64, 128)
_KINDS = "wwwwwf" * 3
_WINDOW = 512


def chat_prompts(num_conversations: int, num_active: int = 12) -> list[tuple[list[int], int]]:
    """Return prompts with the length of each one's answer; conversations take random turns."""
    rng = random.Random(0)

    def say(least: int, most: int) -> list[int]:
        return [rng.randrange(1 << 30) for _ in range(rng.randint(least, most))]

    systems = [say(60, 900) for _ in range(3)]
    prompts: list[tuple[list[int], int]] = []
    active: list[tuple[list[int], int]] = []
    started = 0
    while active or started < num_conversations:
        while len(active) < num_active and started < num_conversations:
            active.append((list(rng.choice(systems)), rng.randint(1, 10)))
            started += 1
        said, turns = active.pop(rng.randrange(len(active)))
        said += say(8, 250)
        answer = rng.randint(10, 400)
        prompts.append((list(said), answer))
        said += [0] * answer  # what the driver's requests generate
        if turns > 1:
            active.append((said, turns - 1))
    return prompts


def ideal_hits(prompts: Sequence[tuple[list[int], int]]) -> float:
    """Return the share of tokens behind a prefix that an earlier prompt or its answer had."""
    known: set[int] = set()
    hit = total = 0
    for tokens, answer in prompts:
        key = 0
        for i, token in enumerate([*tokens, *[0] * (answer - 1)]):
            key = hash((key, token))
            # The last token of a prompt is always computed.
            hit += key in known and i + 1 < len(tokens)
            known.add(key)
        total += len(tokens)
    return hit / total


def serve(
    prompts: Sequence[tuple[list[int], int]], block_size: int, pool_tokens: int
) -> dict[str, float]:
    """Serve the prompts one by one; returns hit rate and time per request."""
    config = window_config(block_size, pool_tokens // block_size, _WINDOW, _KINDS)
    longest = max(len(tokens) + answer for tokens, answer in prompts)
    driver = PrefixDriver(config, longest + 1)
    hasher = get_request_block_hasher(block_size, get_hash_fn_by_name("xxhash"))
    begin = time.perf_counter()
    for number, (tokens, answer) in enumerate(prompts):
        driver.serve(str(number), tokens, hasher, answer)
    spent = time.perf_counter() - begin
    return {
        "hit_rate": round(driver.stats.hit_rate, 4),
        "manager_us": round(spent / len(prompts) * 1e6, 1),
    }


def measure_speed(repeats: int) -> dict[str, Any]:
    """Return tokens per second of a random Gemma-3-like bf16 model at each block size."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    with tempfile.TemporaryDirectory() as name:
        build_reference("gemma3", torch.bfloat16, Path(name))
        settings = {"model": name, "dtype": "bfloat16", "skip_tokenizer_init": True}
        engines = {str(size): engine_generate(block_size=size, **settings) for size in BLOCK_SIZES}
        engines["engine"] = engines.pop(str(BLOCK_SIZES[0]))
        return compare(engines, repeats, CONFIGS["gemma3"]["vocab_size"], DECODE_TOKENS)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure all block sizes and print one JSON line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--conversations", type=int, default=120)
    parser.add_argument("--pools", nargs="+", type=int, default=[24_000, 96_000])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-speed", dest="speed", action="store_false")
    args = parser.parse_args(argv)
    prompts = chat_prompts(args.conversations)
    values: dict[str, Any] = {"prompts": len(prompts), "ideal": round(ideal_hits(prompts), 4)}
    print(f"{len(prompts)} prompts, {100 * values['ideal']:.1f}% of tokens could hit")
    for pool in args.pools:
        for size in BLOCK_SIZES:
            values[f"{pool}/{size}"] = found = serve(prompts, size, pool)
            hit, spent_us = 100 * found["hit_rate"], found["manager_us"]
            print(f"pool {pool:,}, block size {size:3}: {hit:.1f}% hit, {spent_us:.0f} us")
    if args.speed:
        values["speed"] = measure_speed(args.repeats)
    print_result("block_sizes", vars(args), values)


if __name__ == "__main__":
    main()
