"""vllm/v1/kv_offload/writes/tracking.py"""

from typing import Any, cast

from tests.v1.kv_offload.tier_rig import (
    GROUP,
    ROWS_ALONE,
    UNIT,
    WITH_STATES,
    FakeCoordinator,
    make_request,
)
from vllm.v1.core.pool.exports import PlacedCheckpoint
from vllm.v1.core.retention.standing import CheckpointStanding
from vllm.v1.kv_offload.layout import ObjectLayout
from vllm.v1.kv_offload.store.cells import ObjectKind
from vllm.v1.kv_offload.writes.tracking import Tracker
from vllm.v1.request import Request


def _tracker(
    layout: ObjectLayout = ROWS_ALONE, *places: PlacedCheckpoint, needs_next_token: bool = False
) -> Tracker:
    coordinator = FakeCoordinator()
    coordinator.checkpoints = list(places)
    return Tracker(cast("Any", coordinator), layout, needs_next_token=needs_next_token)


def _look(tracker: Tracker, request: Request, computed: int) -> list[tuple[int, int]]:
    """Return the (first, end) of what a step of a request leaves to be written."""
    request.num_computed_tokens = computed
    tracker.look([request.request_id], {})
    found = [(candidate.first, candidate.end) for candidate in tracker.waiting]
    tracker.waiting.clear()
    return found


def _states(tracker: Tracker, request: Request, computed: int) -> dict[int, bool]:
    """Return the boundaries whose states such a step leaves, and whether prompts part there."""
    request.num_computed_tokens = computed
    tracker.look([request.request_id], {})
    waiting = [c for c in tracker.waiting if c.key.kind is ObjectKind.STATE]
    return {candidate.end: candidate.is_shared for candidate in waiting}


def test_rows_are_considered_as_they_are_computed() -> None:
    tracker, request = _tracker(), make_request("0", 3 * GROUP)
    tracker.add(request)
    assert _look(tracker, request, GROUP - 1) == []
    # A token whose value has not come is not computed.
    request.num_output_placeholders = 1
    assert _look(tracker, request, GROUP) == []
    assert _look(tracker, request, 2 * GROUP + 1) == [(0, GROUP), (GROUP, 2 * GROUP)]


def test_who_leaves_the_cache_alone_leaves_nothing_behind() -> None:
    private = make_request("1", GROUP)
    private.skip_cache_insert = True
    tracker, request = _tracker(), make_request("0", GROUP, prompt_logprobs=1)
    for one in (private, request):
        tracker.add(one)
        assert _look(tracker, one, GROUP) == []
    tracker.end(request)
    assert not tracker.has_ended


def test_a_request_that_never_ran_leaves_nothing_behind() -> None:
    tracker = _tracker()
    for name, computed in (("0", 0), ("1", 1)):
        request = make_request(name, GROUP)
        tracker.add(request)
        request.num_computed_tokens = computed
        tracker.end(request)
        assert tracker.has_ended is (computed > 0)


def test_states_are_considered_behind_the_prompt_and_at_the_end() -> None:
    kept = CheckpointStanding.KEPT
    tracker = _tracker(WITH_STATES, *(PlacedCheckpoint(p, kept, None) for p in (UNIT, 2 * UNIT)))
    request = make_request("0", UNIT + 8)
    tracker.add(request)
    # The step that ends the prompt publishes its checkpoints when it was scheduled: look later.
    assert _states(tracker, request, UNIT + 8) == {}
    request.append_output_token_ids(list(range(UNIT)))
    assert _states(tracker, request, UNIT + 9) == {UNIT: False}
    tracker.end(request)
    tracker.look([], {})
    assert [c.end for c in tracker.waiting if c.key.kind is ObjectKind.STATE] == [UNIT, 2 * UNIT]


def test_where_prompts_part_is_told() -> None:
    junction, kept = CheckpointStanding.JUNCTION, CheckpointStanding.KEPT
    spare = CheckpointStanding.SPARE
    places = [
        PlacedCheckpoint(UNIT, junction, None),
        PlacedCheckpoint(2 * UNIT, spare, None),
        PlacedCheckpoint(3 * UNIT, kept, None),
    ]
    request = make_request("0", 3 * UNIT)
    tracker = _tracker(WITH_STATES, *places)
    tracker.add(request)
    assert _states(tracker, request, 3 * UNIT + 1) == {UNIT: True, 3 * UNIT: False}


def test_a_drafters_state_needs_the_token_behind_it() -> None:
    kept = CheckpointStanding.KEPT
    places = [PlacedCheckpoint(UNIT, kept, 7), PlacedCheckpoint(2 * UNIT, kept, None)]
    request = make_request("0", 2 * UNIT)
    tracker = _tracker(WITH_STATES, *places, needs_next_token=True)
    tracker.add(request)
    assert _states(tracker, request, 2 * UNIT + 1) == {UNIT: False}
