"""Tokens known, computed, drafted and in flight."""

import pytest

from tests.v1.core.sched.builders import make_request
from vllm.v1.request import RequestStatus


def test_drafts_serve_one_step() -> None:
    request = make_request("0", 4)
    request.propose_drafts([7, 8, 9])
    assert request.num_tokens_with_spec == 7
    assert request.take_drafts(2) == [7, 8]
    assert request.spec_token_ids == []
    request.propose_drafts([7])
    assert request.take_drafts(-1) == []
    assert request.spec_token_ids == []


def test_tokens_in_flight() -> None:
    request = make_request("0", 4)
    request.advance(4)
    request.expect_tokens(0, [-1, -1])
    assert (request.num_output_placeholders, request.spec_token_ids) == (1, [-1, -1])
    request.advance(3)
    request.expect_tokens(2, [])
    assert (request.num_output_placeholders, request.num_settled_tokens) == (4, 3)
    request.receive_tokens(1)
    assert request.num_output_placeholders == 3
    request.receive_tokens(5)
    assert request.num_output_placeholders == 0


def test_what_is_given_up_in_flight_is_discarded_when_it_comes() -> None:
    request = make_request("0", 4)
    request.expect_tokens(0, [])
    request.expect_tokens(0, [])
    request.discard_tokens_in_flight()
    assert request.num_output_placeholders == 0
    assert [request.try_discard() for _ in range(3)] == [True, True, False]
    assert request.async_tokens_to_discard == 0


@pytest.mark.parametrize(
    ("placeholders", "drafts", "expected"),
    [(0, False, False), (1, False, False), (2, False, True), (2, True, False)],
)
def test_surely_done(placeholders: int, drafts: bool, expected: bool) -> None:
    request = make_request("0", 4, max_tokens=3)
    request.append_output_token_ids(1)
    request.num_output_placeholders = placeholders
    assert request.is_surely_done(has_drafts=drafts) is expected


def test_resuming_drops_drafts() -> None:
    request = make_request("0", 20)
    request.start_loading(20)
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert request.is_blocked
    request.propose_drafts([1])
    request.resume_at(19)
    assert (request.num_computed_tokens, request.spec_token_ids) == (19, [])


@pytest.mark.parametrize("num_preemptions", [0, 1])
def test_unblocking_remembers_a_preemption(num_preemptions: int) -> None:
    request = make_request("0", 4)
    request.start_loading(2)
    request.num_preemptions = num_preemptions
    request.unblock()
    assert not request.is_blocked
    assert request.status is (RequestStatus.PREEMPTED if num_preemptions else RequestStatus.WAITING)


def test_failing_ends_for_good() -> None:
    request = make_request("0", 4, resumable=True)
    request.fail("why")
    assert (request.status, request.stop_reason) == (RequestStatus.FINISHED_ERROR, "why")
    assert not request.resumable
