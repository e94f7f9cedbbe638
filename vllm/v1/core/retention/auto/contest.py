"""Which of several ways of keeping heavy checkpoints is followed: the one that hit most, lately."""

from collections.abc import Sequence

# Half of what was seen is forgotten while so many times the pool's spans are served.
_HALF_LIFE_POOLS = 8.0
# Another way must lead by so much of the pool's spans, however few hits there are.
_LEAST_LEAD = 0.1


class Contest:
    """Adds up what each way hits, and changes to another one that leads by enough.

    Each way's shadow weighs checkpoints, so its hits are close to those the cache would have. They
    can be added up over many pools' worth of prompts: what is taken for a lead is not luck.

    Owns: the sums.

    Args:
        num_ways: How many there are.
        current: The one followed first.
        lead: By what part of its hits another must lead.
    """

    __slots__ = ("_lead", "_sums", "current")

    def __init__(self, num_ways: int, current: int, lead: float) -> None:
        self._sums = [0.0] * num_ways
        self._lead = lead
        self.current = current

    def add(self, num_spans: int, hits: Sequence[float], capacity: float) -> bool:
        """Count what a prompt hit under each way; returns whether another is followed now.

        Args:
            num_spans: Of the prompt.
            hits: In spans.
            capacity: Spans that the pool holds.
        """
        kept = 0.5 ** (num_spans / (_HALF_LIFE_POOLS * capacity))
        self._sums = sums = [old * kept + new for old, new in zip(self._sums, hits, strict=True)]
        best = max(range(len(sums)), key=lambda k: sums[k])
        ahead = sums[best] - sums[self.current]
        if ahead <= max(self._lead * sums[self.current], _LEAST_LEAD * capacity):
            return False
        self.current = best
        return True
