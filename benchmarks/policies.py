"""Retention policies that are compared with: how other engines keep window state, idea by idea."""

from collections.abc import Sequence

from vllm.v1.core.geometry import CacheGeometry, GroupGeometry
from vllm.v1.core.retention.boundaries import replay_boundaries
from vllm.v1.core.retention.fixed import FixedPolicy
from vllm.v1.core.retention.standing import CheckpointStanding
from vllm.v1.core.retention.tiers import Tier


class VariantPolicy(FixedPolicy):
    """A fixed policy with some of its ideas left out, and some of ``auto``'s added.

    Args:
        geometry: The model's groups.
        name: For tables.
        interval: Also keep a checkpoint every so many tokens; 0: none.
        keeps_lean: A wanted boundary also keeps its lean one, and what only the other needs is
            given up first.
        keeps_coarse: Also keep the last multiple of ``COARSE_TOKENS`` in a prompt.
        keeps_junctions: Keep a checkpoint where prompts were seen to part.
        supersedes: A conversation's checkpoint before last is given up before others.
        private_window: Window groups take no blocks for rows that die within the step.
    """

    def __init__(
        self,
        geometry: CacheGeometry,
        name: str,
        *,
        interval: int = 0,
        keeps_lean: bool = True,
        keeps_coarse: bool = True,
        keeps_junctions: bool = True,
        supersedes: bool = True,
        private_window: bool = True,
    ) -> None:
        super().__init__(geometry, interval, name)
        self._keeps_lean = keeps_lean
        self._keeps_coarse = keeps_coarse
        self._keeps_junctions = keeps_junctions
        self._supersedes = supersedes
        self._private_window = private_window

    def prompt_boundaries(self, num_prompt_tokens: int) -> tuple[int, ...]:
        """Return the replay boundaries that the variant keeps."""
        return replay_boundaries(
            self._geometry,
            num_prompt_tokens,
            keeps_lean=self._keeps_lean,
            keeps_coarse=self._keeps_coarse,
        )

    def junction_boundaries(self, position: int) -> tuple[int, ...]:
        """Return the junction, its lean boundary, or nothing."""
        if not self._keeps_junctions:
            return ()
        return super().junction_boundaries(position) if self._keeps_lean else (position,)

    def window_blocks(
        self, group: GroupGeometry, start: int, end: int, alloc_end: int, boundaries: Sequence[int]
    ) -> Sequence[int]:
        """Return what is needed, or all rows of the step: engines write every row to pages."""
        if self._private_window:
            return super().window_blocks(group, start, end, alloc_end, boundaries)
        return group.block_range(min(start, group.first_needed(end)), alloc_end)

    def tier(self, standing: CheckpointStanding, *, is_lean: bool, is_used: bool) -> Tier:
        """Return one tier for all but what the variant gives up first."""
        if self._supersedes and standing is CheckpointStanding.SUPERSEDED:
            return Tier.COLD
        return super().tier(standing, is_lean=is_lean or not self._keeps_lean, is_used=is_used)
