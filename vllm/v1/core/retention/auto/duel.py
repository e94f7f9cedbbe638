"""Which eviction rule is in force: the one whose shadow hits most, lately."""

from collections.abc import Sequence

from vllm.v1.core.retention.auto.eviction import Rule
from vllm.v1.core.retention.auto.shadow import Shadow

# A rule takes over when it led by so much of the pool's spans ...
_LEAD = 0.04
# ... of which half is forgotten while so many times the pool's spans are served.
_HALF_LIFE_POOLS = 2.0
# Where residents help they help much. Where they do not, what they hold is slow to go.
_RESIDENTS_DISCOUNT = 0.85


class Duel:
    """Lets every rule serve the same prompts in a shadow, and follows the best.

    A rule's lead is what it hit beyond the rule in force, never below nothing: what it was worth
    in other traffic, long ago, does not count against it.

    Owns: the shadows, each rule's lead.

    Args:
        capacity: Spans that the pool holds.
    """

    __slots__ = ("_capacity", "_leads", "_shadows", "num_served", "rule", "since")

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._shadows = {rule: Shadow(rule, capacity) for rule in Rule}
        self._leads = dict.fromkeys(Rule, 0.0)
        self.rule = Rule.LRU
        # Spans served in all, and when the rule took over.
        self.num_served = 0
        self.since = 0

    def resize(self, capacity: int) -> None:
        """Let the shadows hold so many spans from now on."""
        self._capacity = capacity
        for shadow in self._shadows.values():
            shadow.capacity = capacity

    def serve(self, keys: Sequence[int]) -> bool:
        """Let a prompt of these spans be served; returns whether another rule took over."""
        hits: dict[Rule, float] = {
            rule: shadow.serve(keys) for rule, shadow in self._shadows.items()
        }
        hits[Rule.RESIDENTS] *= _RESIDENTS_DISCOUNT
        kept = 0.5 ** (len(keys) / (_HALF_LIFE_POOLS * self._capacity))
        current = hits[self.rule]
        leads = self._leads
        for rule, num_hit in hits.items():
            leads[rule] = max(0.0, leads[rule] * kept + num_hit - current)
        self.num_served += len(keys)
        best = max(leads, key=lambda rule: leads[rule])
        if leads[best] <= max(1.0, _LEAD * self._capacity):
            return False
        self.rule = best
        self.since = self.num_served
        self._leads = dict.fromkeys(Rule, 0.0)
        return True
