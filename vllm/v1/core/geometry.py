"""What a request of a model needs to resume at a boundary.

Pure functions over ints and frozen geometry: no pool, no request, no clock. What one group needs is
its spec's answer, ``KVCacheSpec.geometry``; the words are explained there
(``kv_cache_specs/geometry.py``).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import lcm

from vllm.exceptions import ConfigError
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_cache_specs.geometry import GroupGeometry

__all__ = ["COARSE_TOKENS", "CacheGeometry", "GroupGeometry", "num_rebuild_tokens"]

# Prompts are stored, chunked and rewritten in pieces of about this size.
COARSE_TOKENS = 512


def num_rebuild_tokens(windows: Sequence[int], tail: int) -> int | None:
    """Return how many tokens before a boundary to compute for exact window rows there.

    Args:
        windows: The window of every layer that has one, a drafter's included, in tokens.
        tail: Most tokens before a boundary of which some window group needs the rows.

    Returns:
        ``W + (L - 1) * (W - 1)`` for L layers of one window W, where no state reaches further back
        than a window; None: there are no windows.
    """
    if not windows:
        return None
    spread = sum(window - 1 for window in windows)
    return spread + max(0, tail - (min(windows) - 1)) + 1


def _rebuild_tokens(
    config: KVCacheConfig, groups: Sequence[GroupGeometry], lean: int
) -> int | None:
    """Return ``num_rebuild_tokens`` at lean boundaries, of the layers of a config.

    A recurrent state depends on all tokens before it, so a model with one rebuilds nothing.
    """
    if any(group.is_recurrent for group in groups):
        return None
    windows = [
        spec.rebuild_window
        for group in config.kv_cache_groups
        for spec in group.layer_specs().values()
        if spec.rebuild_window is not None
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
            ConfigError: A group's blocks do not fit the unit, or it cannot be cached at one unit.
        """
        unit = config.hit_unit
        assert unit is not None
        groups = tuple(group.geometry(i, unit) for i, group in enumerate(config.kv_cache_groups))
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
    def shares_whole_blocks(self) -> bool:
        """Whether a prefix is whole blocks and nothing else, whatever its length.

        Rows of a step can then be read by other requests of that step: none of them is copied, and
        no state is resumed from, before it is written.
        """
        return all(
            not group.is_window and group.block_size == self.unit and group.ratio == 1
            for group in self.groups
        )

    @cached_property
    def max_copies(self) -> int:
        """Copies of partly covered blocks that one admission may need beside its own blocks."""
        return sum(group.block_size > self.unit for group in self.dense)

    @cached_property
    def is_recurrent(self) -> bool:
        """Whether a checkpoint holds a state of all tokens, which no few of them bring back."""
        return any(group.is_recurrent for group in self.groups)

    @cached_property
    def lazy_reach(self) -> int:
        """How far before the first output that is read some layers leave rows out; 0: none do."""
        return max((group.lazy_reach for group in self.groups), default=0)

    def without_lazy_layers(self) -> "CacheGeometry":
        """Return the same for requests of which every layer computes every row."""
        groups = tuple(replace(group, lazy_reach=0) for group in self.groups)
        return replace(self, groups=groups)

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

    @cached_property
    def partial_blocks(self) -> tuple[int, ...]:
        """The same of one that lacks the rows of layers that leave some out."""
        groups = zip(self.windows, self.lean_blocks, strict=True)
        return tuple(0 if group.lazy_reach else count for group, count in groups)

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
        ends where the budget does: waiting for a larger budget could be waiting for ever. Where
        there are no windows any end is as good.
        """
        if end >= num_tokens or not self.windows:
            return end
        lean = self.floor_lean(end)
        return lean if lean > start else end
