"""What a request needs to resume at a boundary, and which boundaries are worth keeping.

Pure functions over ints and frozen geometry: no pool, no request, no clock.

Words: the *unit* u is the number of tokens under one prefix hash. A *boundary* P is a multiple of u
where a request can resume. *Dense* groups keep every row; *window* groups need only the rows
``[first_needed(P), P)``, which a *checkpoint* of P holds.

    tokens     0 ........................ P-128 ............ P-4 . P
    dense      rows of every token below P, one per `ratio` tokens
    window     .......................... |<-- P-127 .. P-1 ------>|    align 1,   keep 127
    C4 state   ......................................... |P-4..P-1|     align 4,   keep 4
    C128 state rows floor(P/128)*128 .. P-1: none when 128 divides P    align 128, keep 0
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import lcm

from vllm.exceptions import ConfigError
from vllm.v1.kv_cache_interface import (
    CompressorStateSpec,
    KVCacheConfig,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

# Prompts are stored, chunked and rewritten in pieces of about this size.
COARSE_TOKENS = 512
# Copies of partly covered blocks that one admission may need beside its own blocks.
MAX_COPIES_PER_REQUEST = 2


def ceil_div(numerator: int, denominator: int) -> int:
    """Return ``numerator / denominator`` rounded up."""
    return -(-numerator // denominator)


@dataclass(frozen=True, slots=True)
class GroupGeometry:
    """One KV cache group, as the policy sees it.

    Attributes:
        group_id: Index in ``KVCacheConfig.kv_cache_groups``.
        is_window: Whether only the tail below a boundary is needed.
        block_size: Tokens of a block.
        ratio: Dense groups: tokens per stored row. Window groups: 1.
        align: Window groups: the needed tail begins at a multiple of this, less ``keep``.
        keep: Window groups: rows needed below the aligned position.
        has_drafter_rows: Whether rows of a drafter are in it, made with the token after theirs.
    """

    group_id: int
    is_window: bool
    block_size: int
    ratio: int = 1
    align: int = 1
    keep: int = 0
    has_drafter_rows: bool = False

    def first_needed(self, position: int) -> int:
        """Return the first row a request needs to go on at ``position``.

        Window groups: ``floor(position / align) * align - keep``, at least 0; equal to
        ``position`` when nothing is needed. Dense groups need everything: 0.
        """
        if not self.is_window:
            return 0
        return max(0, position // self.align * self.align - self.keep)

    def num_dense_blocks(self, num_tokens: int) -> int:
        """Return the blocks that hold the rows of ``num_tokens`` tokens in a dense group.

        A row exists once its ``ratio`` tokens do, so a short context may need no block at all.
        """
        return ceil_div(num_tokens // self.ratio * self.ratio, self.block_size)

    def block_range(self, first_row: int, end_row: int) -> range:
        """Return the block indices that cover rows ``[first_row, end_row)``."""
        if end_row <= first_row:
            return range(0)
        return range(first_row // self.block_size, ceil_div(end_row, self.block_size))


def member_spec(spec: KVCacheSpec) -> KVCacheSpec:
    """Return the spec that stands for a group: of unequal page sizes, any member."""
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return next(iter(spec.kv_cache_specs.values()))
    return spec


def group_geometry(group_id: int, spec: KVCacheSpec, unit: int) -> GroupGeometry:
    """Describe a group for the policy.

    Args:
        group_id: Index of the group.
        spec: The group's spec.
        unit: Tokens under one prefix hash.

    Raises:
        ConfigError: The block size is neither a divisor nor a multiple of the unit, or the group
            is of a kind that cannot hit at one unit.
    """
    spec = member_spec(spec)
    size = spec.block_size
    if unit % size and size % unit:
        raise ConfigError(
            f"KV cache group {group_id} has blocks of {size} tokens, which neither divide the "
            f"unit of {unit} tokens nor are a multiple of it: choose another --block-size."
        )
    if isinstance(spec, SlidingWindowSpec) and unit % size:
        raise ConfigError(
            f"KV cache group {group_id} has window blocks of {size} tokens, which do not divide "
            f"the unit of {unit} tokens: a checkpoint must end on a block's end."
        )
    if isinstance(spec, CompressorStateSpec):
        ratio = spec.state_ratio
        keep = ratio if spec.state_overlap else 0
        return GroupGeometry(group_id, True, size, align=ratio, keep=keep)
    if isinstance(spec, SlidingWindowSpec):
        return GroupGeometry(group_id, True, size, keep=spec.sliding_window - 1)
    if isinstance(spec, MLAAttentionSpec):
        return GroupGeometry(group_id, False, size, ratio=spec.compress_ratio)
    raise ConfigError(
        f"KV cache group {group_id} ({type(spec).__name__}) cannot be cached at one unit."
    )


@dataclass(frozen=True, slots=True)
class CacheGeometry:
    """All groups of a model, and the numbers derived from them.

    Attributes:
        unit: Tokens under one prefix hash: the smallest reusable prefix.
        groups: In group order.
        lean: Tokens; at its multiples a checkpoint carries no state of non-overlapping
            compressors, and every compressed row below is complete.
    """

    unit: int
    groups: tuple[GroupGeometry, ...]
    lean: int

    @classmethod
    def from_config(cls, config: KVCacheConfig) -> "CacheGeometry":
        """Describe a KV cache config whose ``hit_unit`` is set.

        Raises:
            ConfigError: A group's blocks do not fit the unit.
        """
        unit = config.hit_unit
        assert unit is not None
        groups = tuple(
            replace(
                group_geometry(i, group.kv_cache_spec, unit),
                has_drafter_rows=group.is_eagle_group,
            )
            for i, group in enumerate(config.kv_cache_groups)
        )
        lean = unit
        for group in groups:
            lean = max(lean, group.ratio, group.align)
        for group in groups:
            for step in (group.ratio, group.align):
                if lean % step:
                    raise ConfigError(
                        f"compress rate {step} of KV cache group {group.group_id} does not divide "
                        f"{lean}: rates and --block-size must be multiples of one another."
                    )
        return cls(unit, groups, lean)

    @property
    def dense(self) -> tuple[GroupGeometry, ...]:
        """The groups that keep everything."""
        return tuple(group for group in self.groups if not group.is_window)

    @property
    def windows(self) -> tuple[GroupGeometry, ...]:
        """The groups that need only the tail."""
        return tuple(group for group in self.groups if group.is_window)

    @property
    def coarse(self) -> int:
        """Tokens between coarse boundaries; each is a lean boundary too."""
        return lcm(COARSE_TOKENS, self.lean)

    def floor_unit(self, position: int) -> int:
        """Return the largest boundary at or below ``position``."""
        return position // self.unit * self.unit

    def floor_lean(self, position: int) -> int:
        """Return the largest lean boundary at or below ``position``."""
        return position // self.lean * self.lean

    def chunk_end(self, start: int, end: int, num_tokens: int) -> int:
        """Return where a prefill chunk ``[start, end)`` of a prompt of ``num_tokens`` should end.

        A chunk that does not finish the prompt ends on a lean boundary: no open compressor window
        is carried over and every chunk end is a cheap checkpoint. A chunk too short to reach one
        ends where the budget does: waiting for a larger budget could be waiting for ever.
        """
        if end >= num_tokens:
            return end
        lean = self.floor_lean(end)
        return lean if lean > start else end


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
        adapts: Learn from the traffic which eviction rule and which interval pay, and leave spare
            checkpoints in memory that nothing else needs.
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
    adapts: bool = True
    pinned_share: float | None = None
    pin_min_drop_blocks: int = 16


AUTO = RetentionPolicy()
_EQUAL_AGES = RetentionPolicy(supersedes=False, keeps_coarse=False, adapts=False)


def parse_retention(value: str | int | None, geometry: "CacheGeometry") -> RetentionPolicy:
    """Turn what an operator wrote into a policy.

    Args:
        value: None or "auto": the best policy we have; "none": a checkpoint at every multiple of
            all block sizes; 0: where prompts and answers end and part; N: also every N tokens.
        geometry: The model's groups.

    Raises:
        ConfigError: The value is none of those, or N does not fit the blocks.
    """
    text = "auto" if value is None else str(value).strip().lower()
    if text == "auto":
        return AUTO
    if text == "none":
        sizes = (group.block_size for group in geometry.groups)
        interval = lcm(geometry.unit, *sizes)
        return replace(_EQUAL_AGES, name="none", interval=interval)
    step = max(geometry.unit, geometry.lean)
    try:
        interval = int(text)
    except ValueError:
        interval = -1
    if interval < 0 or interval % step:
        raise ConfigError(
            f"prefix cache retention interval {value!r} is not valid here: use auto, none, 0, or a "
            f"positive multiple of {step} tokens."
        )
    return replace(_EQUAL_AGES, name=text, interval=interval)


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
        min(max_window_blocks(geometry, group, lookahead), ceil_div(end + 1, group.block_size))
        for group in geometry.windows
    )
    drafter_copies = sum(group.has_drafter_rows for group in geometry.windows)
    return dense + windows + MAX_COPIES_PER_REQUEST + drafter_copies
