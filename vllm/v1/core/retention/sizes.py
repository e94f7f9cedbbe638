"""The most blocks checkpoints and requests can hold: for admission and the check at start-up."""

from functools import lru_cache

from vllm.exceptions import ConfigError
from vllm.v1.core.geometry import CacheGeometry, GroupGeometry
from vllm.v1.core.retention.boundaries import (
    needed_window_blocks,
    replay_boundaries,
    trailing_boundaries,
)


def max_checkpoint_blocks(geometry: CacheGeometry) -> int:
    """Return the blocks of the largest checkpoint."""
    period = geometry.lean
    base = (max((group.keep for group in geometry.windows), default=0) // period + 2) * period
    return max(
        sum(len(group.block_range(group.first_needed(p), p)) for group in geometry.windows)
        for p in range(base, base + period, geometry.unit)
    )


@lru_cache(maxsize=64)
def max_window_blocks(geometry: CacheGeometry, group: GroupGeometry, lookahead: int) -> int:
    """Return the most blocks a request can hold in a window group during one step.

    Three parts that can be far from each other: the tail below the step's start; what the prompt's
    end leaves behind; what the step's end leaves behind (elsewhere only when a preempted request
    computes its answer anew). Each repeats with the coarse period, so one period is tried whole.
    """
    period = geometry.coarse
    base = (group.keep // period + 2) * period
    positions = range(base, base + period)
    start = max(len(group.block_range(group.first_needed(p), p)) for p in positions)
    prompt_end = max(
        len(needed_window_blocks(group, n, n + lookahead + 1, replay_boundaries(geometry, n)))
        for n in positions
    )
    step_end = max(
        len(needed_window_blocks(group, e, e + lookahead + 1, trailing_boundaries(geometry, e)))
        for e in positions
    )
    return start + prompt_end + step_end


def max_request_blocks(geometry: CacheGeometry, num_tokens: int, lookahead: int = 0) -> int:
    """Return the most blocks a request of ``num_tokens`` tokens can ever hold, copies included.

    The admission gate and the start-up check use this one number, so that a request the server
    accepts can always run alone.
    """
    end = num_tokens + lookahead
    dense = sum(group.num_dense_blocks(end) for group in geometry.dense)
    windows = sum(
        # A short request has fewer rows than a window can hold.
        min(max_window_blocks(geometry, group, lookahead), len(group.block_range(0, end + 1)))
        for group in geometry.windows
    )
    drafter_copies = sum(group.has_drafter_rows for group in geometry.windows)
    return dense + windows + geometry.max_copies + drafter_copies


def check_room_for_one(
    geometry: CacheGeometry, num_blocks: int, max_model_len: int, max_lookahead: int
) -> None:
    """Refuse a pool that cannot hold the longest request alone.

    Raises:
        ConfigError: It cannot.
    """
    needed = max_request_blocks(geometry, max_model_len, max_lookahead)
    if num_blocks - 1 < needed:
        raise ConfigError(
            f"The KV cache has {num_blocks - 1} usable blocks, but one request of max seq len "
            f"{max_model_len} needs {needed}: give more memory (--kv-cache-memory-bytes, "
            "VLLM_CPU_KVCACHE_SPACE, --gpu-memory-utilization, --num-gpu-blocks-override) or "
            "lower --max-model-len."
        )
