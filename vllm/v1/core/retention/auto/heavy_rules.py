"""Which eviction rule is in force where checkpoints are heavy."""

from collections.abc import Sequence

from vllm.v1.core.retention.auto.contest import Contest
from vllm.v1.core.retention.auto.eviction import Rule
from vllm.v1.core.retention.auto.shadow import Shadow

# By what part of its hits a rule must lead.
_LEAD = 0.03
# Where residents help they help much. Where they do not, what they hold is slow to go.
_DISCOUNTS = {Rule.RESIDENTS: 0.85}


class HeavyShadow(Shadow):
    """A shadow in which spans are of use only below a checkpoint, and checkpoints weigh.

    A prompt leaves one where it ends and, from the second that goes on otherwise, where it parts
    from others. The one that a conversation resumed at is given up when it leaves one further on.

    Owns: also the spans that checkpoints end in.

    Args:
        rule: In force, always.
        capacity: Spans it holds; may be changed.
        weight: Of a checkpoint, in spans.
    """

    __slots__ = ("_marked", "_weight")

    def __init__(self, rule: Rule, capacity: int, weight: float) -> None:
        super().__init__(rule, capacity)
        self._weight = weight
        # Span -> whether prompts part there.
        self._marked: dict[int, bool] = {}

    def serve(self, keys: Sequence[int]) -> int:
        """Serve a prompt; returns how many of its first spans lay below a checkpoint."""
        held = self._use(keys)
        matched = held.index(False) if False in held else len(held)
        marked = self._marked
        resumed = next((n for n in range(matched, 0, -1) if keys[n - 1] in marked), 0)
        if 0 < resumed < len(keys) and not marked[keys[resumed - 1]]:
            del marked[keys[resumed - 1]]
        if resumed < matched < len(keys):
            marked[keys[matched - 1]] = True
        marked.setdefault(keys[-1], False)
        self._make_room(0)
        return resumed

    def _make_room(self, num_spans: int) -> None:
        num_held = sum(map(len, self._queues))
        while num_held and (
            num_held + num_spans + self._weight * len(self._marked) > self.capacity
        ):
            self._marked.pop(self._give_up(), None)
            num_held -= 1


class HeavyDuel:
    """Lets every rule serve the same prompts in a shadow, and follows the one that hits most.

    Owns: the shadows and the contest.

    Args:
        capacity: Spans that the pool holds without checkpoints.
        weight: Of a checkpoint, in spans.
    """

    __slots__ = ("_capacity", "_contest", "_rules", "_shadows")

    def __init__(self, capacity: int, weight: float) -> None:
        self._capacity = capacity
        self._rules = tuple(Rule)
        self._shadows = [HeavyShadow(rule, capacity, weight) for rule in self._rules]
        self._contest = Contest(len(self._rules), self._rules.index(Rule.LRU), _LEAD)

    @property
    def rule(self) -> Rule:
        """The rule in force."""
        return self._rules[self._contest.current]

    @rule.setter
    def rule(self, rule: Rule) -> None:
        self._contest.current = self._rules.index(rule)

    def resize(self, capacity: int) -> None:
        """Do nothing: the shadows count what checkpoints take themselves."""

    def serve(self, keys: Sequence[int]) -> bool:
        """Let a prompt of these spans be served; returns whether another rule took over."""
        hits = [
            shadow.serve(keys) * _DISCOUNTS.get(rule, 1.0)
            for rule, shadow in zip(self._rules, self._shadows, strict=True)
        ]
        return self._contest.add(len(keys), hits, self._capacity)
