"""Against one explicit cache per interval, and against the shadow of the rule LRU."""

import random
from collections.abc import Iterator, Sequence

import pytest

from vllm.v1.core.retention.auto.checkpoint_shadow import CheckpointShadow
from vllm.v1.core.retention.auto.eviction import Rule
from vllm.v1.core.retention.auto.ladder import CANDIDATES, IntervalShadow, LadderLearner
from vllm.v1.core.retention.auto.spans import SPAN_TOKENS, Span


class PlainCache:
    """Spans, the one used last at the end, and sets of those with checkpoints in them."""

    def __init__(self, interval: int, weight: float, grid: float = 0.0, reach: int = 0) -> None:
        self.interval, self.weight = interval, weight
        self.grid_weight, self.reach = grid or weight, reach
        self.spans: list[Span] = []
        self.grid: dict[int, int] = {}
        self.ends: set[int] = set()
        self.parts: set[int] = set()

    def serve(self, spans: Sequence[Span], capacity: float) -> int:
        keys = [span.key for span in self.spans]
        matched = next((i for i, s in enumerate(spans) if s.key not in keys), len(spans))
        places = [
            i
            for i, span in enumerate(spans[:matched], 1)
            if span.key in self.ends | self.parts
            or (self.grid.get(span.key) and span.end + self.reach <= spans[-1].end)
        ]
        resumed = max(places, default=0)
        if resumed < matched < len(spans):
            self.parts.add(spans[matched - 1].key)
        if 0 < resumed < len(spans):
            self.ends.discard(spans[resumed - 1].key)
        mine = {span.key for span in spans}
        self.spans = [s for s in self.spans if s.key not in mine] + list(reversed(spans))
        for i in range(matched, len(spans)):
            start = spans[i - 1].end if i else 0
            if self.interval:
                places = [p for p in range(start + 1, spans[i].end + 1) if p % self.interval == 0]
                self.grid[spans[i].key] = len(places)
            self.ends.discard(spans[i].key)
            self.parts.discard(spans[i].key)
        self.ends.add(spans[-1].key)
        while sum(self.weigh(s.key) for s in self.spans) > capacity:
            gone = self.spans.pop(0).key
            self.grid.pop(gone, None)
            self.ends.discard(gone)
            self.parts.discard(gone)
        return spans[resumed - 1].end if resumed else 0

    def weigh(self, key: int) -> float:
        grid = self.grid_weight * self.grid.get(key, 0)
        return 1 + grid + self.weight * (key in self.ends | self.parts)


def prompts(seed: int, count: int) -> Iterator[list[Span]]:
    """Conversations that begin alike, part anywhere and go on."""
    rng = random.Random(seed)
    talks: list[list[int]] = [[]]
    fresh = 0
    for _ in range(count):
        keys = list(rng.choice(talks[-12:]))
        if rng.random() < 0.3:
            keys = keys[: rng.randint(0, len(keys))]
        for _ in range(rng.randint(1, 6)):
            fresh += 1
            keys.append(fresh)
        keys = keys[:40]
        talks.append(keys)
        yield [Span(key, (i + 1) * SPAN_TOKENS) for i, key in enumerate(keys)]


@pytest.mark.parametrize("interval", [0, 1024, 4096])
@pytest.mark.parametrize("weight", [0.5, 3.0])
def test_a_shadow_hits_what_its_own_cache_would(interval: int, weight: float) -> None:
    shadow, plain = IntervalShadow(interval, weight), PlainCache(interval, weight)
    total = 0
    for spans in prompts(int(10 * weight), 300):
        hit = shadow.serve(spans, 70)
        assert hit == plain.serve(spans, 70)
        total += hit
    assert total > 0
    assert shadow.is_full


def test_partial_checkpoints_of_a_grid_weigh_less_and_serve_who_goes_on_for_long() -> None:
    shadow, plain = IntervalShadow(1024, 3.0, 1.5, 2540), PlainCache(1024, 3.0, 1.5, 2540)
    hits = [(shadow.serve(spans, 70), plain.serve(spans, 70)) for spans in prompts(4, 300)]
    assert all(hit == expected for hit, expected in hits)
    whole = IntervalShadow(1024, 3.0)
    assert 0 < sum(hit for hit, _ in hits) < sum(whole.serve(s, 110) for s in prompts(4, 300))


def test_without_a_grid_it_is_the_shadow_of_lru() -> None:
    shadow, rule = IntervalShadow(0, 3.0), CheckpointShadow(Rule.LRU, 70, 3.0)
    for spans in prompts(3, 300):
        hit = shadow.serve(spans, 70)
        assert hit == rule.serve([span.key for span in spans]) * SPAN_TOKENS


@pytest.mark.parametrize(
    ("weight", "first"), [(500.0, 4096), (1632.0, 16_384), (2400.0, 32_768), (5400.0, 0)]
)
def test_the_first_interval_costs_an_eighth_at_most(weight: float, first: int) -> None:
    assert LadderLearner(100, weight, 32).interval == first


def test_beginnings_that_are_cut_anywhere_bring_a_finer_interval() -> None:
    """Every prompt is a part of one document and a question: no place is parted at twice."""
    rng = random.Random(5)
    learner = LadderLearner(400, 300.0, 32)
    fresh = 10_000
    for _ in range(400):
        document = 1000 * rng.randrange(4)
        length = rng.randint(2, 60)
        keys = list(range(document, document + length))
        for _ in range(4):
            fresh += 1
            keys.append(fresh)
        learner.serve([Span(key, (i + 1) * SPAN_TOKENS) for i, key in enumerate(keys)])
    assert learner.interval in CANDIDATES[:3]
