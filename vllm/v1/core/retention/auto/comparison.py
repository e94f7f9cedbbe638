"""Which of several choices is followed: one that is further ahead than luck explains."""

from collections.abc import Sequence

# Half of what was seen is forgotten while so many times the pool's spans are served.
_HALF_LIFE_POOLS = 8.0
# Another choice must be ahead by so much of the pool's spans, however few hits there are.
_LEAST_LEAD = 0.005


class Comparison:
    """Adds up by how much each choice hits more than the one that is followed.

    How far luck alone brings a choice is estimated by what prompts differed in: a sum of
    differences d, as often for it as against it, strays by about the root of the sum of d². So a
    few prompts are enough where the choices differ seldom and always the same way, and many are
    needed where they take turns, or where one prompt is a good part of what is cached.

    Owns: how far each choice is ahead, and the sums of squares.

    Args:
        num_ways: How many choices there are.
        current: The one followed first.
        luck: By how many times what luck brings another choice must be ahead.
    """

    __slots__ = ("_ahead", "_luck", "_squares", "current")

    def __init__(self, num_ways: int, current: int, luck: float) -> None:
        self._luck = luck
        self._ahead = [0.0] * num_ways
        self._squares = [0.0] * num_ways
        self.current = current

    def add(self, num_spans: int, hits: Sequence[float], capacity: float) -> bool:
        """Count what a prompt hit under each choice; returns whether another is followed now.

        Args:
            num_spans: Of the prompt.
            hits: In spans.
            capacity: Spans that the pool holds.
        """
        kept = 0.5 ** (num_spans / (_HALF_LIFE_POOLS * capacity))
        current = hits[self.current]
        self._ahead = [old * kept + h - current for old, h in zip(self._ahead, hits, strict=True)]
        self._squares = [
            old * kept + (h - current) ** 2 for old, h in zip(self._squares, hits, strict=True)
        ]
        least = _LEAST_LEAD * capacity
        clear = [
            way
            for way, ahead in enumerate(self._ahead)
            if ahead > max(least, self._luck * self._squares[way] ** 0.5)
        ]
        if not clear:
            return False
        self.current = max(clear, key=lambda way: self._ahead[way])
        # What was seen of others was seen of them against the one before.
        self._ahead = [0.0] * len(hits)
        self._squares = [0.0] * len(hits)
        return True
