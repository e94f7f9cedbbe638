"""The one table of what events make of checkpoints."""

import pytest

from vllm.v1.core.retention.standing import (
    TRANSITIONS,
    CheckpointEvent,
    CheckpointStanding,
    next_standing,
)

S, E = CheckpointStanding, CheckpointEvent


def test_every_standing_has_a_row_and_every_event_changes_something() -> None:
    assert set(TRANSITIONS) == set(S)
    assert {event for row in TRANSITIONS.values() for event in row} == set(E)


@pytest.mark.parametrize("standing", S)
def test_a_junction_is_reached_from_everywhere_and_lasts_as_long_as_its_session(
    standing: S,
) -> None:
    assert next_standing(standing, E.PARTED) is S.JUNCTION
    others = set(E) - {E.ENDED}
    assert all(next_standing(S.JUNCTION, event) is S.JUNCTION for event in others)
    after = next_standing(standing, E.ENDED)
    assert after is (S.FILLER if standing is S.FILLER else S.SPARE)


@pytest.mark.parametrize("standing", S)
def test_only_spare_ones_rise_by_a_hit_and_nothing_becomes_spare_that_was_asked_for(
    standing: S,
) -> None:
    after = next_standing(standing, E.HIT)
    assert after is (S.LEFT if standing.is_spare else standing)
    assert next_standing(standing, E.PASSED).is_spare == (standing.is_spare or standing is S.LEFT)


def test_what_is_spare_is_never_superseded_and_what_is_superseded_comes_back() -> None:
    for standing in (S.FILLER, S.SPARE, S.WARM):
        assert next_standing(standing, E.SUPERSEDED) is standing
    for standing in (S.LEFT, S.KEPT):
        superseded = next_standing(standing, E.SUPERSEDED)
        assert superseded is S.SUPERSEDED
        assert next_standing(superseded, E.HIT) is superseded
        assert next_standing(superseded, E.ASKED_FOR) is S.KEPT
    assert next_standing(S.SPARE, E.KIND_PAYS) is S.WARM
    assert next_standing(S.FILLER, E.KIND_PAYS) is S.FILLER
