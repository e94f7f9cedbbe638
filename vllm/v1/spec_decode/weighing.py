"""How much to draft: what more rows cost a step against the tokens they are likely to bring.

    rate(m) = (n + expected accepted drafts of the m best rows) / seconds(n + m)

``n`` requests decode, each with one row and as many drafts as pay. A draft's chance falls with its
depth, so rows are taken in the order of their chances, as many as make the rate the highest.
"""

from bisect import bisect, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

# What is known follows a quicker step within about so many, and slower ones within so many: a step
# that takes longer did so, more often than not, because the machine did something else.
_STEPS_DOWN, _STEPS_UP = 4, 16
# A measurement counts as at most so many times what was known.
_OUTLIER = 3.0
# What one more row adds to a step before anything was measured, as a part of the step.
_FIRST_GUESS = 0.15
# Drafts must promise so much more than no drafts: a wrong guess costs no more than this.
_LEAST_GAIN = 1.03
# What a step without drafts costs is measured anew after so many steps with drafts: at first soon,
# since one measurement may say much of what else the machine did, then after twice as many.
_FIRST_PAUSE, _LAST_PAUSE = 4, 256
# Chances are averages over about so many tokens; they begin with what one request in two would do.
_TOKENS = 24.0
_PRIOR_HITS, _PRIOR_TRIES = 1.0, 2.0


Tokens = Sequence[int] | np.ndarray[Any, Any]


class StepCosts:
    """Seconds of a step by its rows, learnt from the steps that run.

    Owns: what is known, nearer to the quick steps than to the slow ones.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        # The numbers of rows that were seen, ascending: every step asks for many.
        self._seen: list[int] = []

    def note(self, num_rows: int, seconds: float) -> None:
        """A step of so many rows took so long."""
        known = self._seconds.get(num_rows)
        if known is None:
            self._seconds[num_rows] = seconds
            insort(self._seen, num_rows)
            return
        change = min(seconds, _OUTLIER * known) - known
        self._seconds[num_rows] = known + change / (_STEPS_UP if change > 0 else _STEPS_DOWN)

    def knows(self, num_rows: int) -> bool:
        """Whether a step of so many rows was seen."""
        return num_rows in self._seconds

    def estimate(self, num_rows: int) -> float:
        """Return the seconds of a step: measured, or drawn through the nearest measurements."""
        seen, seconds = self._seen, self._seconds
        if num_rows in seconds:
            return seconds[num_rows]
        if not seen:
            return 1.0 + _FIRST_GUESS * num_rows
        at = bisect(seen, num_rows)
        if 0 < at < len(seen):
            low, high = seen[at - 1], seen[at]
            before, after = seconds[low], seconds[high]
            return before + (num_rows - low) / (high - low) * max(0.0, after - before)
        first, last = seen[0], seen[-1]
        at_first, at_last = seconds[first], seconds[last]
        slope = _FIRST_GUESS * at_first / max(1, first)
        if len(seen) > 1:
            slope = max(0.0, at_last - at_first) / (last - first)
        if num_rows > last:
            return at_last + slope * (num_rows - last)
        return max(at_first - slope * (first - num_rows), at_first * num_rows / first)


@dataclass(slots=True)
class Chance:
    """How often a draft token was right behind right ones.

    Attributes:
        hits: Tokens that were right, the old ones counted less.
        tries: All.
    """

    hits: float = _PRIOR_HITS
    tries: float = _PRIOR_TRIES

    def note(self, num_right: int, num_wrong: int) -> None:
        """So many tokens were right, and then one was wrong or none."""
        kept = max(0.0, 1.0 - (num_right + num_wrong) / _TOKENS)
        self.hits = self.hits * kept + num_right
        self.tries = self.tries * kept + num_right + num_wrong

    @property
    def value(self) -> float:
        """0 to 1."""
        return self.hits / self.tries


class Draft(NamedTuple):
    """What a request may draft.

    Attributes:
        tokens: The tokens.
        match: Length of the match that they followed.
    """

    tokens: Sequence[int]
    match: int


@dataclass(slots=True)
class _Foretold:
    """What was foretold of a request, drafted or not.

    Attributes:
        length: Its tokens then.
        draft: The tokens that were to follow.
        chance: Its own.
    """

    length: int
    draft: Draft
    chance: Chance = field(default_factory=Chance)


class DraftWeigher:
    """Decides how many tokens each request drafts.

    Whether a draft would have been right is seen without drafting it, so that a text which begins
    to repeat itself is drafted, and one that stops is not.

    Owns: what was learnt of steps and texts; of requests, only those of the last step.
    """

    def __init__(self) -> None:
        self.costs = StepCosts()
        self._by_match: dict[int, Chance] = {}
        self._foretold: dict[str, _Foretold] = {}
        self._num_unmeasured, self._pause = 0, _FIRST_PAUSE

    def note_texts(self, texts: Mapping[str, Tokens]) -> None:
        """Take note of what followed; requests that are not named are forgotten.

        Args:
            texts: All tokens of each request that decodes.
        """
        self._foretold = {name: told for name, told in self._foretold.items() if name in texts}
        for name, told in self._foretold.items():
            actual = texts[name][told.length :]
            num_right, num_wrong = _compare(told.draft.tokens, actual)
            if num_right + num_wrong:
                told.chance.note(num_right, num_wrong)
                self._chance_of(told.draft.match).note(num_right, num_wrong)

    def choose(self, drafts: Mapping[str, Draft], lengths: Mapping[str, int]) -> dict[str, int]:
        """Return how many tokens each request drafts.

        Args:
            drafts: What each request of the next step may draft, perhaps nothing.
            lengths: Tokens of each request.
        """
        gains: list[tuple[float, str]] = []
        for name, draft in drafts.items():
            told = self._foretold.get(name)
            chance = Chance() if told is None else told.chance
            self._foretold[name] = _Foretold(lengths[name], draft, chance)
            gains += [(gain, name) for gain in self._gains(draft, chance, fresh=told is None)]
        counts = dict.fromkeys(drafts, 0)
        for _, name in self._take_best(len(drafts), gains):
            counts[name] += 1
        self._num_unmeasured = self._num_unmeasured + 1 if any(counts.values()) else 0
        return counts

    def _gains(self, draft: Draft, chance: Chance, *, fresh: bool) -> Iterable[float]:
        """Yield what each token of a draft is likely to bring, by its depth."""
        general = self._chance_of(draft.match).value
        # A request's own text says more than others', once there is any.
        each = general if fresh else (general + 2 * chance.value) / 3
        gain = 1.0
        for _ in draft.tokens:
            gain *= each
            yield gain

    def _take_best(
        self, num_requests: int, gains: list[tuple[float, str]]
    ) -> Sequence[tuple[float, str]]:
        """Return the drafted rows with which tokens come fastest."""
        if not self.costs.knows(num_requests) or not gains:
            return ()
        if self._num_unmeasured >= self._pause:
            self._pause = min(2 * self._pause, _LAST_PAUSE)
            return ()
        gains.sort(key=lambda pair: -pair[0])
        best = num_requests / self.costs.estimate(num_requests) * _LEAST_GAIN
        num_tokens, count = float(num_requests), 0
        for taken, (gain, _) in enumerate(gains, start=1):
            num_tokens += gain
            rate = num_tokens / self.costs.estimate(num_requests + taken)
            if rate > best:
                best, count = rate, taken
        return gains[:count]

    def _chance_of(self, match: int) -> Chance:
        return self._by_match.setdefault(match, Chance())


def _compare(foretold: Sequence[int], actual: Tokens) -> tuple[int, int]:
    """Return how many tokens were right from the first on, and whether the next one was wrong."""
    num_right = 0
    for token, other in zip(foretold, actual, strict=False):
        if token != other:
            return num_right, 1
        num_right += 1
    return num_right, 0
