from vllm.v1.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    FinishReason,
    PrefillStats,
)
from vllm.v1.metrics.iteration_stats import IterationStats, RequestStateStats

QUEUED, SCHEDULED, PREEMPTED = EngineCoreEventType


def output(*tokens: int, events=()) -> EngineCoreOutput:
    return EngineCoreOutput("r", list(tokens), events=[EngineCoreEvent(*e) for e in events])


def test_the_life_of_a_request():
    request = RequestStateStats(arrival_time=10.0)
    first = IterationStats(iteration_timestamp=15.5)
    prefill = PrefillStats(8, 6, miss_tokens={"first_seen": 2})
    events = [(QUEUED, 11.0), (SCHEDULED, 13.0)]
    first.update_from_output(output(1, events=events), 15.0, 8, prefill, request)
    assert first.time_to_first_tokens_iter == [5.5]
    assert (first.num_prompt_tokens, first.num_cached_prompt_tokens) == (8, 6)
    assert first.num_computed_prompt_tokens == 2
    later = IterationStats(iteration_timestamp=18.0)
    later.update_from_output(output(2, 3), 17.0, 8, prefill, request)
    assert later.time_to_first_tokens_iter == []
    assert later.inter_token_latencies_iter == [2.0]
    assert later.num_prompt_tokens == 0
    later.update_from_finished_request(FinishReason.STOP, 8, 20, request, 6, n=2)
    (done,) = later.finished_requests
    assert done.e2e_latency == 8.0
    assert (done.queued_time, done.prefill_time, done.decode_time) == (2.0, 2.0, 2.0)
    assert done.inference_time == 4.0
    assert done.mean_time_per_output_token == 1.0
    assert (done.num_generation_tokens, done.max_tokens, done.n) == (3, 20, 2)
    assert (later.max_num_generation_tokens_iter, later.n_params_iter) == ([3], [2])


def test_a_preemption_does_not_lengthen_the_queue_time():
    request = RequestStateStats(arrival_time=1.0)
    stats = IterationStats()
    events = [(QUEUED, 1.0), (SCHEDULED, 2.0), (PREEMPTED, 3.0), (SCHEDULED, 9.0)]
    stats.update_from_output(output(1, events=events), 10.0, 4, None, request)
    assert (request.scheduled_ts, request.num_preemptions, stats.num_preemptions) == (2.0, 1, 1)


def test_a_chunk_of_a_prompt_is_no_first_token():
    request = RequestStateStats(arrival_time=1.0)
    stats = IterationStats()
    stats.update_from_output(output(), 2.0, 4, None, request)
    assert (stats.num_prompt_tokens, stats.time_to_first_tokens_iter) == (0, [])


def test_a_request_aborted_in_the_queue_has_no_times():
    stats = IterationStats(iteration_timestamp=5.0)
    request = RequestStateStats(arrival_time=1.0, queued_ts=1.5)
    stats.update_from_finished_request(FinishReason.ABORT, 4, None, request)
    (done,) = stats.finished_requests
    assert done.e2e_latency == 4.0
    assert (done.queued_time, done.prefill_time, done.decode_time) == (0.0, 0.0, 0.0)
    assert done.mean_time_per_output_token == 0.0
