"""The missed parts of a prompt, in the prompt's order."""

import pytest

from vllm.cachelab.twin.spans import spans_of
from vllm.v1.messages import MISS_REASONS, PrefillStats


@pytest.mark.parametrize(
    "reason", ["external", "corrupt", "restore_failed", "restore_declined", "evicted_from_disk"]
)
def test_what_a_tier_did_not_bring_lies_right_behind_the_hit(reason: str) -> None:
    misses = {"first_seen": 100, "evicted": 50, reason: 30, "above_last_boundary": 20}
    spans = spans_of(PrefillStats(600, 400, miss_tokens=misses))
    assert [(s.begin, s.end, s.reason) for s in spans] == [
        (400, 430, reason),
        (430, 480, "evicted"),
        (480, 580, "first_seen"),
        (580, 600, "above_last_boundary"),
    ]


def test_hit_and_spans_are_the_prompt() -> None:
    misses = {reason: 1 + i for i, reason in enumerate(MISS_REASONS)}
    stats = PrefillStats(10 + sum(misses.values()), 10, miss_tokens=misses)
    spans = spans_of(stats)
    assert {s.reason: s.end - s.begin for s in spans} == misses
    edges = [10, *(s.end for s in spans)]
    assert [s.begin for s in spans] == edges[:-1]
    assert edges[-1] == stats.num_prompt_tokens


def test_rows_computed_again_for_their_windows_lie_right_behind_the_hit() -> None:
    misses = {"first_seen": 100, "window_rebuilt": 128, "drafter": 32}
    spans = spans_of(PrefillStats(600, 340, miss_tokens=misses))
    assert [(s.begin, s.reason) for s in spans] == [
        (340, "window_rebuilt"),
        (468, "drafter"),
        (500, "first_seen"),
    ]
