"""Which eviction rule is in force: the one whose shadow hits most, lately."""

from collections.abc import Sequence

from vllm.v1.core.retention.auto.checkpoint_shadow import CheckpointShadow
from vllm.v1.core.retention.auto.comparison import Comparison
from vllm.v1.core.retention.auto.contest import Contest
from vllm.v1.core.retention.auto.eviction import Rule
from vllm.v1.core.retention.auto.shadow import Shadow

# A rule takes over when it is ahead by so many times what luck brings: many, for shadows of rows
# alone promise more of short probation than comes of it.
_LUCK = 2.25
# By what part of its hits a rule must lead where checkpoints are heavy.
_LEAD = 0.03
# Where residents help they help much. Where they do not, what they hold is slow to go.
_DISCOUNTS = {Rule.RESIDENTS: 0.85}


class Duel:
    """Lets every rule serve the same prompts in a shadow, and follows the one that hits most.

    Owns: the shadows and their contest.

    Args:
        capacity: Spans that the pool holds without checkpoints.
        weight: Of a checkpoint, in spans, where that decides what the pool holds: then spans are of
            use only below a checkpoint. None: rows alone are looked at.
    """

    __slots__ = ("_capacity", "_contest", "_rules", "_shadows", "_weighs")

    def __init__(self, capacity: int, weight: float | None = None) -> None:
        self._capacity = capacity
        self._weighs = weight is not None
        self._rules = tuple(Rule)
        first = self._rules.index(Rule.LRU)
        self._shadows: list[Shadow]
        self._contest: Comparison | Contest
        if weight is None:
            self._shadows = [Shadow(rule, capacity) for rule in Rule]
            self._contest = Comparison(len(self._rules), first, _LUCK)
        else:
            self._shadows = [CheckpointShadow(rule, capacity, weight) for rule in Rule]
            self._contest = Contest(len(self._rules), first, _LEAD)

    @property
    def rule(self) -> Rule:
        """The rule in force."""
        return self._rules[self._contest.current]

    @rule.setter
    def rule(self, rule: Rule) -> None:
        self._contest.current = self._rules.index(rule)

    def resize(self, capacity: int) -> None:
        """Leave so many spans to rows from now on, unless the shadows weigh checkpoints."""
        if self._weighs:
            return
        self._capacity = capacity
        for shadow in self._shadows:
            shadow.capacity = capacity

    def serve(self, keys: Sequence[int]) -> bool:
        """Let a prompt of these spans be served; returns whether another rule took over."""
        hits = [
            shadow.serve(keys) * _DISCOUNTS.get(rule, 1.0)
            for rule, shadow in zip(self._rules, self._shadows, strict=True)
        ]
        return self._contest.add(len(keys), hits, self._capacity)
