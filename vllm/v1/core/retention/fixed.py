"""The policies that learn nothing: where prompts and answers end and part, and every N tokens."""

from collections.abc import Sequence
from math import lcm

from vllm.utils.hashing import BlockHash
from vllm.v1.core.geometry import CacheGeometry, GroupGeometry
from vllm.v1.core.retention.boundaries import (
    multiples,
    needed_window_blocks,
    replay_boundaries,
    with_lean,
)
from vllm.v1.core.retention.policy import ASKED_FOR, PrefillStep, Spare
from vllm.v1.core.retention.queues import ChooseVictim
from vllm.v1.core.retention.standing import CheckpointStanding
from vllm.v1.core.retention.tiers import Tier
from vllm.v1.metrics.stats import CachePolicyStats

ENDS = "window state where prompts and answers end and where prompts part"


class FixedPolicy:
    """Keeps the same boundaries of every prompt; all age equally.

    Args:
        geometry: The model's groups.
        interval: Also keep a checkpoint every so many tokens, a multiple of the unit; 0: none.
        name: As operators write it, if that is not the interval.
    """

    choose_victim: ChooseVictim | None = None
    rebuild_tokens: int | None = None
    leaves_spares = False
    supersedes_at_once = False

    def __init__(self, geometry: CacheGeometry, interval: int, name: str | None = None) -> None:
        self.name = str(interval) if name is None else name
        self.interval = interval
        self._geometry = geometry

    @classmethod
    def at_every_end(cls, geometry: CacheGeometry, num_blocks: int) -> "FixedPolicy":
        """Return the policy that also keeps every common multiple of all block sizes."""
        del num_blocks
        sizes = (group.block_size for group in geometry.groups)
        return cls(geometry, lcm(geometry.unit, *sizes), "none")

    def prompt_boundaries(self, num_prompt_tokens: int) -> tuple[int, ...]:
        """Return the replay boundary, the prompt's end, and the lean ones below them."""
        return replay_boundaries(self._geometry, num_prompt_tokens, keeps_coarse=False)

    def full_from(self, num_prompt_tokens: int, marks: Sequence[int]) -> int | None:
        """Return None: no layer leaves rows out under a fixed interval."""
        del num_prompt_tokens, marks
        return None

    def junction_boundaries(self, position: int) -> tuple[int, ...]:
        """Return the junction and its lean boundary."""
        return with_lean(self._geometry, position)

    def grid(self, start: int, end: int) -> Sequence[int]:
        """Return the multiples of the interval."""
        return multiples(self.interval, start, end)

    def marked_boundaries(self, num_prompt_tokens: int, marks: Sequence[int]) -> Sequence[int]:
        """Return none: the second prompt shows where they part."""
        del num_prompt_tokens, marks
        return ()

    def spares(self, step: PrefillStep) -> Sequence[Spare]:
        """Return none: what a fixed interval keeps is exactly what was asked for."""
        del step
        return ()

    def window_blocks(
        self, group: GroupGeometry, start: int, end: int, alloc_end: int, boundaries: Sequence[int]
    ) -> Sequence[int]:
        """Return the blocks of the next step's rows and of the checkpoints."""
        del start
        return needed_window_blocks(group, end, alloc_end, boundaries)

    def tier(self, standing: CheckpointStanding, *, is_lean: bool, is_used: bool) -> Tier:
        """Return one tier for all, but for spare ones, and what only one that is not lean needs."""
        del is_used
        if standing.is_spare:
            return Tier.SPARE
        if is_lean or standing is CheckpointStanding.JUNCTION:
            return Tier.REGULAR
        return Tier.COLD

    def stays_when_passed(self, position: int, num_prompt_tokens: int) -> bool:
        """Return False: what was passed is given up."""
        del position, num_prompt_tokens
        return False

    def kind_of(self, position: int, num_prompt_tokens: int) -> int:
        """Return ``ASKED_FOR``: nothing is told apart."""
        del position, num_prompt_tokens
        return ASKED_FOR

    def observe(
        self, block_hashes: Sequence[BlockHash], num_tokens: int, dense_share: float
    ) -> None:
        """Learn nothing."""

    def note_made(self, kind: int, *, is_partial: bool = False) -> bool:
        """Learn nothing."""
        del kind, is_partial
        return False

    def note_need(
        self, kind: int | None, num_behind: int, num_lost: int, *, is_partial: bool
    ) -> None:
        """Learn nothing."""
        del kind, num_behind, num_lost, is_partial

    def note_hit(self, kind: int | None, num_tokens: int) -> bool:
        """Learn nothing."""
        del kind, num_tokens
        return False

    def reset(self) -> None:
        """Do nothing: nothing was learnt."""

    def stats(self, spare_share: float, proven_share: float) -> CachePolicyStats | None:
        """Return None: nothing was learnt."""
        del spare_share, proven_share
        return None

    def describe(self) -> str:
        """Return what is kept, in words."""
        return f"{ENDS}, and every {self.interval} tokens" if self.interval else ENDS
