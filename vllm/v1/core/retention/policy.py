"""What a retention policy decides: which boundaries a step leaves, and which free ones go first.

A policy sees numbers, standings and hashes, never a block or a request: the modules of the cache
apply what it says. ``docs/how-to/policy.md`` tells how to add one.
"""

from collections.abc import Container, Sequence
from typing import NamedTuple, Protocol

from vllm.utils.hashing import BlockHash
from vllm.v1.core.geometry import GroupGeometry
from vllm.v1.core.retention.queues import ChooseVictim
from vllm.v1.core.retention.standing import CheckpointStanding
from vllm.v1.core.retention.tiers import Tier
from vllm.v1.metrics.stats import CachePolicyStats

# The kinds of checkpoints that somebody asked for; spare ones have kinds from 0 on.
ASKED_FOR = -1
# At a prompt's last coarse boundary, where nothing else would have left one.
COARSE = -2


class Spare(NamedTuple):
    """A boundary at which to leave a checkpoint for nobody yet.

    Attributes:
        position: The boundary, in tokens.
        kind: What the policy counts it as, from 0 on; None: not at all, it goes before others.
    """

    position: int
    kind: int | None


class PrefillStep(NamedTuple):
    """A step of a prompt, and the memory around it.

    Attributes:
        start: Tokens computed before the step.
        end: Tokens computed after it, at most the prompt's.
        num_prompt_tokens: Tokens of the prompt.
        marks: Offsets in the prompt where parts of it end, the most likely to be shared first.
        taken: Boundaries of the step that have a checkpoint anyway.
        num_blocks: Blocks that cache nothing, the step's own taken off.
        num_spare_blocks: Blocks of spare checkpoints that are there, which may give way.
        pool_size: Blocks of the pool.
        full_from: Before this boundary checkpoints are partial: they lack the rows of layers that
            leave some out.
    """

    start: int
    end: int
    num_prompt_tokens: int
    marks: Sequence[int]
    taken: Container[int]
    num_blocks: int
    num_spare_blocks: int
    pool_size: int
    full_from: int = 0


class RetentionPolicy(Protocol):
    """Which prefixes are kept, and which go first.

    One object per cache; what it learns is its own.

    Attributes:
        name: As operators write it.
        rebuild_tokens: Where dense rows reach further than checkpoints: how many tokens before
            their end to compute again for the window rows there; None: that is not done.
        leaves_spares: Whether steps leave checkpoints nobody asked for; else nobody asks for
            ``spares``.
    """

    name: str
    rebuild_tokens: int | None
    leaves_spares: bool

    # ---- which boundaries a step leaves ------------------------------------------------------

    def prompt_boundaries(self, num_prompt_tokens: int) -> tuple[int, ...]:
        """Return where requests will resume that come after a prompt, ascending.

        Admission counts on no more than ``replay_boundaries`` returns.
        """
        ...

    def full_from(self, num_prompt_tokens: int, marks: Sequence[int]) -> int | None:
        """Return from where on a prompt's checkpoints shall hold the rows of all layers.

        Asked where layers leave rows out; None: from the first on that its request wants.

        Args:
            num_prompt_tokens: Of the prompt.
            marks: Offsets in it where parts of it end.
        """
        ...

    def junction_boundaries(self, position: int) -> tuple[int, ...]:
        """Return what to keep where prompts were seen to part; at most it and its lean one."""
        ...

    def grid(self, start: int, end: int) -> Sequence[int]:
        """Return the boundaries in ``(start, end]`` that are kept whatever a request asks for.

        Left out of a step that has no room for them.
        """
        ...

    def marked_boundaries(self, num_prompt_tokens: int, marks: Sequence[int]) -> Sequence[int]:
        """Return where a first prompt leaves what later ones with its beginning resume at.

        Left out of a step that has no room for them.

        Args:
            num_prompt_tokens: Of the prompt.
            marks: Offsets in it where parts of it end, the most likely to be shared first.
        """
        ...

    def spares(self, step: PrefillStep) -> Sequence[Spare]:
        """Return where a step leaves checkpoints nobody asked for: the first ones to go."""
        ...

    def window_blocks(
        self, group: GroupGeometry, start: int, end: int, alloc_end: int, boundaries: Sequence[int]
    ) -> Sequence[int]:
        """Return the block indices a window group must hold when a step ends.

        Args:
            group: The window group.
            start: Tokens computed before the step.
            end: Tokens computed after it, drafts not counted.
            alloc_end: ``end`` plus drafts and lookahead, for which slots must exist.
            boundaries: Boundaries inside the step whose checkpoints it leaves, ascending.
        """
        ...

    # ---- which of them go first --------------------------------------------------------------

    @property
    def choose_victim(self) -> ChooseVictim | None:
        """What says which free block that can be hit goes first; None: the one used longest ago."""
        ...

    def tier(self, standing: CheckpointStanding, *, is_lean: bool, is_used: bool) -> Tier:
        """Return where a checkpoint's free blocks stand.

        Args:
            standing: What it is to the cache.
            is_lean: Whether it needs no state of long compressors; else its lean one is near.
            is_used: Whether a request runs that made it, or resumed there.
        """
        ...

    @property
    def supersedes_at_once(self) -> bool:
        """Whether a checkpoint is superseded as soon as its conversation's next turn left one.

        Else it is a turn later.
        """
        ...

    def stays_when_passed(self, position: int, num_prompt_tokens: int) -> bool:
        """Whether what a request leaves behind as it goes on becomes a spare checkpoint."""
        ...

    # ---- what is observed --------------------------------------------------------------------

    def kind_of(self, position: int, num_prompt_tokens: int) -> int:
        """Return the kind of a checkpoint that a prompt keeps: ``ASKED_FOR`` or ``COARSE``."""
        ...

    def observe(
        self, block_hashes: Sequence[BlockHash], num_tokens: int, dense_share: float
    ) -> None:
        """Take note of an admitted prompt.

        Args:
            block_hashes: Its chained hashes, one per unit.
            num_tokens: Its tokens.
            dense_share: The part of what the pool caches that is dense rows.
        """
        ...

    def note_made(self, kind: int, *, is_partial: bool = False) -> bool:
        """Take note that a checkpoint was made; whether it is a spare one of a kind that pays.

        Args:
            kind: Of a spare one, as in ``Spare``; else as ``kind_of`` says.
            is_partial: Whether it lacks the rows of layers that leave some out.
        """
        ...

    def note_need(
        self, kind: int | None, num_behind: int, num_lost: int, *, is_partial: bool
    ) -> None:
        """Take note that a request needs the rows of all layers at a checkpoint.

        Args:
            kind: Of the checkpoint.
            num_behind: Tokens behind it in the prompt that left it.
            num_lost: Tokens that are computed again if it is partial.
            is_partial: Whether it is.
        """
        ...

    def note_hit(self, kind: int | None, num_tokens: int) -> bool:
        """Take note that a request resumed at one; whether its kind pays from now on.

        Args:
            kind: Of the checkpoint; None: it is not counted.
            num_tokens: Behind which the request goes on.
        """
        ...

    def reset(self) -> None:
        """Forget what was learnt."""
        ...

    # ---- what is reported --------------------------------------------------------------------

    def stats(self, spare_share: float, proven_share: float) -> CachePolicyStats | None:
        """Return what was learnt, with the shares of the pool it led to; None: nothing is."""
        ...

    def describe(self) -> str:
        """Return in words what is kept, for the log."""
        ...
