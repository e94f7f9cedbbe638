"""Against a plain list: which entry does each rule give up?"""

import random
from dataclasses import dataclass, field

import pytest

from vllm.v1.core.retention.auto.eviction import QUIET_POOLS, STALE_POOLS, Rule, choose_victim
from vllm.v1.core.retention.queues import Standing


@dataclass
class Lists:
    """Entries as (stamp, standing), in any order."""

    entries: list[tuple[int, Standing]] = field(default_factory=list)

    def stamps(self, standing: Standing) -> list[int]:
        return [stamp for stamp, known in self.entries if known is standing]

    def size(self, standing: Standing) -> int:
        return len(self.stamps(standing))

    def oldest(self, standing: Standing) -> int:
        return min(self.stamps(standing))

    def newest(self, standing: Standing) -> int:
        return max(self.stamps(standing))


def expected_victim(
    rule: Rule, entries: list[tuple[int, Standing]], capacity: int, now: int
) -> tuple[int, Standing]:
    """The rules in their own words, over all entries at once."""
    in_order = sorted(entries)
    new = [e for e in in_order if e[1] is Standing.NEW]
    kept = [stamp for stamp, standing in entries if standing is not Standing.NEW]
    is_quiet = max(kept, default=-1) < now - QUIET_POOLS * capacity
    share = {Rule.SHORT_PROBATION: 0.05, Rule.LONG_PROBATION: 0.6}.get(rule)
    if share is not None and not is_quiet and len(new) > share * capacity:
        return new[0]
    if rule is Rule.RESIDENTS:
        for standing in Standing:
            stale = [
                e for e in in_order if e[1] is standing and e[0] < now - STALE_POOLS * capacity
            ]
            if stale:
                return stale[0]
        unhit = [e for e in in_order if e[1] is not Standing.HIT]
        if unhit:
            return unhit[-1]
    return in_order[0]


@pytest.mark.parametrize("rule", Rule)
def test_the_victim_is_the_one_a_plain_list_gives(rule: Rule) -> None:
    rng = random.Random(rule.value)
    seen = set()
    for _ in range(500):
        capacity = rng.randint(5, 40)
        now = rng.randint(60, 400)
        stamps = rng.sample(range(now), rng.randint(1, capacity))
        weights = rng.choice([(1, 1, 1), (9, 1, 1), (0, 1, 9), (0, 0, 1)])
        lists = Lists([(stamp, rng.choices(list(Standing), weights)[0]) for stamp in stamps])
        standing, is_newest = choose_victim(rule, lists, capacity, now)
        stamp = lists.newest(standing) if is_newest else lists.oldest(standing)
        assert (stamp, standing) == expected_victim(rule, lists.entries, capacity, now)
        seen.add((standing, is_newest))
    assert len(seen) >= 3, "the draws reach few of the cases"
