"""How far apart checkpoints pay: learnt from what prompts could have resumed at."""

from collections import OrderedDict
from collections.abc import Sequence

from vllm.v1.core.retention.auto.spans import SPAN_TOKENS, Span

# Tokens between two checkpoints; 0: none but where prompts end and part.
CANDIDATES = (512, 1024, 2048, 4096, 8192, 16_384, 32_768, 0)
FIRST_INTERVAL = 16_384
# A finer interval must gain so much to be taken; a coarser one must only lose nothing.
LEAD = 0.02
_HALF_LIFE_POOLS = 2.0
_NO_LEVEL = len(CANDIDATES)


def room_for(interval: int, capacity: float, checkpoint_tokens: float) -> float:
    """Return what a pool holds of dense rows if a checkpoint stands every ``interval`` tokens.

    Args:
        interval: 0: none.
        capacity: What it holds without any, in whatever is counted.
        checkpoint_tokens: Tokens of dense rows that weigh as much as a checkpoint.
    """
    return capacity / (1 + checkpoint_tokens / interval) if interval else capacity


class IntervalLearner:
    """Tries all intervals at once on the prompts that come.

    A pool with checkpoints every N tokens holds fewer dense rows, but more of them can be resumed
    at. One stack of spans in order of their last use stands for all candidates: each sees as much
    of its top as it has room for.

        most recent  [ 512 ........ | 1024 .... | 2048 .. | ... | none ] least recent

    A prompt is worth, to a candidate, the deepest place in what it sees of the prompt where earlier
    prompts ended or parted, or a multiple of N. Where layers leave rows out, checkpoints of a grid
    are partial: their multiples of N count if the prompt goes on for as long as these need.

    Owns: the stack, cut into segments between one room's end and the next; marks where prompts
    ended and parted; scores.

    Args:
        capacity: Spans that the pool holds without checkpoints.
        checkpoint_tokens: Tokens of dense rows that weigh as much as a checkpoint.
        step: Tokens whose multiples an interval must be.
        reach: Tokens by which a prompt goes on behind a grid's checkpoint that serves it.
    """

    def __init__(self, capacity: int, checkpoint_tokens: float, step: int, reach: int = 0) -> None:
        self._capacity = capacity
        self._reach = reach
        self._candidates = [n for n in CANDIDATES if n % step == 0]
        rooms = [int(room_for(n, capacity, checkpoint_tokens)) for n in self._candidates]
        self._sizes = [b - a for a, b in zip([0, *rooms], rooms, strict=False)]
        # Span -> the candidates that had a checkpoint there without their grid, as bits.
        self._segments: list[OrderedDict[int, int]] = [OrderedDict() for _ in rooms]
        self._leads = [0.0] * len(rooms)
        self._is_full = False
        self.interval = FIRST_INTERVAL if FIRST_INTERVAL in self._candidates else 0

    def serve(self, spans: Sequence[Span]) -> bool:
        """Let a prompt be served; returns whether the interval changed."""
        if not spans:
            return False
        depths, ends = self._look_up(spans)
        worth = self._weigh(depths, ends, spans[-1].end)
        self._use(spans, depths)
        if not self._is_full:
            return False
        return self._decide(len(spans), worth)

    def _find(self, key: int) -> int:
        for level, segment in enumerate(self._segments):
            if key in segment:
                return level
        return _NO_LEVEL

    def worth(self, spans: Sequence[Span]) -> list[int]:
        """Return what a prompt could resume at, in tokens, under each candidate."""
        return self._weigh(*self._look_up(spans), spans[-1].end)

    def _weigh(self, depths: Sequence[int], ends: Sequence[int], num_tokens: int) -> list[int]:
        return [
            max(end, self._serves(depth, num_tokens) // interval * interval if interval else 0)
            for interval, depth, end in zip(self._candidates, depths, ends, strict=True)
        ]

    def _serves(self, depth: int, num_tokens: int) -> int:
        """Return how deep a grid's checkpoint may lie in a prompt that is known up to ``depth``.

        One that goes on for less than the reach leaves a full checkpoint where it parts.
        """
        return depth if depth + self._reach <= num_tokens else max(0, depth - self._reach)

    def _look_up(self, spans: Sequence[Span]) -> tuple[list[int], list[int]]:
        """Return, for each candidate, the tokens it has rows of, and up to the deepest mark."""
        depths = [0] * len(self._leads)
        ends = [0] * len(self._leads)
        lowest = 0
        for key, end in spans:
            level = self._find(key)
            lowest = max(lowest, level)
            if lowest == _NO_LEVEL or lowest >= len(depths):
                break
            marks = self._segments[level][key]
            for k in range(lowest, len(depths)):
                depths[k] = end
                if marks >> k & 1:
                    ends[k] = end
        return depths, ends

    def _use(self, spans: Sequence[Span], depths: Sequence[int]) -> None:
        """Bring a prompt's spans to the top, its head first in line; mark its end and partings."""
        segments, sizes = self._segments, self._sizes
        for key, _end in reversed(spans):
            marks, level = 0, len(segments)
            for at, segment in enumerate(segments):
                found = segment.pop(key, None)
                if found is not None:
                    # Marks of candidates that had given the span up are gone.
                    marks, level = found >> at << at, at
                    break
            segments[0][key] = marks
            for at in range(min(level + 1, len(segments))):
                if len(segments[at]) <= sizes[at]:
                    break
                moved, moved_marks = segments[at].popitem(last=False)
                if at + 1 < len(segments):
                    segments[at + 1][moved] = moved_marks
                else:
                    self._is_full = True
        self._mark(spans[-1].key, (1 << len(segments)) - 1)
        for key, end in spans:
            parted = sum(1 << k for k, depth in enumerate(depths) if depth == end)
            if parted:
                self._mark(key, parted)

    def _mark(self, key: int, marks: int) -> None:
        for segment in self._segments:
            if key in segment:
                segment[key] |= marks
                break

    def _decide(self, num_spans: int, worth: Sequence[int]) -> bool:
        """Follow the candidate that leads by enough; see ``Duel``."""
        kept = 0.5 ** (num_spans / (_HALF_LIFE_POOLS * self._capacity))
        leads, candidates = self._leads, self._candidates
        current = worth[candidates.index(self.interval)]
        for k, tokens in enumerate(worth):
            leads[k] = max(0.0, leads[k] * kept + tokens - current)
        best = max(range(len(leads)), key=lambda k: leads[k])
        if leads[best] <= LEAD * self._capacity * SPAN_TOKENS:
            return False
        self.interval = candidates[best]
        self._leads = [0.0] * len(leads)
        return True
