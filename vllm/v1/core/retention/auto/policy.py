"""The policy that learns from the traffic what pays."""

from collections.abc import Sequence

from vllm.logger import init_logger
from vllm.utils.hashing import BlockHash
from vllm.v1.core.geometry import COARSE_TOKENS, CacheGeometry, GroupGeometry
from vllm.v1.core.retention.auto.conversations import SupersedingLearner
from vllm.v1.core.retention.auto.duel import Duel
from vllm.v1.core.retention.auto.eviction import Rule, choose_victim
from vllm.v1.core.retention.auto.full_ends import FullEnds
from vllm.v1.core.retention.auto.interval import IntervalLearner
from vllm.v1.core.retention.auto.ladder import LadderLearner
from vllm.v1.core.retention.auto.returns import Returns
from vllm.v1.core.retention.auto.spans import SpanSampler, is_sampled
from vllm.v1.core.retention.auto.spare import spare_boundaries
from vllm.v1.core.retention.auto.superseding import Superseding
from vllm.v1.core.retention.auto.yields import Yields
from vllm.v1.core.retention.boundaries import (
    multiples,
    needed_window_blocks,
    replay_boundaries,
    with_lean,
    worthy_marks,
)
from vllm.v1.core.retention.fixed import ENDS, FixedPolicy
from vllm.v1.core.retention.policy import (
    ASKED_FOR,
    COARSE,
    PrefillStep,
    RetentionPolicy,
    Spare,
)
from vllm.v1.core.retention.queues import Standing, StandingQueues
from vllm.v1.core.retention.standing import CheckpointStanding
from vllm.v1.core.retention.tiers import Tier
from vllm.v1.metrics.stats import CachePolicyStats

logger = init_logger(__name__)

_TIERS = {
    CheckpointStanding.FILLER: Tier.FILLER,
    CheckpointStanding.SPARE: Tier.SPARE,
    CheckpointStanding.WARM: Tier.WARM,
    CheckpointStanding.SUPERSEDED: Tier.COLD,
}


# What is marked may be gone on from at once, by a short message. Within such a part of the reach of
# layers that leave rows out, a checkpoint for it costs a few percent of a long prompt.
_NEAR_PART = 4
# Of so many prompts, about one keeps its coarse checkpoint where they do not pay.
_PROBES = 16


def make_auto(geometry: CacheGeometry, num_blocks: int) -> RetentionPolicy:
    """Return what "auto" stands for: a policy that learns, where there is something to learn.

    That is how dense rows and checkpoints, which take blocks from each other, weigh against one
    another. A model of full attention alone, or of windows alone, has nothing to weigh: it keeps
    where prompts and answers end and part, and gives up what was used longest ago.
    """
    if geometry.dense and geometry.windows:
        return AutoPolicy(geometry, num_blocks)
    return FixedPolicy(geometry, 0, "auto")


def _is_heavy(geometry: CacheGeometry) -> bool:
    """Whether a checkpoint is worth more care: a recurrent state, or rows of a wide window.

    Wide is a window that reaches back to the coarse boundary before, whose checkpoint then holds
    the same rows once more. With narrow ones, DeepSeek-V4's of 128 tokens among them, more is
    learnt from rows alone, and sooner.
    """
    return geometry.is_recurrent or any(g.keep + 1 >= COARSE_TOKENS for g in geometry.windows)


class AutoPolicy:
    """Learns from every admitted prompt, once, which eviction rule and which interval pay.

    Beside what fixed intervals keep, it keeps the last multiple of ``COARSE_TOKENS`` in a prompt,
    for clients that write a prompt's end differently; leaves spare checkpoints in memory that
    nothing else needs; gives up where a conversation began before, as soon as pays; puts off what
    running requests made; and computes window rows again where that is less than going on from the
    deepest checkpoint.

    Owns: the duel of eviction rules, the learners of the interval and of what conversations give
    up, the yields of spare kinds, the returns of coarse checkpoints, and what partial ones cost.

    Args:
        geometry: The model's groups.
        num_blocks: Blocks of the pool, the null block left out.
    """

    name = "auto"
    leaves_spares = True

    def __init__(self, geometry: CacheGeometry, num_blocks: int) -> None:
        blocks_per_token = sum(1 / group.block_size for group in geometry.dense)
        self._capacity_tokens = int(num_blocks / blocks_per_token) if blocks_per_token else 0
        self._weight = sum(geometry.lean_blocks) / (blocks_per_token or 1.0)
        # What an interval leaves inside prompts.
        self._grid_weight = sum(geometry.partial_blocks) / (blocks_per_token or 1.0)
        self._geometry = geometry
        self.rebuild_tokens = geometry.rebuild_tokens
        self._is_heavy = _is_heavy(geometry)
        self.reset()

    def reset(self) -> None:
        """Forget what was learnt."""
        self._sampler = SpanSampler(self._geometry.unit, self._capacity_tokens)
        step = max(self._geometry.unit, self._geometry.lean)
        capacity = self._sampler.capacity
        tokens, reach = self._sampler.tokens_per_span, self._geometry.lazy_reach
        weight = self._weight / tokens
        self._learner: IntervalLearner | LadderLearner
        self._conversations: SupersedingLearner | None = None
        if self._is_heavy:
            self.duel = Duel(capacity, weight)
            self._learner = LadderLearner(
                capacity, self._weight, step, tokens, self._grid_weight, reach
            )
        else:
            rebuild = None if self.rebuild_tokens is None else self.rebuild_tokens / tokens
            self.duel = Duel(capacity)
            self._learner = IntervalLearner(capacity, self._grid_weight, step, reach)
            self._conversations = SupersedingLearner(capacity, weight, rebuild)
        self._yields = Yields()
        self._returns = Returns(self._weight, self._grid_weight / max(1.0, self._weight))
        self._full_ends = FullEnds()

    @property
    def rule(self) -> Rule:
        """The eviction rule in force."""
        return self.duel.rule

    @property
    def interval(self) -> int:
        """Tokens between two checkpoints that new prompts leave; 0: none."""
        return self._learner.interval

    @property
    def superseding(self) -> Superseding:
        """When a conversation's checkpoint goes first because it has one further on."""
        learner = self._conversations
        return Superseding.AT_ONCE if learner is None else learner.current

    @property
    def supersedes_at_once(self) -> bool:
        """Whether it goes first as soon as the next turn left one further on."""
        return self.superseding is Superseding.AT_ONCE

    # ---- which boundaries a step leaves ------------------------------------------------------

    def prompt_boundaries(self, num_prompt_tokens: int) -> tuple[int, ...]:
        """Return the replay boundary, the prompt's end, their lean ones, and the coarse one.

        The coarse one, for prompts whose ends were written differently, is left out where
        checkpoints are heavy, and where such checkpoints turned out to be hit less than others:
        then a few prompts keep theirs, to see whether that has changed.
        """
        keeps_coarse = not self._is_heavy and (
            # By its length, so that planning the prompt again says the same.
            not self._returns.has_coarse_failed or is_sampled(num_prompt_tokens, _PROBES)
        )
        return replay_boundaries(self._geometry, num_prompt_tokens, keeps_coarse=keeps_coarse)

    def full_from(self, num_prompt_tokens: int, marks: Sequence[int]) -> int | None:
        """Return where the end begins of which it pays to compute all layers, marks near it too."""
        near = self._geometry.lazy_reach // _NEAR_PART
        behind = [num_prompt_tokens - mark for mark in marks]
        length = max(self._full_ends.length, *(own for own in behind if own <= near), 0)
        if not length or length >= num_prompt_tokens:
            return None
        return self._geometry.floor_lean(num_prompt_tokens - length)

    def junction_boundaries(self, position: int) -> tuple[int, ...]:
        """Return the junction and its lean boundary."""
        return with_lean(self._geometry, position)

    def grid(self, start: int, end: int) -> Sequence[int]:
        """Return the multiples of the interval in force."""
        return multiples(self.interval, start, end)

    def marked_boundaries(self, num_prompt_tokens: int, marks: Sequence[int]) -> Sequence[int]:
        """Return the marks where a heavy checkpoint saves enough tokens; else spares do."""
        if not self._is_heavy:
            return ()
        return worthy_marks(self._geometry.unit, num_prompt_tokens, marks, self._weight)

    def spares(self, step: PrefillStep) -> Sequence[Spare]:
        """Return places near the prompt's end, and a grid, as far as memory is empty."""
        return spare_boundaries(self._geometry, step)

    def window_blocks(
        self, group: GroupGeometry, start: int, end: int, alloc_end: int, boundaries: Sequence[int]
    ) -> Sequence[int]:
        """Return the blocks of the next step's rows and of the checkpoints."""
        del start
        return needed_window_blocks(group, end, alloc_end, boundaries)

    # ---- which of them go first --------------------------------------------------------------

    def tier(self, standing: CheckpointStanding, *, is_lean: bool, is_used: bool) -> Tier:
        """Return the tier by standing; of what was asked for, what runs needs goes last."""
        tier = _TIERS.get(standing)
        if standing is CheckpointStanding.SUPERSEDED and self.superseding is Superseding.NEVER:
            tier = None
        if tier is not None:
            return tier
        if not is_lean and standing is not CheckpointStanding.JUNCTION:
            return Tier.COLD
        return Tier.LIVE if is_used else Tier.REGULAR

    def choose_victim(
        self, queues: StandingQueues, capacity: int, now: int
    ) -> tuple[Standing, bool]:
        """Return what the rule in force gives up next."""
        return choose_victim(self.duel.rule, queues, capacity, now)

    def stays_when_passed(self, position: int, num_prompt_tokens: int) -> bool:
        """Return whether it is in the prompt: as good a place as others to fill memory."""
        return position <= num_prompt_tokens

    # ---- what is observed, and what is reported ----------------------------------------------

    def observe(
        self, block_hashes: Sequence[BlockHash], num_tokens: int, dense_share: float
    ) -> None:
        """Let all rules and intervals serve a prompt, and follow those that lead."""
        self._returns.note_prompt(num_tokens)
        spans = self._sampler.sample(block_hashes, num_tokens)
        if not spans:
            return
        keys = [span.key for span in spans]
        self.duel.resize(max(1, int(self._sampler.capacity * dense_share)))
        if self.duel.serve(keys):
            logger.debug("Prefix cache: eviction rule is now %s.", self.rule.value)
        if self._conversations is not None and self._conversations.serve(keys):
            logger.debug("Prefix cache: checkpoints go first %s.", self.superseding.value)
        if self._learner.serve(spans):
            logger.debug("Prefix cache: interval of checkpoints is now %d tokens.", self.interval)

    def kind_of(self, position: int, num_prompt_tokens: int) -> int:
        """Return ``COARSE`` where only the coarse boundary keeps a checkpoint."""
        geometry = self._geometry
        if self._is_heavy or position not in replay_boundaries(geometry, num_prompt_tokens):
            return ASKED_FOR
        others = replay_boundaries(geometry, num_prompt_tokens, keeps_coarse=False)
        return ASKED_FOR if position in others else COARSE

    def note_made(self, kind: int, *, is_partial: bool = False) -> bool:
        """Count a checkpoint by its kind."""
        if kind < 0:
            self._returns.note_made(kind, is_partial=is_partial)
        else:
            self._full_ends.note_made(kind)
        self._yields.note_made(kind)
        return kind >= 0 and self._yields.is_promising(kind)

    def note_hit(self, kind: int | None, num_tokens: int) -> bool:
        """Count a hit by its checkpoint's kind."""
        self._returns.note_hit(kind, num_tokens)
        if kind is None:
            return False
        did_pay = kind < 0 or self._yields.is_promising(kind)
        self._yields.note_hit(kind)
        return not did_pay and self._yields.is_promising(kind)

    def note_need(
        self, kind: int | None, num_behind: int, num_lost: int, *, is_partial: bool
    ) -> None:
        """Count it for spare checkpoints: the others hold the rows of all layers once asked to."""
        if kind is not None and kind >= 0:
            self._full_ends.note_need(kind, num_behind, num_lost, is_partial=is_partial)

    def stats(self, spare_share: float, proven_share: float) -> CachePolicyStats | None:
        """Return rule and interval in force."""
        return CachePolicyStats(self.rule.value, self.interval, spare_share, proven_share)

    def describe(self) -> str:
        """Return what is kept, in words."""
        return ENDS
