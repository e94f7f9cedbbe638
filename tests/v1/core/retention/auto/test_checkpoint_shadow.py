"""Spans are of use below a checkpoint, or where window rows are computed again."""

from collections.abc import Sequence

import pytest

from vllm.v1.core.retention.auto.checkpoint_shadow import CheckpointShadow
from vllm.v1.core.retention.auto.eviction import Rule
from vllm.v1.core.retention.auto.superseding import Superseding


def make(superseding: Superseding, capacity: int = 100) -> CheckpointShadow:
    return CheckpointShadow(Rule.LRU, capacity, 3.0, None, superseding)


def test_what_lies_behind_the_last_checkpoint_is_no_hit() -> None:
    shadow = make(Superseding.AT_ONCE)
    assert shadow.serve(range(10)) == 0
    # Parts at 5: the second prompt shows it, the third hits.
    assert shadow.serve([*range(5), 20, 21]) == 0
    assert shadow.serve([*range(5), 30, 31]) == 5
    # A conversation goes on, twice: where it began before is gone.
    assert shadow.serve(range(12)) == 10
    assert shadow.serve(range(14)) == 12
    assert shadow.serve([*range(10), 40]) == 5


def test_rows_behind_it_are_of_use_where_windows_are_computed_again() -> None:
    shadow = CheckpointShadow(Rule.LRU, 100, 3.0, 4.0)
    assert shadow.serve(range(10)) == 0
    # 8 spans match, of which 4 must be computed for the window rows there.
    assert shadow.serve([*range(8), 20]) == 4
    assert shadow.serve([*range(8), 30]) == 8
    assert shadow.serve([*range(3), 40]) == 0


@pytest.mark.parametrize(
    ("superseding", "expected"),
    [
        (Superseding.AT_ONCE, [0, 0, 9]),
        (Superseding.A_TURN_LATER, [0, 6, 9]),
        (Superseding.NEVER, [3, 6, 9]),
    ],
)
def test_what_a_conversation_gives_up(superseding: Superseding, expected: Sequence[int]) -> None:
    for end, hit in zip((3, 6, 9), expected, strict=True):
        shadow = make(superseding)
        for turn in (3, 6, 9):
            shadow.serve(range(turn))
        # It returns to one of its turns, and says something else.
        assert shadow.serve([*range(end), 50, 51]) == hit


def test_checkpoints_that_are_kept_take_room() -> None:
    hits = {}
    for superseding in Superseding:
        shadow = make(superseding, 36)
        shadow.serve(range(100, 110))
        for turn in range(2, 12, 2):
            shadow.serve(range(turn))
        hits[superseding] = shadow.serve(range(100, 112))
    # 20 spans, and 3 for each of two, three or six checkpoints.
    assert hits == {Superseding.AT_ONCE: 10, Superseding.A_TURN_LATER: 10, Superseding.NEVER: 0}
