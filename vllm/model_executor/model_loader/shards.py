"""Which part of a published tensor a rank's slot takes. Torch-free."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from vllm.exceptions import ConfigError


@dataclass(frozen=True, slots=True)
class Shard:
    """One of ``count`` equal parts of a tensor, side by side on one axis.

    Attributes:
        axis: The axis, counted from the first.
        index: Which part; 0..count-1.
        count: Parts in all. Ranks may share one: ``count`` is then below their number.
    """

    axis: int
    index: int
    count: int

    def cut_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the part's shape, for the whole tensor's."""
        return self._with_axis(shape, shape[self.axis] // self.count)

    def whole_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the whole tensor's shape, for the part's."""
        return self._with_axis(shape, shape[self.axis] * self.count)

    def find_range(self, size: int) -> tuple[int, int]:
        """Return where on an axis of ``size`` the part begins, and how long it is."""
        length = size // self.count
        return self.index * length, length

    def _with_axis(self, shape: Sequence[int], size: int) -> tuple[int, ...]:
        return (*shape[: self.axis], size, *shape[self.axis + 1 :])


ELSEWHERE = Shard(0, 0, 0)
"""A tensor that other ranks hold, and this one not at all."""

ShardFinder = Callable[[str], Shard | None]
"""Tells a published tensor's part by its name; None: the whole of it."""


@dataclass(frozen=True, slots=True)
class RankShare:
    """What a rank holds of a model, in numbers.

    Attributes:
        rank: Its index.
        size: Number of ranks.
        spreads_experts: Whether whole experts are dealt out, instead of a part of each.
    """

    rank: int = 0
    size: int = 1
    spreads_experts: bool = False

    def of_axis(self, axis: int) -> Shard | None:
        """Return the rank's part of an axis that all share out."""
        return Shard(axis, self.rank, self.size) if self.size > 1 else None

    def of_expert(self, expert: int, num_experts: int) -> Shard | None:
        """Return the rank's part of a tensor of one expert, where whole ones are dealt out."""
        return None if expert in self.find_experts(num_experts) else ELSEWHERE

    def find_experts(self, num_experts: int) -> range:
        """Return the experts that the rank holds, where whole ones are dealt out."""
        num_own = num_experts // self.size
        return range(self.rank * num_own, (self.rank + 1) * num_own)


WHOLE_SHARE = RankShare()
"""The share of a rank that holds everything."""


def refuse_uneven_axes(axes: Mapping[str, int], size: int) -> None:
    """Refuse a number of ranks that does not divide every axis.

    Args:
        axes: Name of a config.json field -> its value.
        size: Number of ranks.

    Raises:
        ConfigError: An axis does not divide evenly.
    """
    uneven = [f"{name} {value}" for name, value in axes.items() if value % size]
    if uneven:
        raise ConfigError(
            f"--tensor-parallel-size {size} does not divide the model's {', '.join(uneven)}: use a "
            "size that divides all of them."
        )


def find_whole(name: str) -> Shard | None:
    """A ``ShardFinder`` of a rank that holds everything."""
    del name
    return None
