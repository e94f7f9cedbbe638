"""When conversations give up where they began before: learnt from what each choice would hit."""

from collections.abc import Sequence

from vllm.v1.core.retention.auto.checkpoint_shadow import CheckpointShadow
from vllm.v1.core.retention.auto.comparison import Comparison
from vllm.v1.core.retention.auto.eviction import Rule
from vllm.v1.core.retention.auto.superseding import Superseding

# Another choice takes over when it is ahead by so many times what luck brings.
_LUCK = 2.0


class SupersedingLearner:
    """Lets every choice serve the same prompts in a shadow, and follows one that is clearly ahead.

    Owns: the shadows and their comparison.

    Args:
        capacity: Spans that the pool holds without checkpoints.
        weight: Of a checkpoint, in spans.
        rebuild: Spans to compute for window rows that are not there; None: that is not done.
    """

    __slots__ = ("_capacity", "_choices", "_comparison", "_shadows")

    def __init__(self, capacity: int, weight: float, rebuild: float | None) -> None:
        self._capacity = capacity
        self._choices = tuple(Superseding)
        self._shadows = [
            CheckpointShadow(Rule.LRU, capacity, weight, rebuild, choice)
            for choice in self._choices
        ]
        # Between the others: whichever of them is right, least is lost before it is found.
        first = self._choices.index(Superseding.A_TURN_LATER)
        self._comparison = Comparison(len(self._choices), first, _LUCK)

    @property
    def current(self) -> Superseding:
        """The choice in force."""
        return self._choices[self._comparison.current]

    def serve(self, keys: Sequence[int]) -> bool:
        """Let a prompt of these spans be served; returns whether another choice took over."""
        hits = [shadow.serve(keys) for shadow in self._shadows]
        return self._comparison.add(len(keys), hits, self._capacity)
