"""Which engine core caches which prefix, as the cores' own events tell it."""

from collections.abc import Sequence
from dataclasses import dataclass

from vllm.v1.engine.wire import CoreStatus, KVCacheInfo


@dataclass(frozen=True, slots=True)
class CacheShape:
    """How the groups of a cache tell what they hold.

    Attributes:
        unit: Tokens under one prefix hash.
        steps: Per group, tokens between two of its hashes; 0: it tells where a prompt can resume.
        rebuild_tokens: Tokens to compute for exact window rows where only dense rows are cached;
            None: that is not done.
    """

    unit: int
    steps: tuple[int, ...]
    rebuild_tokens: int | None = None

    @classmethod
    def from_info(cls, info: KVCacheInfo) -> "CacheShape":
        """Take it from what a core says of its cache."""
        steps = tuple(group.event_step for group in info.groups)
        return cls(info.hash_block_size, steps, info.rebuild_tokens)


class PrefixDirectory:
    """Prefix -> the cores that hold it, one bit each.

    Not thread-safe. Takes about 120 bytes a prefix and group, whatever the number of cores.

    Owns: the entries.

    Args:
        shape: Of every core's cache.
        num_cores: How many there are.
        max_entries: Bound on memory; prefixes that come when it is full are not entered.
    """

    def __init__(self, shape: CacheShape, num_cores: int, max_entries: int = 4_000_000) -> None:
        self._shape = shape
        self._num_cores = num_cores
        self._max_entries = max_entries
        self._groups: list[dict[int, int]] = [{} for _ in shape.steps]
        unit = shape.unit
        self._dense = [
            (group, max(1, step // unit))
            for group, step in zip(self._groups, shape.steps, strict=True)
            if step
        ]
        self._resume = [
            group for group, step in zip(self._groups, shape.steps, strict=True) if not step
        ]
        self._num_entries = 0

    @property
    def num_entries(self) -> int:
        """Prefixes of all groups."""
        return self._num_entries

    def apply(self, rank: int, changes: CoreStatus) -> None:
        """Take in what a core says."""
        if changes.is_cleared:
            self.drop(rank)
        for group_id, hashes in changes.removed.items():
            for short in hashes:
                self._remove(self._groups[group_id], short, ~(1 << rank))
        for group_id, hashes in changes.stored.items():
            group = self._groups[group_id]
            for short in hashes:
                known = group.get(short)
                if known is not None:
                    group[short] = known | 1 << rank
                elif self._num_entries < self._max_entries:
                    group[short] = 1 << rank
                    self._num_entries += 1

    def drop(self, rank: int) -> None:
        """Forget everything of a core. Cost: O(entries)."""
        for group in self._groups:
            for short in tuple(group):
                self._remove(group, short, ~(1 << rank))

    def _remove(self, group: dict[int, int], short: int, keep: int) -> None:
        known = group.get(short)
        if known is None:
            return
        if known & keep:
            group[short] = known & keep
        else:
            del group[short]
            self._num_entries -= 1

    def find_cached_tokens(self, hashes: Sequence[int], num_prompt_tokens: int) -> list[int]:
        """Return, per core, about how many tokens of a prompt need not be computed there.

        Args:
            hashes: Of the prompt's units, 64 bits each, in order.
            num_prompt_tokens: Of the prompt; the last one is always computed.

        Returns:
            The deepest resumable boundary whose dense rows are all there; where window rows can be
            computed again, the boundary of the dense rows less that work, if it is more.
        """
        unit = self._shape.unit
        limit = min(len(hashes), (num_prompt_tokens - 1) // unit)
        matched = self._match_dense(hashes, limit)
        if not self._resume:
            return [units * unit for units in matched]
        resumable = self._match_resume(hashes, matched)
        span = self._shape.rebuild_tokens
        if span is None:
            return [units * unit for units in resumable]
        pairs = zip(resumable, matched, strict=True)
        return [max(units * unit, dense * unit - span) for units, dense in pairs]

    def _match_dense(self, hashes: Sequence[int], limit: int) -> list[int]:
        """Return how many leading units all dense groups have, per core."""
        matched = [limit] * self._num_cores
        mask = (1 << self._num_cores) - 1
        dense = self._dense
        for i in range(limit):
            left, short = mask, hashes[i]
            for group, stride in dense:
                if (i + 1) % stride == 0:
                    left &= group.get(short, 0)
            if left != mask:
                for rank in _bits(mask & ~left):
                    matched[rank] = i
                mask = left
                if not mask:
                    break
        return matched

    def _match_resume(self, hashes: Sequence[int], matched: Sequence[int]) -> list[int]:
        """Return the deepest unit at or below the match where a core can resume, per core."""
        found = [0] * self._num_cores
        mask = 0
        for i in range(max(matched), 0, -1):
            for rank, units in enumerate(matched):
                if units == i:
                    mask |= 1 << rank
            short = hashes[i - 1]
            here = 0
            for group in self._resume:
                here |= group.get(short, 0)
            for rank in _bits(here & mask):
                found[rank] = i
            mask &= ~here
            if not mask and i <= min(matched):
                break
        return found


def _bits(mask: int) -> list[int]:
    return [rank for rank in range(mask.bit_length()) if mask >> rank & 1]
