"""Against one explicit cache per candidate interval."""

import random
from collections.abc import Sequence

import pytest

from vllm.v1.core.retention.auto.interval import (
    CANDIDATES,
    FIRST_INTERVAL,
    LEAD,
    IntervalLearner,
    room_for,
)
from vllm.v1.core.retention.auto.spans import SPAN_TOKENS, Span


class PlainStack:
    """One candidate: what it sees, most recent first, and where prompts ended or parted."""

    def __init__(self, interval: int, room: int, reach: int = 0) -> None:
        self.interval, self.room, self.reach = interval, room, reach
        self.keys: list[int] = []
        self.marks: set[int] = set()

    def depth(self, spans: Sequence[Span]) -> int:
        """Return how many of the first spans it sees."""
        seen = [key in self.keys for key, _ in spans]
        return seen.index(False) if False in seen else len(seen)

    def worth(self, spans: Sequence[Span]) -> int:
        depth = end = 0
        for key, position in spans:
            if key not in self.keys:
                break
            depth = position
            if key in self.marks:
                end = position
        # A partial checkpoint serves who goes on for the reach behind the place where it parts.
        furthest = depth if spans[-1].end - depth >= self.reach else max(0, depth - self.reach)
        return max(end, furthest // self.interval * self.interval if self.interval else 0)

    def use(self, spans: Sequence[Span]) -> None:
        depth = self.depth(spans)
        for key, _end in reversed(spans):
            if key in self.keys:
                self.keys.remove(key)
            self.keys.insert(0, key)
            del self.keys[self.room :]
            self.marks &= set(self.keys)
        places = {spans[-1].key, *(span.key for span in spans[depth - 1 : depth])}
        self.marks |= places & set(self.keys)


def spans_of(root: int, count: int) -> list[Span]:
    return [Span(root + i, (i + 1) * SPAN_TOKENS) for i in range(count)]


@pytest.mark.parametrize(("weight", "reach"), [(200.0, 0), (1280.0, 0), (200.0, 2540)])
def test_every_candidate_is_worth_what_its_own_cache_gives(weight: float, reach: int) -> None:
    rng = random.Random(int(weight))
    learner = IntervalLearner(90, weight, 128, reach)
    plain = [PlainStack(n, int(room_for(n, 90, weight)), reach) for n in CANDIDATES]
    total = 0
    for _ in range(500):
        spans = spans_of(
            1000 * rng.choice([0, 0, 1, 2, 3, rng.randrange(4, 40)]), rng.randint(1, 40)
        )
        worth = learner.worth(spans)
        assert worth == [stack.worth(spans) for stack in plain]
        total += sum(worth)
        learner.serve(spans)
        for stack in plain:
            stack.use(spans)
    assert total > 0


def test_beginnings_cut_anywhere_bring_a_finer_interval() -> None:
    rng = random.Random(0)
    learner = IntervalLearner(400, 500.0, 128)
    fresh = 10**6
    for number in range(400):
        # A long beginning, of which another part comes back each time; then another beginning.
        root = 1000 * (number // 40)
        shared = rng.randint(3, 120)
        own = [Span(fresh + i, (shared + i + 1) * SPAN_TOKENS) for i in range(6)]
        fresh += 6
        learner.serve([*spans_of(root, shared), *own])
    assert 0 < learner.interval < FIRST_INTERVAL


def test_conversations_that_go_on_where_they_ended_need_no_interval() -> None:
    learner = IntervalLearner(300, 2000.0, 128)
    for start in range(0, 200, 4):
        for turn in range(1, 9):
            for session in range(start, start + 4):
                learner.serve(spans_of(1000 * session, 7 * turn))
    assert learner.interval == 0 or learner.interval >= FIRST_INTERVAL


def test_beginnings_cut_where_they_were_cut_before_need_no_interval() -> None:
    rng = random.Random(0)
    learner = IntervalLearner(400, 500.0, 128)
    fresh = 10**6
    for _ in range(400):
        # The second to part there leaves a checkpoint, whatever the interval.
        shared = rng.choice([9, 14, 23])
        own = [Span(fresh + i, (shared + i + 1) * SPAN_TOKENS) for i in range(6)]
        fresh += 6
        learner.serve([*spans_of(1000 * rng.randrange(6), shared), *own])
    assert learner.interval == 0 or learner.interval >= FIRST_INTERVAL


def test_nothing_changes_while_memory_is_free() -> None:
    learner = IntervalLearner(10_000, 1000.0, 128)
    assert not any(learner.serve(spans_of(1000 * i, 20)) for i in range(400))
    assert learner.interval == FIRST_INTERVAL


def test_intervals_that_do_not_fit_the_model_are_no_candidates() -> None:
    learner = IntervalLearner(100, 1000.0, 1024)
    assert len(learner.worth(spans_of(0, 3))) == len(CANDIDATES) - 1


@pytest.mark.parametrize(("more", "is_taken"), [(0, False), (1, True)])
def test_an_interval_is_taken_when_its_lead_is_passed(more: int, is_taken: bool) -> None:
    learner = IntervalLearner(50, 200.0, 128)
    lead = LEAD * 50 * SPAN_TOKENS
    assert lead == 512
    worth = [0] * len(CANDIDATES)
    worth[CANDIDATES.index(2048)] = 512 + more
    assert learner._decide(1, worth) is is_taken
    assert learner.interval == (2048 if is_taken else FIRST_INTERVAL)
