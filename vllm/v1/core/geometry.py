"""What a request needs to resume at a boundary.

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

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import lcm

from vllm.exceptions import ConfigError
from vllm.utils.math_utils import cdiv
from vllm.v1.core.retention.rebuild import num_rebuild_tokens
from vllm.v1.kv_cache_interface import (
    CompressorStateSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
    member_spec,
)

# Prompts are stored, chunked and rewritten in pieces of about this size.
COARSE_TOKENS = 512


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
        return cdiv(num_tokens // self.ratio * self.ratio, self.block_size)

    def block_range(self, first_row: int, end_row: int) -> range:
        """Return the block indices that cover rows ``[first_row, end_row)``."""
        if end_row <= first_row:
            return range(0)
        return range(first_row // self.block_size, cdiv(end_row, self.block_size))

    def rows_below(self, position: int) -> range:
        """Return the block indices that a request needs to go on at ``position``."""
        return self.block_range(self.first_needed(position), position)


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
    # Sink tokens stand in blocks of their own, which no prefix hash covers.
    if isinstance(spec, FullAttentionSpec) and not isinstance(spec, SinkFullAttentionSpec):
        return GroupGeometry(group_id, False, size)
    raise ConfigError(
        f"KV cache group {group_id} ({type(spec).__name__}) cannot be cached at one unit."
    )


def _rebuild_tokens(
    config: KVCacheConfig, groups: Sequence[GroupGeometry], lean: int
) -> int | None:
    """Return ``num_rebuild_tokens`` at lean boundaries, of the layers of a config."""
    windows = [
        spec.sliding_window
        for group in config.kv_cache_groups
        for spec in group.layer_specs().values()
        if isinstance(spec, SlidingWindowSpec) and not isinstance(spec, CompressorStateSpec)
    ]
    far = (max(windows, default=0) // lean + 1) * lean
    tail = max((far - group.first_needed(far) for group in groups if group.is_window), default=0)
    return num_rebuild_tokens(windows, tail)


@dataclass(frozen=True)
class CacheGeometry:
    """All groups of a model, and the numbers derived from them.

    Attributes:
        unit: Tokens under one prefix hash: the smallest reusable prefix.
        groups: In group order.
        lean: Tokens; at its multiples a checkpoint carries no state of non-overlapping
            compressors, and every compressed row below is complete.
        rebuild_tokens: Tokens before a boundary to compute for exact window rows there, if that is
            possible; see ``rebuild``.
    """

    unit: int
    groups: tuple[GroupGeometry, ...]
    lean: int
    rebuild_tokens: int | None = None

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
        return cls(unit, groups, lean, _rebuild_tokens(config, groups, lean))

    @cached_property
    def dense(self) -> tuple[GroupGeometry, ...]:
        """The groups that keep everything."""
        return tuple(group for group in self.groups if not group.is_window)

    @cached_property
    def windows(self) -> tuple[GroupGeometry, ...]:
        """The groups that need only the tail."""
        return tuple(group for group in self.groups if group.is_window)

    @cached_property
    def coarse(self) -> int:
        """Tokens between coarse boundaries; each is a lean boundary too."""
        return lcm(COARSE_TOKENS, self.lean)

    @cached_property
    def lean_blocks(self) -> tuple[int, ...]:
        """Per window group the blocks of a lean checkpoint, far into a prompt."""
        keep = max((group.keep for group in self.windows), default=0)
        position = (keep // self.coarse + 2) * self.coarse
        return tuple(len(group.rows_below(position)) for group in self.windows)

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
