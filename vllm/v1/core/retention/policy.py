"""Which boundaries are worth a checkpoint.

Pure functions over ints and frozen geometry: no pool, no request, no clock.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import lcm

from vllm import envs
from vllm.config.retention import read_interval
from vllm.v1.core.geometry import CacheGeometry, GroupGeometry
from vllm.v1.kv_cache_interface import KVCacheConfig


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """Which checkpoints are kept, and in which order free ones are given up.

    Attributes:
        name: As operators write it: "auto", "none", "0" or the interval.
        interval: Also keep a checkpoint every so many tokens; 0: none.
        keeps_lean: A wanted boundary also keeps its lean one, and what only the other needs is
            given up first.
        keeps_junctions: Keep a checkpoint where prompts were seen to part.
        supersedes: A conversation's checkpoint before last is given up before others.
        keeps_coarse: Also keep the last multiple of ``COARSE_TOKENS`` in a prompt: clients that
            re-render or re-chunk a prompt's end part from it there, or shortly after.
        private_window: Window groups take no blocks for rows that die within the step.
        adapts: Learn from the traffic which eviction rule and which interval pay; leave spare
            checkpoints in memory that nothing else needs; put off what running requests made.
        rebuilds: Where dense rows reach further than checkpoints, compute the window rows again if
            that is less than computing on from the deepest checkpoint.
        pinned_share: Where a long prompt pauses, its checkpoint is given up last; so much of the
            pool may stand under such pins. None: nothing is pinned.
        pin_min_drop_blocks: Blocks of rows a step must compute and not keep, in some group, to pin.
    """

    name: str = "auto"
    interval: int = 0
    keeps_lean: bool = True
    keeps_junctions: bool = True
    supersedes: bool = True
    keeps_coarse: bool = True
    private_window: bool = True
    adapts: bool = False
    rebuilds: bool = False
    pinned_share: float | None = None
    pin_min_drop_blocks: int = 16


AUTO = RetentionPolicy(adapts=True, rebuilds=True)
_EQUAL_AGES = RetentionPolicy(supersedes=False, keeps_coarse=False)


def parse_retention(value: str | int | None, geometry: CacheGeometry) -> RetentionPolicy:
    """Turn what an operator wrote into a policy.

    Args:
        value: None or "auto": the best policy we have; "none": a checkpoint at every multiple of
            all block sizes; 0: where prompts and answers end and part; N: also every N tokens.
        geometry: The model's groups.

    Raises:
        ConfigError: The value is none of those, or N does not fit the blocks.
    """
    interval = read_interval(value, max(geometry.unit, geometry.lean))
    if isinstance(interval, int):
        return replace(_EQUAL_AGES, name=str(interval), interval=interval)
    if interval == "auto":
        return AUTO
    every_end = lcm(geometry.unit, *(group.block_size for group in geometry.groups))
    return replace(_EQUAL_AGES, name="none", interval=every_end)


def pinned_share(kv_cache_config: KVCacheConfig) -> float:
    """Return the share of a pool that pins may hold: the config's, else the environment's."""
    share = kv_cache_config.prefix_cache_pinned_share
    return envs.VLLM_PIN_MAX_SHARE if share is None else share


def resolve_policy(
    kv_cache_config: KVCacheConfig, geometry: CacheGeometry, *, enable_caching: bool
) -> RetentionPolicy:
    """Return the policy that the config or the environment asks for.

    Raises:
        ConfigError: It does not fit the model.
    """
    policy = parse_retention(
        envs.retention_or_default(kv_cache_config.prefix_cache_retention_interval), geometry
    )
    if enable_caching and envs.VLLM_PIN_SWA_TOKENS:
        policy = replace(
            policy,
            pinned_share=pinned_share(kv_cache_config),
            pin_min_drop_blocks=envs.VLLM_PIN_MIN_DROP_SIZE,
        )
    return policy


def replay_boundaries(
    geometry: CacheGeometry,
    num_prompt_tokens: int,
    *,
    keeps_lean: bool = True,
    keeps_coarse: bool = True,
) -> tuple[int, ...]:
    """Return the boundaries where a resend of the prompt, or a longer sibling, resumes.

    The largest boundary <= n - 1 (a resend computes at least its last token), n itself where it is
    a boundary (a longer sibling resumes there), the lean boundaries of both, and the coarse one,
    where a prompt whose end is written differently resumes. Ascending.
    """
    unit, n = geometry.unit, num_prompt_tokens
    wanted = {geometry.floor_unit(n - 1)}
    if n % unit == 0:
        wanted.add(n)
    if keeps_lean:
        wanted |= {geometry.floor_lean(p) for p in tuple(wanted)}
    if keeps_coarse:
        wanted.add(n // geometry.coarse * geometry.coarse)
    return tuple(sorted(p for p in wanted if p > 0))


def trailing_boundaries(geometry: CacheGeometry, position: int) -> tuple[int, ...]:
    """Return the boundaries where a request that stops at ``position`` would be resumed.

    The last full unit and its lean boundary. A running request carries them along: when it
    finishes or is preempted they are its terminal checkpoint. Ascending, without 0.
    """
    last = geometry.floor_unit(position)
    lean = geometry.floor_lean(last)
    return tuple(p for p in sorted({lean, last}) if p > 0)


def step_boundaries(
    geometry: CacheGeometry, start: int, end: int, kept: Iterable[int], interval: int = 0
) -> tuple[int, ...]:
    """Return the boundaries in ``(start, end]`` whose checkpoints the step must leave behind.

    Args:
        geometry: The model's groups.
        start: Tokens computed before the step.
        end: Tokens computed after it, drafts not counted.
        kept: The boundaries the request wants kept: replay boundaries and junctions.
        interval: Also every multiple of this many tokens; 0: none.
    """
    wanted = {p for p in kept if start < p <= end}
    wanted.update(p for p in trailing_boundaries(geometry, end) if start < p)
    if interval:
        wanted.update(range((start // interval + 1) * interval, end + 1, interval))
    return tuple(sorted(wanted))


def needed_window_blocks(
    group: GroupGeometry, end: int, alloc_end: int, boundaries: Sequence[int]
) -> list[int]:
    """Return the block indices a window group must hold when a step ends.

    Private prefill window: rows ``[first_needed(end), alloc_end)`` for the next step, and the rows
    of each boundary's checkpoint. Nothing else of the chunk takes a block.

    Args:
        group: The window group.
        end: Tokens computed when the step ends, drafts not counted.
        alloc_end: ``end`` plus drafts and lookahead, for which slots must exist.
        boundaries: Boundaries inside the step, ascending.

    Returns:
        Ascending indices without duplicates. Cost: the blocks returned.
    """
    spans = [group.block_range(group.first_needed(p), p) for p in boundaries]
    spans.append(group.block_range(group.first_needed(end), alloc_end))
    indices: list[int] = []
    for span in spans:
        # Boundaries ascend, and so do the spans' ends; only the starts can overlap.
        low = indices[-1] + 1 if indices else 0
        if not indices or span.start >= indices[0]:
            indices.extend(range(max(span.start, low), span.stop))
        else:
            indices = sorted({*indices, *span})
    return indices


def num_dropped_blocks(geometry: CacheGeometry, start: int, end: int) -> int:
    """Return how many blocks of rows a step computes and does not keep, in some window group.

    In a private prefill window such rows never take a block, but count as if they did. The group
    with the smallest blocks decides for all, because a checkpoint is pinned as a whole or not at
    all. A decode step drops one block at most; what earlier steps kept does not count, because a
    compressor drops its whole open window in the one step that closes it.

        window 128, blocks of 32    start 256           end 1024
        rows       ....................|....................
                                      256         897   1024
        blocks                         8 . . . . . 28 29 30 31     dropped: 8..27, 20 blocks
                                                 |- window -|
    """
    return max(
        (
            max(0, group.first_needed(end) // group.block_size - start // group.block_size)
            for group in geometry.windows
        ),
        default=0,
    )
