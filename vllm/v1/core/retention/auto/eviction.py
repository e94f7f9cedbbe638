"""Which cached thing is given up next: four rules over the same three queues.

Everything cached stands, by what is known of it, in one of three queues, least recently used first:

    NEW        nobody came back for it yet
    RETURNED   it had been given up, and was computed again before long
    HIT        somebody came back for it while it was there

The rules differ only in which end of which queue they take from, so changing the rule moves
nothing.
"""

from enum import Enum

from vllm.v1.core.retention.queues import Standing, StandingQueues


class Rule(Enum):
    """How a victim is chosen.

    Each is right for some traffic: LRU where what was used last is used next; the probation rules
    where most of what comes never returns, and differ in how long it may try; RESIDENTS where
    prompts take turns and do not all fit.
    """

    LRU = "lru"
    SHORT_PROBATION = "short_probation"
    LONG_PROBATION = "long_probation"
    RESIDENTS = "residents"


# The share of the pool that NEW may hold before it is the first to give.
_PROBATION_SHARE = {Rule.SHORT_PROBATION: 0.05, Rule.LONG_PROBATION: 0.6}
# Under RESIDENTS, what nobody used while so many times the pool's contents were, is given up.
STALE_POOLS = 3.0
# Probation protects what is come back for. Where that happened to nothing while so many times the
# pool's contents were used, there is nothing to protect.
QUIET_POOLS = 1.0
_PROTECTED = (Standing.HIT, Standing.RETURNED)


def choose_victim(
    rule: Rule, queues: StandingQueues, capacity: int, now: int
) -> tuple[Standing, bool]:
    """Return the queue to take the next victim from, and whether from its newest end.

    Args:
        rule: In force.
        queues: At least one has an entry.
        capacity: Entries the cache can hold in all.
        now: The stamp that was given last.
    """
    share = _PROBATION_SHARE.get(rule)
    if share is not None and queues.size(Standing.NEW) > share * capacity:
        quiet = now - QUIET_POOLS * capacity
        for standing in _PROTECTED:
            if queues.size(standing) and queues.newest(standing) >= quiet:
                return Standing.NEW, False
    filled = [standing for standing in Standing if queues.size(standing)]
    if rule is Rule.RESIDENTS:
        return _choose_for_residents(queues, filled, now - STALE_POOLS * capacity)
    return min(filled, key=queues.oldest), False


def _choose_for_residents(
    queues: StandingQueues, filled: list[Standing], stale: float
) -> tuple[Standing, bool]:
    for standing in filled:
        if queues.oldest(standing) < stale:
            return standing, False
    unhit = [standing for standing in filled if standing is not Standing.HIT]
    if unhit:
        return max(unhit, key=queues.newest), True
    return Standing.HIT, False
