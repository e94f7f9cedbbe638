"""The end of prompts of which all layers compute their rows: as long as pays."""

import pytest

from vllm.v1.core.retention.auto.full_ends import FullEnds


@pytest.mark.parametrize(("lost", "pays"), [(900, False), (1100, True)])
def test_what_is_lost_must_be_more_than_what_is_computed(lost: int, pays: bool) -> None:
    ends = FullEnds()
    for number in range(1, 9):
        # Its own, and that of the request which has to compute so much again.
        ends.note_made(2)
        ends.note_need(2, 1000, lost, is_partial=True)
        ends.note_made(2)
        assert ends.length == (1000 if pays and number >= 4 else 0)


def test_who_resumes_at_whole_ones_leaves_none() -> None:
    ends = FullEnds()
    for _ in range(8):
        ends.note_made(2)
        ends.note_need(2, 1000, 1100, is_partial=False)
    assert ends.length == 1000
    for _ in range(8):
        ends.note_made(2)
    assert ends.length == 0, "half of the prompts are not gone on from"


def test_the_longest_end_that_pays_is_taken() -> None:
    ends = FullEnds()
    for _ in range(5):
        for kind, behind in ((1, 256), (2, 1024), (3, 4096)):
            ends.note_made(kind)
            ends.note_need(kind, behind, 2000, is_partial=False)
    assert ends.length == 1024


def test_needs_of_long_ago_are_forgotten() -> None:
    ends = FullEnds()
    for _ in range(10):
        ends.note_need(1, 256, 2000, is_partial=False)
    assert ends.length == 256
    for _ in range(2000):
        ends.note_made(1)
    assert ends.length == 0
    for _ in range(2000):
        ends.note_made(1)
        ends.note_need(1, 256, 2000, is_partial=False)
    assert ends.length == 256
