"""What it costs that recurrent states are cut over blocks of the common pool.

    python -m benchmarks.state_blocks

For a state of Qwen 3.5 0.8B and 9B at ``--block-size 32``, bf16 keys and values: reading and
writing it in blocks that lie anywhere in the pool against in one piece, in turns; and what a
request costs the pool in blocks and in processor time when it crosses a unit in decode.
"""

import argparse
import random
import statistics
import time

import torch

from benchmarks.result import print_result
from tests.v1.core.unit_cache_driver import make_manager, make_request
from vllm.v1.core.layout.packing import build_packed_tensors, group_for_packing
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    RecurrentStateSpec,
    StateShape,
)

UNIT = 32
# Attention layers, key-value heads; recurrent layers, value heads, channels.
MODELS = {"0.8B": (6, 2, 18, 16, 6144), "9B": (8, 4, 24, 32, 8192)}


def make_specs(name: str) -> dict[str, KVCacheSpec]:
    """Return the caches of a release."""
    num_full, kv_heads, num_recurrent, heads, channels = MODELS[name]
    full = FullAttentionSpec(
        block_size=UNIT, num_kv_heads=kv_heads, head_size=256, dtype=torch.bfloat16
    )
    specs: dict[str, KVCacheSpec] = {f"layers.{i}": full for i in range(num_full)}
    specs["states"] = RecurrentStateSpec(
        block_size=UNIT,
        shape=StateShape(num_recurrent, heads, 128, 128, channels, 3),
        page_values=num_full * full.page_size_bytes // 4,
        dtype=torch.float32,
    )
    return specs


def time_passes(views: list[list[torch.Tensor]], num_rounds: int) -> list[float]:
    """Return for each set of pieces the median seconds of scaling all of them once, in turns."""
    times: list[list[float]] = [[] for _ in views]
    for _ in range(num_rounds):
        for own, pieces in zip(times, views, strict=True):
            start = time.perf_counter()
            for piece in pieces:
                piece.mul_(0.999)
            own.append(time.perf_counter() - start)
    return [statistics.median(own) for own in times]


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, dict[str, float]] = {}
    for name in MODELS:
        specs = make_specs(name)
        spec = specs["states"]
        assert isinstance(spec, RecurrentStateSpec)
        layout, shape = spec.layout, spec.shape
        num_blocks = 4 * layout.num_blocks
        pool = torch.ones(num_blocks, spec.page_values)
        ids = random.Random(0).sample(range(num_blocks), layout.num_blocks)
        per_block, values = layout.heads_per_block, shape.head_values
        num_heads = shape.num_layers * shape.num_heads
        scattered = [
            pool[ids[head // per_block], head % per_block * values :][:values]
            for head in range(num_heads)
        ]
        whole = torch.ones(num_heads, values)
        cut_s, whole_s = time_passes([scattered, list(whole)], arguments.rounds)
        figures[name] = {
            "blocks": layout.num_blocks,
            "waste_percent": 100 * (layout.num_blocks * spec.page_values / shape.num_values - 1),
            "cut_ms": 1e3 * cut_s,
            "whole_ms": 1e3 * whole_s,
            "control_us_per_token": time_decode(specs),
        }
    print_result("state_blocks", {"unit": UNIT, "rounds": arguments.rounds}, figures)


def time_decode(specs: dict[str, KVCacheSpec]) -> float:
    """Return microseconds of cache control for one decoded token, crossings of units included."""
    groups = group_for_packing(specs)
    num_blocks, tensors = build_packed_tensors(groups, 0, 4000)
    manager = make_manager(KVCacheConfig(num_blocks, tensors, groups, hit_unit=UNIT), 2048)
    request = make_request("a", list(range(64)), UNIT)
    manager.new_step_starts()
    assert manager.allocate_slots(request, 64) is not None
    manager.commit_step()
    request.num_computed_tokens = 64
    start, num_tokens = time.perf_counter(), 20 * UNIT
    for token in range(num_tokens):
        request.append_output_token_ids(token)
        manager.new_step_starts()
        assert manager.allocate_slots(request, 1) is not None
        manager.commit_step()
        request.num_computed_tokens += 1
    return 1e6 * (time.perf_counter() - start) / num_tokens


if __name__ == "__main__":
    main()
