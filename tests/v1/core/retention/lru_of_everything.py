"""A policy of one file: a checkpoint at every unit, and the one used longest ago goes first."""

from collections.abc import Sequence

from vllm.v1.core.geometry import CacheGeometry
from vllm.v1.core.retention.boundaries import multiples
from vllm.v1.core.retention.fixed import FixedPolicy
from vllm.v1.core.retention.standing import CheckpointStanding
from vllm.v1.core.retention.tiers import Tier


class LruOfEverything(FixedPolicy):
    """Keeps every boundary of every prompt, and ages all of them alike.

    Args:
        geometry: The model's groups.
        num_blocks: Blocks of the pool.
    """

    def __init__(self, geometry: CacheGeometry, num_blocks: int) -> None:
        del num_blocks
        super().__init__(geometry, geometry.unit, "lru")

    def grid(self, start: int, end: int) -> Sequence[int]:
        """Return all boundaries."""
        return multiples(self._geometry.unit, start, end)

    def tier(self, standing: CheckpointStanding, *, is_lean: bool, is_used: bool) -> Tier:
        """Return the one tier of all."""
        del standing, is_lean, is_used
        return Tier.REGULAR

    def describe(self) -> str:
        """Return what is kept, in words."""
        return "window state at every unit"
