"""What the control plane of the prefix cache costs per request, in microseconds of processor time.

    python -m benchmarks.kv_cache [--repeats 20] [--only contract]

Hash, look up, allocate, 64 decode steps and free of a prompt of 8,192 tokens, with the groups of
DeepSeek-V4-Flash, by retention interval and manager, in a pool of 100,000 blocks. Then steps of 512
and 2,048 prompt tokens and of one token, in two pools and behind two contexts: their cost follows
the tokens scheduled, neither the pool nor the context. One JSON line.

The first decode step gives back what the prompt's windows no longer need, so it is a part of the
prompt's cost: ``decode_64`` has it, ``decode_64_later`` are the 64 steps after those.
"""

import argparse
import gc
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

from benchmarks.result import percentiles, print_result
from tests.v1.core.v4_geometry import BF16, FLASH, FP32, v4_config
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

NUM_BLOCKS = 100_000
PROMPT_LEN = 8192
DECODE_STEPS = 64
MAX_MODEL_LEN = 20_000
INTERVALS: tuple[int | str, ...] = ("none", 0, 4096, "auto")
SEED = 0

# Steps of a running request, behind a short and a long context, in a small and a large pool.
CHUNKS = (512, 2048)
CONTEXTS = (1024, 16_384)
POOLS = (10_000, NUM_BLOCKS)
# Tokens of the untimed step before each: it gives back what the step before it no longer needs.
SETTLING_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Case:
    """One manager to measure.

    Attributes:
        name: For the output.
        config: Groups, pool and retention.
        hash_block_size: Tokens under one hash.
        scheduler_block_size: Tokens on whose multiples hits end.
    """

    name: str
    config: KVCacheConfig
    hash_block_size: int
    scheduler_block_size: int


def whole_block_config(num_blocks: int, interval: int | str) -> KVCacheConfig:
    """DeepSeek-V4's six groups with vLLM 0.23's block sizes, hits at whole blocks."""
    bf16, fp32 = cast("Any", BF16), cast("Any", FP32)

    def window(block_size: int, tokens: int, width: int, dtype: Any) -> KVCacheSpec:
        return SlidingWindowMLASpec(
            block_size=block_size,
            num_kv_heads=1,
            head_size=width,
            dtype=dtype,
            sliding_window=tokens,
        )

    def entries(ratio: int) -> KVCacheSpec:
        return MLAAttentionSpec(
            block_size=256, num_kv_heads=1, head_size=512, dtype=bf16, compress_ratio=ratio
        )

    specs = [
        entries(4),
        entries(128),
        window(64, 128, 512, bf16),
        window(64, 128, 512, bf16),
        window(8, 128, 1024, fp32),
        window(4, 8, 2048, fp32),
    ]
    groups = [KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks, [], groups, prefix_cache_retention_interval=interval)


def contract_case(num_blocks: int, interval: int | str) -> Case:
    """Hits at whole blocks (``hit_unit`` None)."""
    return Case(f"contract/{interval}", whole_block_config(num_blocks, interval), 4, 256)


def unit_case(num_blocks: int, unit: int, interval: int | str) -> Case:
    """Hits at one unit."""
    config = replace(v4_config(unit, num_blocks, FLASH), prefix_cache_retention_interval=interval)
    return Case(f"unit{unit}/{interval}", config, unit, unit)


def plain_case(num_blocks: int, kind: str, hit_unit: int | None) -> Case:
    """One group of blocks of 16 tokens: full attention (Llama) or windows (Mistral).

    As it is served, or by the rules of whole blocks (``hit_unit`` None).
    """
    heads = {"num_kv_heads": 8, "head_size": 128, "dtype": cast("Any", BF16)}
    spec: KVCacheSpec = FullAttentionSpec(block_size=16, **heads)
    if kind == "mistral":
        spec = SlidingWindowSpec(block_size=16, sliding_window=4096, **heads)
    groups = [KVCacheGroupSpec(["layer0"], spec)]
    interval = "none" if kind == "llama" else "auto"
    config = KVCacheConfig(num_blocks, [], groups, interval, hit_unit=hit_unit)
    return Case(f"{kind}/{'whole blocks' if hit_unit is None else 'unit16'}", config, 16, 16)


class Clock:
    """Collects durations by name."""

    def __init__(self) -> None:
        self.samples: dict[str, list[float]] = {}

    def run(self, name: str, call: Callable[..., Any], *args: Any) -> Any:
        """Take a call's processor time."""
        begin = time.thread_time_ns()
        result = call(*args)
        self.samples.setdefault(name, []).append((time.thread_time_ns() - begin) / 1000)
        return result


def make_request(request_id: str, tokens: list[int]) -> Request:
    """Return a request that hashes nothing yet."""
    return Request(
        request_id=request_id,
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=DECODE_STEPS + 1, ignore_eos=True),
        pooling_params=None,
    )


def make_manager(case: Case, max_num_batched_tokens: int) -> Any:
    """Return a case's manager, empty."""
    return KVCacheManager(
        case.config,
        MAX_MODEL_LEN,
        case.scheduler_block_size,
        case.hash_block_size,
        max_num_batched_tokens=max_num_batched_tokens,
    )


def run_step(manager: Any, request: Request, num_tokens: int) -> None:
    """Schedule some more tokens of a request, as the scheduler does."""
    manager.new_step_starts()
    assert manager.allocate_slots(request, num_tokens) is not None
    manager.coordinator.commit_step()
    manager.take_step_work()
    request.num_computed_tokens += num_tokens


def decode(manager: Any, request: Request, num_steps: int) -> None:
    """Run decode steps."""
    for _ in range(num_steps):
        request.append_output_token_ids(7)
        run_step(manager, request, 1)


def measure(case: Case, repeats: int, prompt_len: int = PROMPT_LEN) -> dict[str, dict[str, float]]:
    """Measure one manager: microseconds by phase."""
    manager = make_manager(case, prompt_len)
    hasher = get_request_block_hasher(case.hash_block_size, sha256)
    rng = random.Random(SEED)
    # A long-lived process freezes its start-up objects too: a full collection walks 100,000 blocks.
    gc.collect()
    gc.freeze()
    clock = Clock()
    warm_up = 3
    for i in range(repeats + warm_up):
        if i == warm_up:
            clock = Clock()
        tokens = [rng.randrange(100_000) for _ in range(prompt_len)]
        request = make_request(str(i), tokens)
        request._block_hasher = hasher
        clock.run("hash", request.update_block_hashes)
        manager.new_step_starts()
        found = clock.run("lookup_miss", manager.look_up, request)
        num_new = request.num_tokens - found.num_tokens
        args = (request, num_new, found.num_tokens, found.blocks)
        assert clock.run("allocate", manager.allocate_slots, *args)
        clock.run("commit", manager.coordinator.commit_step)
        manager.take_step_work()
        request.num_computed_tokens = request.num_tokens
        for name in (f"decode_{DECODE_STEPS}", f"decode_{DECODE_STEPS}_later"):
            clock.run(name, decode, manager, request, DECODE_STEPS)
        clock.run("free", manager.free, request)
        again = make_request(f"{i}-again", tokens)
        again._block_hasher = hasher
        again.update_block_hashes()
        clock.run("lookup_hit", manager.look_up, again)
    gc.unfreeze()
    return {name: percentiles(samples) for name, samples in clock.samples.items()}


def measure_steps(case: Case, context: int, repeats: int) -> dict[str, float]:
    """Return the median microseconds of steps of a request that has computed ``context`` tokens."""
    num_tokens = context + sum(CHUNKS) + (len(CHUNKS) + 1) * SETTLING_TOKENS
    manager = make_manager(case, context)
    hasher = get_request_block_hasher(case.hash_block_size, sha256)
    rng = random.Random(SEED)
    gc.collect()
    gc.freeze()
    clock = Clock()
    for i in range(repeats):
        request = make_request(str(i), [rng.randrange(100_000) for _ in range(num_tokens)])
        request._block_hasher = hasher
        request.update_block_hashes()
        run_step(manager, request, context)
        for chunk in CHUNKS:
            run_step(manager, request, SETTLING_TOKENS)
            clock.run(f"{chunk} tokens", run_step, manager, request, chunk)
        run_step(manager, request, SETTLING_TOKENS)
        decode(manager, request, 1)
        clock.run(f"{DECODE_STEPS} x 1 token", decode, manager, request, DECODE_STEPS)
        manager.free(request)
    gc.unfreeze()
    return {name: percentiles(samples)["p50"] for name, samples in clock.samples.items()}


def measure_scaling(make: Callable[[int], Case], repeats: int) -> dict[str, Any]:
    """Return the cost of steps in all pools and contexts, and how it grows with each; 1 is not."""
    cells = {
        (pool, context): measure_steps(make(pool), context, repeats)
        for pool in POOLS
        for context in CONTEXTS
    }

    def growth(many: tuple[int, int], few: tuple[int, int]) -> dict[str, float]:
        return {name: round(us / cells[few][name], 2) for name, us in cells[many].items()}

    (small, large), (short, long) = POOLS, CONTEXTS
    few, many = (f"{chunk} tokens" for chunk in CHUNKS)
    return {
        **{f"pool {pool}, context {context}": us for (pool, context), us in cells.items()},
        f"pool x{large // small}": growth((large, short), (small, short)),
        f"context x{long // short}": growth((large, long), (large, short)),
        f"tokens x{CHUNKS[1] // CHUNKS[0]}": round(
            cells[large, long][many] / cells[large, long][few], 2
        ),
    }


def main() -> None:
    """Measure all and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--only", default="", help="measure cases whose name begins with this")
    args = parser.parse_args()
    init_none_hash(sha256)
    cases = [contract_case(NUM_BLOCKS, interval) for interval in INTERVALS]
    cases += [
        unit_case(NUM_BLOCKS, unit, interval) for unit in (32, 64, 128) for interval in INTERVALS
    ]
    cases += [
        plain_case(NUM_BLOCKS, kind, unit) for kind in ("llama", "mistral") for unit in (None, 16)
    ]
    values: dict[str, Any] = {}
    for case in cases:
        if case.name.startswith(args.only):
            values[case.name] = measure(case, args.repeats)
    scaling: dict[str, Callable[[int], Case]] = {
        "contract/0": lambda num_blocks: contract_case(num_blocks, 0),
        "unit32/auto": lambda num_blocks: unit_case(num_blocks, 32, "auto"),
    }
    for name, make in scaling.items():
        if name.startswith(args.only):
            values[f"{name}/scaling"] = measure_scaling(make, args.repeats)
    config = {
        "num_blocks": NUM_BLOCKS,
        "prompt_len": PROMPT_LEN,
        "decode_steps": DECODE_STEPS,
        "unit": "microseconds",
        "seed": SEED,
        "n": args.repeats,
    }
    print_result("kv_cache", config, values)


if __name__ == "__main__":
    main()
