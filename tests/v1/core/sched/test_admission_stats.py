"""What is counted when requests are admitted."""

import pytest

from tests.v1.core.sched.builders import make_request
from vllm.v1.core.sched.admission_stats import AdmissionStats
from vllm.v1.core.whole_block.records import whole_block_prefill_stats
from vllm.v1.messages import PrefillStats


def make(*, counts: bool = True, has_connector: bool = True) -> AdmissionStats:
    return AdmissionStats(counts=counts, has_connector=has_connector)


def record_of(num_cached_tokens: int) -> PrefillStats:
    """What a manager of whole blocks notes of 40 tokens."""
    return whole_block_prefill_stats(
        num_tokens=40, num_cached_tokens=num_cached_tokens, granularity=16
    )


@pytest.mark.parametrize(("local", "external"), [(0, 0), (32, 0), (0, 32), (16, 16), (0, 40)])
def test_every_token_has_one_source_in_every_account(local: int, external: int) -> None:
    stats = make()
    request = make_request("0", 40)
    stats.record_query(request, local, external)
    stats.record_admission(request, record_of(local + external), local, external)
    record = request.prefill_stats
    assert record is not None
    assert record.num_cached_tokens == local + external
    assert record.num_external_tokens == external
    assert record.dense_match_tokens == local
    assert record.num_cached_tokens + sum(record.miss_tokens.values()) == 40
    own, connector = stats.take()
    assert (own.queries, own.hits) == (40, local)
    assert own.hits + sum(own.miss_tokens.values()) == own.queries
    assert connector is not None
    assert (connector.queries, connector.hits) == (40 - local, external)
    # Taken means begun anew.
    own, connector = stats.take()
    assert own.queries == 0
    assert connector is not None
    assert connector.queries == 0


def test_the_managers_record_is_taken_as_it_is() -> None:
    stats = make(has_connector=False)
    request = make_request("0", 40)
    record = PrefillStats(40, 16, 32, {"window_evicted": 16, "above_last_boundary": 8})
    stats.record_admission(request, record, 16, 0)
    assert request.prefill_stats is record
    own, connector = stats.take()
    assert own.miss_tokens == record.miss_tokens
    assert connector is None


def test_the_first_record_stays() -> None:
    stats = make()
    request = make_request("0", 40)
    stats.record_admission(request, record_of(32), 0, 32)
    stats.record_admission(request, record_of(16), 16, 0)
    assert request.prefill_stats is not None
    assert request.prefill_stats.num_external_tokens == 32
    own, _ = stats.take()
    assert own.requests == 1


def test_resumed_requests_are_counted_apart_and_further_answers_not_at_all() -> None:
    stats = make()
    request = make_request("0", 40)
    request.num_preemptions = 1
    stats.record_query(request, 32, 0)
    stats.record_admission(request, record_of(32), 32, 0)
    stats.record_admission(make_request("1", 40, is_extra_answer=True), record_of(32), 32, 0)
    own, connector = stats.take()
    assert (own.requests, own.preempted_requests, own.preempted_hits) == (0, 1, 32)
    assert connector is not None
    assert connector.preempted_queries == 8
    assert request.prefill_stats is None


def test_without_statistics_the_client_still_learns() -> None:
    stats = make(counts=False)
    request = make_request("0", 40)
    stats.record_query(request, 0, 16)
    stats.record_admission(request, record_of(0), 0, 0)
    assert request.prefill_stats == record_of(0)
    own, connector = stats.take()
    assert own.queries == 0
    assert connector is None


def test_a_reset_is_told_once() -> None:
    stats = make()
    stats.note_reset()
    assert stats.take()[0].reset
    assert not stats.take()[0].reset
