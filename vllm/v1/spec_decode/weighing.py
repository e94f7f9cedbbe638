"""How much to draft: what more rows cost a step against the tokens they are likely to bring.

    rate of a request = (1 + its expected accepted drafts) / seconds(n + m)

``n`` requests decode, each with one row and as many drafts as pay, ``m`` in all. Those rows are
taken with which the geometric mean of the rates is the highest: all requests wait for a row, so one
that gains much must not slow down another that gains nothing.
"""

from bisect import bisect, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from math import log
from typing import Any, NamedTuple

import numpy as np

# What is known follows a quicker step within about so many, and slower ones within so many: a step
# that takes longer did so, more often than not, because the machine did something else.
_STEPS_DOWN, _STEPS_UP = 4, 16
# A measurement counts as at most so many times what was known.
_OUTLIER = 3.0
# No step takes less, whatever a coarse clock says.
_SHORTEST = 1e-9
# What one more row adds to a step before anything was measured, as a part of the step.
_FIRST_GUESS = 0.15
# What was measured of a number of rows counts beside the line through all as so many steps do, up
# to a most; a step later it counts so much. What was slow once is not taken for slow for ever.
_LINE_STEPS, _MOST_STEPS = 4.0, 16.0
_KEPT = 0.98
# Rows must differ by so much, squared and summed over steps, for the line to tell what one adds.
_ENOUGH_SPREAD = 2.0
# Tokens that a row must promise: the cheapest one costs more of a step.
_LEAST_HOPE = 0.05
# Drafts must promise so much more than no drafts: a wrong guess costs no more than this.
_LEAST_GAIN = 1.03
# What a step without drafts costs is measured anew after so many steps with drafts: at first soon,
# since one measurement may say much of what else the machine did, then after twice as many.
_FIRST_PAUSE, _LAST_PAUSE = 4, 256
# Chances are averages over about so many tokens of a request, and of all requests. They begin as if
# so many tokens had been tried: of a request with what one in two would do.
_OWN_TOKENS, _ALL_TOKENS = 24.0, 96.0
_PRIOR_TRIES = 2.0
_PRIOR = 0.5
# What a request's own chance counts beside that of all requests behind such a match.
_OWN_SHARE = 0.25
# The tokens that are drafted are those that look best, and are a little worse than they look.
_CAUTION = 0.98
# Matches from one of these lengths up to the next are as good as each other.
_LENGTHS = (1, 2, 3, 4, 5, 7, 9, 13, 17, 25)
# What their chances begin with: as trained models had it, rounded. Longer ones as the last.
_PRIORS = (0.3, 0.5, 0.7, 0.85, 0.85, 0.95)
# A passage that goes on behind a token that was replaced is as sure as a match after so many.
_REJOINED = 3
# From so many tokens on a match is as sure whatever other places say.
_LONG_MATCH = 6


Tokens = Sequence[int] | np.ndarray[Any, Any]


class _Line:
    """The seconds of all steps as one straight line over their rows.

    Owns: weighted sums, in which older steps count less.
    """

    def __init__(self) -> None:
        self._weight = self._rows = self._seconds = 0.0
        self._squares = self._products = 0.0
        # A point on the line, and how steep it is.
        self._point = 1.0, 0.0
        self._slope = 0.0

    def note(self, num_rows: int, seconds: float) -> None:
        """A step took so long; those above the line count less, as in ``_STEPS_UP``."""
        is_slow = self._weight > 0 and seconds > self.at(num_rows)
        weight = _STEPS_DOWN / _STEPS_UP if is_slow else 1.0
        self._weight = self._weight * _KEPT + weight
        self._rows = self._rows * _KEPT + weight * num_rows
        self._seconds = self._seconds * _KEPT + weight * seconds
        self._squares = self._squares * _KEPT + weight * num_rows * num_rows
        self._products = self._products * _KEPT + weight * num_rows * seconds
        self._draw()

    def at(self, num_rows: int) -> float:
        """Return the seconds of a step; more rows never take fewer."""
        rows, seconds = self._point
        drawn = seconds + self._slope * (num_rows - rows)
        return drawn if num_rows > rows else max(drawn, seconds * num_rows / rows)

    def _draw(self) -> None:
        rows, seconds = self._rows / self._weight, self._seconds / self._weight
        slope = _FIRST_GUESS * seconds / rows
        spread = self._squares - rows * self._rows
        if spread > 0:
            own = max(0.0, (self._products - seconds * self._rows) / spread)
            slope += min(1.0, spread / _ENOUGH_SPREAD) * (own - slope)
        self._point, self._slope = (rows, seconds), slope


@dataclass(slots=True)
class _Seen:
    """What was measured of a number of rows.

    Attributes:
        seconds: Of a step, nearer to the quick ones than to the slow ones.
        num_steps: How many say so, those of long ago counted less.
        last_step: When that was.
    """

    seconds: float
    num_steps: float
    last_step: int


class StepCosts:
    """Seconds of a step by its rows, learnt from the steps that run.

    What else the machine does makes single measurements wrong, and a number of rows that looked
    slow once would never be tried again: so each leans on the line through all.

    Owns: what is known, nearer to the quick steps than to the slow ones.
    """

    def __init__(self) -> None:
        self._line = _Line()
        self._seen: dict[int, _Seen] = {}
        # The numbers of rows that were seen, ascending.
        self._sorted: list[int] = []
        self._num_steps = 0

    def note(self, num_rows: int, seconds: float) -> None:
        """A step of so many rows took so long."""
        seconds = max(seconds, _SHORTEST)
        if self._seen:
            seconds = min(seconds, _OUTLIER * self.estimate(num_rows))
        self._num_steps += 1
        self._line.note(num_rows, seconds)
        seen = self._seen.get(num_rows)
        if seen is None:
            self._seen[num_rows] = _Seen(seconds, 1.0, self._num_steps)
            insort(self._sorted, num_rows)
            return
        change = seconds - seen.seconds
        seen.seconds += change / (_STEPS_UP if change > 0 else _STEPS_DOWN)
        seen.num_steps = min(_MOST_STEPS, self._count(seen) + 1.0)
        seen.last_step = self._num_steps

    def knows(self, num_rows: int) -> bool:
        """Whether a step of so many rows was seen."""
        return num_rows in self._seen

    def estimate(self, num_rows: int) -> float:
        """Return the seconds of a step: measured, or as the line through what was measured."""
        if not self._seen:
            return 1.0 + _FIRST_GUESS * num_rows
        seconds = self._line.at(num_rows)
        seen = self._seen.get(num_rows)
        if seen is not None:
            count = self._count(seen)
            return seconds + count / (count + _LINE_STEPS) * (seen.seconds - seconds)
        at = bisect(self._sorted, num_rows)
        return max(seconds, self.estimate(self._sorted[at - 1])) if at else seconds

    def _count(self, seen: _Seen) -> float:
        return float(seen.num_steps * _KEPT ** (self._num_steps - seen.last_step))


@dataclass(slots=True)
class Chance:
    """How often a draft token was right behind right ones.

    Attributes:
        hits: Tokens that were right, the old ones counted less.
        tries: All.
    """

    hits: float = _PRIOR * _PRIOR_TRIES
    tries: float = _PRIOR_TRIES

    def note(self, num_tokens: float, *, is_right: bool) -> None:
        """A token was right or wrong; the average is over about ``num_tokens``."""
        kept = 1.0 - 1.0 / num_tokens
        self.hits = self.hits * kept + is_right
        self.tries = self.tries * kept + 1.0

    @property
    def value(self) -> float:
        """0 to 1."""
        return self.hits / self.tries


class Agreement(IntEnum):
    """How the places go on that match a text's last tokens."""

    ONE = 0
    ALL = 1
    MOST = 2
    NONE = 3


class Draft(NamedTuple):
    """What a request may draft.

    Attributes:
        tokens: The tokens.
        match: Length of the match that they followed.
        start: Where in the text they stand.
        is_resumed: Whether the match ended at a token that was replaced, behind which the passage
            may go on; ``match`` then counts from there, from 0 on.
        agreement: Whether there is one such place, or others go on alike.
    """

    tokens: Sequence[int]
    match: int
    start: int = 0
    is_resumed: bool = False
    agreement: Agreement = Agreement.ONE

    def kind_of(self, depth: int) -> int:
        """Return which tokens are about as sure as that at a depth, if those before it are right.

        Right tokens make a match longer, so that what follows them is surer.
        """
        length = self.match + depth
        if self.is_resumed and length < _REJOINED:
            return length - _REJOINED
        kind = len(Agreement) * bisect(_LENGTHS, length)
        return kind + self.agreement if length < _LONG_MATCH else kind


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


class Passage(NamedTuple):
    """Where the passage goes on that a request was repeating.

    Attributes:
        start: The next token's place in the text.
        match: How many tokens were right since the last that was not.
        is_lost: Whether the token behind one that was replaced was wrong, too.
    """

    start: int
    match: int
    is_lost: bool


class DraftWeigher:
    """Decides how many tokens each request drafts.

    Whether a draft would have been right is seen without drafting it, so that a text which begins
    to repeat itself is drafted, and one that stops is not.

    Owns: what was learnt of steps and texts; of requests, only those of the last step.
    """

    def __init__(self) -> None:
        self.costs = StepCosts()
        self._chances: dict[int, Chance] = {}
        self._foretold: dict[str, _Foretold] = {}
        self._num_unmeasured, self._pause = 0, _FIRST_PAUSE

    def note_texts(self, texts: Mapping[str, Tokens]) -> dict[str, Passage]:
        """Take note of what followed; requests that are not named are forgotten.

        Args:
            texts: All tokens of each request that decodes.

        Returns:
            What each was repeating, if anything was foretold of it.
        """
        self._foretold = {name: told for name, told in self._foretold.items() if name in texts}
        passages = {}
        for name, told in self._foretold.items():
            if not told.draft.tokens:
                continue
            actual = texts[name][told.length :]
            num_right = self._note(told, actual)
            next_start = told.draft.start + len(actual)
            # What came behind the draft's end, too: a token that was not drafted may differ.
            repeated = texts[name][told.draft.start : next_start]
            is_right = all(a == b for a, b in zip(actual, repeated, strict=False))
            match = told.draft.match + num_right
            is_lost = not is_right and told.draft.is_resumed and match == 0
            passages[name] = Passage(next_start, match if is_right else 0, is_lost)
        return passages

    def _note(self, told: _Foretold, actual: Tokens) -> int:
        """Take note of each token up to the first wrong one; return how many were right."""
        for depth, (token, other) in enumerate(zip(told.draft.tokens, actual, strict=False)):
            kind, is_right = told.draft.kind_of(depth), bool(token == other)
            self._chance_of(kind).note(_ALL_TOKENS, is_right=is_right)
            told.chance.note(_OWN_TOKENS, is_right=is_right)
            if not is_right:
                return depth
        return min(len(told.draft.tokens), len(actual))

    def choose(self, drafts: Mapping[str, Draft], lengths: Mapping[str, int]) -> dict[str, int]:
        """Return how many tokens each request drafts.

        Args:
            drafts: What each request of the next step may draft, perhaps nothing.
            lengths: Tokens of each request.
        """
        rows: list[tuple[float, str]] = []
        for name, draft in drafts.items():
            told = self._foretold.get(name)
            chance = Chance() if told is None else told.chance
            self._foretold[name] = _Foretold(lengths[name], draft, chance)
            # Of a request that is new nothing is known.
            share = 0.0 if told is None else _OWN_SHARE
            num_tokens = 1.0
            for gain in self._gains(draft, share, chance.value):
                rows.append((log(1.0 + gain / num_tokens), name))
                num_tokens += gain
        counts = dict.fromkeys(drafts, 0)
        for _, name in self._take_best(len(drafts), rows):
            counts[name] += 1
        self._num_unmeasured = self._num_unmeasured + 1 if any(counts.values()) else 0
        return counts

    def _gains(self, draft: Draft, own_share: float, own: float) -> Iterable[float]:
        """Yield what each token of a draft is likely to bring, by its depth, if it may pay."""
        gain = 1.0
        for depth in range(len(draft.tokens)):
            general = self._chance_of(draft.kind_of(depth)).value
            gain *= _CAUTION * (general + own_share * (own - general))
            if gain < _LEAST_HOPE:
                return
            yield gain

    def _take_best(
        self, num_requests: int, rows: list[tuple[float, str]]
    ) -> Sequence[tuple[float, str]]:
        """Return the drafted rows with which tokens come fastest.

        Args:
            num_requests: That decode.
            rows: By how much each makes the logarithm of its request's tokens larger; those of a
                request promise less and less.
        """
        if not self.costs.knows(num_requests) or not rows:
            return ()
        if self._num_unmeasured >= self._pause:
            self._pause = min(2 * self._pause, _LAST_PAUSE)
            return ()
        rows.sort(key=lambda row: -row[0])
        alone = self.costs.estimate(num_requests)
        best, count = num_requests * log(_LEAST_GAIN), 0
        gained = 0.0
        for taken, (gain, _) in enumerate(rows, start=1):
            gained += gain
            slowed = self.costs.estimate(num_requests + taken) / alone
            rate = gained - num_requests * log(slowed)
            if rate > best:
                best, count = rate, taken
        return rows[:count]

    def _chance_of(self, kind: int) -> Chance:
        chance = self._chances.get(kind)
        if chance is None:
            place = kind // len(Agreement) - 1
            prior = _PRIOR if kind < 0 else _PRIORS[min(place, len(_PRIORS) - 1)]
            chance = self._chances[kind] = Chance(prior * _PRIOR_TRIES)
        return chance
