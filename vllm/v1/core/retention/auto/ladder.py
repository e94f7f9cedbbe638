"""How far apart heavy checkpoints pay: one small cache for every interval, checkpoints weighed.

A recurrent state weighs as much as thousands of tokens' rows and cannot be computed again from a
few of them. What a prompt's end and a parting leave then decides what the pool holds, so each
interval is tried with all of it, and not only with its own grid.
"""

from collections import OrderedDict
from collections.abc import Sequence

from vllm.v1.core.retention.auto.contest import Contest
from vllm.v1.core.retention.auto.spans import SPAN_TOKENS, Span

# Tokens between two checkpoints; 0: none but where prompts end and part.
CANDIDATES = (1024, 2048, 4096, 8192, 16_384, 32_768, 0)
# By what part of its hits another interval must lead.
_LEAD = 0.03
# The first interval is so many times a checkpoint's weight, or more: a share that is soon repaid.
_FIRST_WEIGHTS = 8


class IntervalShadow:
    """A cache under one interval that holds no rows: it only counts.

    Spans go by their last use, a prompt's end before its beginning. A span that a checkpoint ends
    in weighs so much more. What a conversation resumed at is given up when it ends further on.

    Owns: the spans, each with the checkpoints in it.

    Args:
        interval: Tokens between two checkpoints; 0: none.
        weight: Of a checkpoint, in spans.
        grid_weight: Of one of the grid; None: the same.
        reach: Tokens by which a prompt goes on behind a grid's checkpoint that serves it.
    """

    __slots__ = ("_grid_weight", "_interval", "_reach", "_spans", "_used", "_weight", "is_full")

    def __init__(
        self, interval: int, weight: float, grid_weight: float | None = None, reach: int = 0
    ) -> None:
        self._interval = interval
        self._weight = weight
        self._grid_weight = weight if grid_weight is None else grid_weight
        self._reach = reach
        # Span -> checkpoints of the grid in it, whether a prompt ended there, whether some parted.
        self._spans: OrderedDict[int, tuple[int, bool, bool]] = OrderedDict()
        self._used = 0.0
        self.is_full = False

    def serve(self, spans: Sequence[Span], capacity: float) -> int:
        """Serve a prompt: say where it resumes, make room, and cache all of it.

        Args:
            spans: Of the prompt, in order.
            capacity: Spans that the cache holds.

        Returns:
            Tokens that hit.
        """
        held = self._spans
        matched = resumed = 0
        furthest = spans[-1].end - self._reach
        for number, span in enumerate(spans, 1):
            found = held.get(span.key)
            if found is None:
                break
            matched = number
            grid, ends, parts = found
            if ends or parts or (grid and span.end <= furthest):
                resumed = number
        for span in reversed(spans[:matched]):
            held.move_to_end(span.key)
        if matched > resumed and matched < len(spans):
            self._mark(spans[matched - 1].key, parts=True)
        if resumed and resumed < len(spans):
            self._supersede(spans[resumed - 1].key)
        self._add(spans, matched)
        self._mark(spans[-1].key, ends=True)
        while self._used > capacity:
            self.is_full = True
            _key, found = held.popitem(last=False)
            self._used -= self._weigh(found)
        return spans[resumed - 1].end if resumed else 0

    def _weigh(self, found: tuple[int, bool, bool]) -> float:
        grid, ends, parts = found
        return 1 + self._grid_weight * grid + self._weight * (ends or parts)

    def _add(self, spans: Sequence[Span], first: int) -> None:
        """Enter spans from ``first`` on, the last as the first to go."""
        interval, held = self._interval, self._spans
        start = spans[first - 1].end if first else 0
        fresh = []
        for span in spans[first:]:
            fresh.append((span.key, span.end // interval - start // interval if interval else 0))
            start = span.end
        for key, grid in reversed(fresh):
            old = held.pop(key, None)
            if old is not None:
                self._used -= self._weigh(old)
            found = (grid, False, False)
            held[key] = found
            self._used += self._weigh(found)
        # The head of what was there is used last of all.
        for span in reversed(spans[:first]):
            held.move_to_end(span.key)

    def _mark(self, key: int, *, ends: bool = False, parts: bool = False) -> None:
        old = self._spans[key]
        new = (old[0], old[1] or ends, old[2] or parts)
        self._spans[key] = new
        self._used += self._weigh(new) - self._weigh(old)

    def _supersede(self, key: int) -> None:
        old = self._spans[key]
        new = (old[0], False, old[2])
        self._spans[key] = new
        self._used += self._weigh(new) - self._weigh(old)


class LadderLearner:
    """Serves every prompt under all intervals, and follows the one that hits most, lately.

    Owns: a shadow for each candidate, and the contest.

    Args:
        capacity: Followed spans that the pool holds without checkpoints.
        checkpoint_tokens: Tokens of dense rows that weigh as much as a checkpoint.
        step: Tokens whose multiples an interval must be.
        tokens_per_span: What a followed span stands for.
        grid_tokens: Tokens of dense rows that a checkpoint of a grid weighs; None: as any other.
        reach: Tokens by which a prompt goes on behind a grid's checkpoint that serves it.
    """

    def __init__(
        self,
        capacity: int,
        checkpoint_tokens: float,
        step: int,
        tokens_per_span: int = SPAN_TOKENS,
        grid_tokens: float | None = None,
        reach: int = 0,
    ) -> None:
        self._capacity = capacity
        self._tokens_per_span = tokens_per_span
        self._candidates = [n for n in CANDIDATES if n % step == 0]
        weight = checkpoint_tokens / tokens_per_span
        grid = None if grid_tokens is None else grid_tokens / tokens_per_span
        self._shadows = [IntervalShadow(n, weight, grid, reach) for n in self._candidates]
        least = _FIRST_WEIGHTS * checkpoint_tokens
        first = next((n for n in self._candidates if n >= least), 0)
        number = len(self._candidates)
        self._contest = Contest(number, self._candidates.index(first), _LEAD)

    @property
    def interval(self) -> int:
        """The interval in force; 0: none."""
        return self._candidates[self._contest.current]

    def serve(self, spans: Sequence[Span]) -> bool:
        """Let a prompt be served; returns whether the interval changed."""
        if not spans:
            return False
        hits = [
            shadow.serve(spans, self._capacity) / self._tokens_per_span for shadow in self._shadows
        ]
        # Before the pool was full, the finest interval hits most, and costs nothing.
        if not self._shadows[-1].is_full:
            return False
        return self._contest.add(len(spans), hits, self._capacity)
