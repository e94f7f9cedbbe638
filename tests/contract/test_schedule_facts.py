"""Requests, schedulers, outputs and stop rules, sentence by sentence (sections 9 and 10)."""

import dataclasses
from typing import Any
from unittest.mock import Mock

import pytest

from tests.v1.core.sched.builders import EOS, make_request, make_scheduler
from vllm.sampling_params import RepetitionDetectionParams, SamplingParams, StructuredOutputsParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.sched.utils import check_sequence_repetition, check_stop
from vllm.v1.engine import FinishReason
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus


def plain_request(request_id: str = "r", **kw: Any) -> Request:
    arguments: dict[str, Any] = {
        "prompt_token_ids": [1, 2, 3],
        "sampling_params": SamplingParams(max_tokens=5),
        "pooling_params": None,
    }
    return Request(request_id=request_id, **{**arguments, **kw})


def result_of(output: SchedulerOutput, tokens: dict[str, list[int]]) -> ModelRunnerOutput:
    names = list(output.num_scheduled_tokens)
    return ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: i for i, name in enumerate(names)},
        sampled_token_ids=[tokens.get(name, []) for name in names],
    )


# ---- 9 requests ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("status", RequestStatus.WAITING),
        ("num_computed_tokens", 0),
        ("num_prompt_tokens", 3),
        ("num_tokens", 3),
        ("num_tokens_with_spec", 3),
        ("num_output_tokens", 0),
        ("spec_token_ids", []),
        ("num_preemptions", 0),
        ("num_output_placeholders", 0),
        ("async_tokens_to_discard", 0),
        ("next_decode_eligible_step", 0),
        ("is_prefill_chunk", False),
        ("stop_reason", None),
        ("max_tokens", 5),
        ("mm_features", []),
        ("cache_salt", None),
        ("lora_request", None),
        ("kv_transfer_params", None),
        ("resumable", False),
        ("prefill_stats", None),
        ("client_index", 0),
        ("prompt_embeds", None),
        ("num_nans_in_logits", 0),
        ("skip_reading_prefix_cache", False),
        ("use_structured_output", False),
        ("has_encoder_inputs", False),
    ],
)
def test_a_new_request(name: str, value: Any) -> None:
    assert getattr(plain_request(), name) == value


def test_what_parameters_say_of_a_request() -> None:
    asks = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    waiting = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    assert plain_request(sampling_params=asks).status is waiting
    reads = SamplingParams(prompt_logprobs=1)
    assert plain_request(sampling_params=reads).skip_reading_prefix_cache
    moves = SamplingParams(extra_args={"kv_transfer_params": {"a": 1}})
    assert plain_request(sampling_params=moves).kv_transfer_params == {"a": 1}


def test_requests_are_ordered_and_equal_by_identity() -> None:
    early = plain_request("b", arrival_time=1.0)
    late = plain_request("a", arrival_time=2.0)
    urgent = plain_request("c", arrival_time=3.0, priority=-1)
    assert sorted([late, early, urgent]) == [urgent, early, late]
    assert plain_request("a", arrival_time=1.0) < early
    assert len({early, plain_request("b", arrival_time=1.0)}) == 2


def test_token_views_are_read_only_and_grow() -> None:
    request = plain_request(block_hasher=get_request_block_hasher(2, sha256))
    hashes, view = request.block_hashes, request.all_token_ids
    for change in (view.append, view.extend, view.remove):
        with pytest.raises(TypeError):
            change(1)
    request.append_output_token_ids(4)
    request.append_output_token_ids([5, 6])
    assert list(view) == request._all_token_ids == [1, 2, 3, 4, 5, 6]
    assert list(request.output_token_ids) == request._output_token_ids == [4, 5, 6]
    assert isinstance(view.copy(), list)
    assert hashes is request.block_hashes
    assert len(hashes) == 3


@pytest.mark.parametrize(
    "name",
    [
        "WAITING",
        "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR",
        "WAITING_FOR_REMOTE_KVS",
        "WAITING_FOR_STREAMING_REQ",
        "RUNNING",
        "PREEMPTED",
        "FINISHED_STOPPED",
        "FINISHED_LENGTH_CAPPED",
        "FINISHED_ABORTED",
        "FINISHED_IGNORED",
        "FINISHED_ERROR",
        "FINISHED_REPETITION",
    ],
)
def test_statuses_have_names(name: str) -> None:
    status = RequestStatus[name]
    assert str(status) == f"{status}" == name
    assert RequestStatus.is_finished(status) is name.startswith("FINISHED")
    assert (status > RequestStatus.PREEMPTED) is name.startswith("FINISHED")


def test_statuses_have_an_order() -> None:
    assert [status.name for status in sorted(RequestStatus)] == [s.name for s in RequestStatus]
    assert [reason.name for reason in sorted(FinishReason)] == [
        "STOP",
        "LENGTH",
        "ABORT",
        "ERROR",
        "REPETITION",
    ]


# ---- 10.1 schedulers and queues ------------------------------------------------------------------


@pytest.mark.parametrize("use_async", [False, True])
def test_what_a_scheduler_shows(use_async: bool) -> None:
    scheduler = make_scheduler(use_async=use_async)
    assert type(scheduler) is (AsyncScheduler if use_async else Scheduler)
    assert (scheduler.requests, scheduler.running, scheduler.finished_req_ids) == ({}, [], set())
    assert (len(scheduler.waiting), len(scheduler.skipped_waiting)) == (0, 0)
    assert (scheduler.connector, scheduler.ec_connector) == (None, None)
    assert scheduler._inflight_prefills == set()
    assert scheduler.finished_recving_kv_req_ids == set()
    assert not scheduler.is_encoder_decoder
    assert scheduler.max_num_encoder_input_tokens == 0
    scheduler.is_encoder_decoder = True
    scheduler.encoder_cache_manager = other = Mock()
    assert scheduler.is_encoder_decoder
    assert scheduler.encoder_cache_manager is other
    assert scheduler.reset_connector_cache()


def test_queues_put_back_in_order() -> None:
    queue = create_request_queue(SchedulingPolicy.FCFS)
    a, b, c, d = (plain_request(name, arrival_time=0.0) for name in "abcd")
    queue.add_request(c)
    queue.add_request(d)
    skipped = create_request_queue(SchedulingPolicy.FCFS)
    skipped.prepend_request(a)
    skipped.prepend_request(b)
    queue.prepend_requests(skipped)
    assert [r.request_id for r in queue] == ["a", "b", "c", "d"]
    assert queue[0] is queue.peek_request() is a  # type: ignore[index]
    queue.remove_requests([b, d])
    queue.remove_request(c)
    assert (len(queue), bool(queue), queue.pop_request(), bool(queue)) == (1, True, a, False)


def test_a_queue_by_priority_iterates_in_order() -> None:
    queue = create_request_queue(SchedulingPolicy.PRIORITY)
    for name, priority in (("a", 2), ("b", 0), ("c", 1)):
        queue.add_request(plain_request(name, priority=priority, arrival_time=0.0))
    assert [r.request_id for r in queue] == ["b", "c", "a"]
    assert len(queue) == 3


# ---- 10.2, 10.3 a step and its result ----------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "scheduled"),
    [
        ({}, {"0": 100, "1": 100}),
        ({"long_prefill_token_threshold": 30}, {"0": 30, "1": 30}),
        ({"max_num_batched_tokens": 120}, {"0": 100, "1": 20}),
        ({"max_num_seqs": 1}, {"0": 100}),
        ({"max_num_scheduled_tokens": 110}, {"0": 100, "1": 10}),
    ],
)
def test_what_bounds_a_step(fields: dict[str, int], scheduled: dict[str, int]) -> None:
    scheduler = make_scheduler(**fields)
    for name in "01":
        scheduler.add_request(make_request(name, [int(name)] * 100))
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == scheduled
    assert output.total_num_scheduled_tokens == sum(scheduled.values())
    assert scheduler.requests["0"].num_computed_tokens == scheduled["0"]


def test_equal_prompts_of_one_step_share() -> None:
    scheduler = make_scheduler()
    for name in "01":
        scheduler.add_request(make_request(name, [7] * 40))
    assert scheduler.schedule().num_scheduled_tokens == {"0": 40, "1": 8}


@pytest.mark.parametrize(("policy", "victim"), [("fcfs", "1"), ("priority", "0")])
def test_who_is_preempted(policy: str, victim: str) -> None:
    scheduler = make_scheduler(num_blocks=5, policy=policy, enable_prefix_caching=False)
    for name, priority in (("0", 1), ("1", 0)):
        scheduler.add_request(make_request(name, [int(name)] * 32, priority=priority))
    output = scheduler.schedule()
    scheduler.update_from_output(output, result_of(output, {"0": [1], "1": [1]}))
    output = scheduler.schedule()
    assert set(output.num_scheduled_tokens) == {"0", "1"} - {victim}
    assert scheduler.requests[victim].status is RequestStatus.PREEMPTED
    assert scheduler.requests[victim].num_computed_tokens == 0
    # In flight, its token still counts.
    assert scheduler.requests[victim].num_tokens == 33


@pytest.mark.parametrize(
    ("sampled", "kept", "reason"),
    [
        ([5, EOS, 6], [5, EOS], FinishReason.STOP),
        ([5, 6, 7, 8], [5, 6, 7], FinishReason.LENGTH),
        ([], None, None),
    ],
)
def test_tokens_up_to_the_one_that_stops(
    sampled: list[int], kept: list[int] | None, reason: FinishReason | None
) -> None:
    scheduler = make_scheduler(num_speculative_tokens=3)
    scheduler.add_request(make_request("0", [1] * 20, max_tokens=3))
    output = scheduler.schedule()
    outputs = scheduler.update_from_output(output, result_of(output, {"0": sampled}))
    produced = outputs[0].outputs
    if kept is None:
        assert not produced
        return
    (one,) = produced
    assert (list(one.new_token_ids), one.finish_reason) == (kept, reason)
    assert not scheduler.running
    assert scheduler.finished_req_ids == {"0"}
    assert scheduler.schedule().finished_req_ids == {"0"}
    assert scheduler.finished_req_ids == set()


@pytest.mark.parametrize("num_accepted", [0, 1, 2])
def test_rejected_drafts_are_taken_back(num_accepted: int) -> None:
    scheduler = make_scheduler(num_speculative_tokens=2)
    scheduler.add_request(make_request("0", [1] * 20, max_tokens=9))
    output = scheduler.schedule()
    scheduler.update_from_output(output, result_of(output, {"0": [5]}))
    scheduler.update_draft_token_ids(DraftTokenIds(["0", "gone"], [[6, 7], [8]]))
    output = scheduler.schedule()
    assert output.scheduled_spec_decode_tokens == {"0": [6, 7]}
    assert scheduler.requests["0"].num_computed_tokens == 23
    tokens = [*[6, 7, 9][:num_accepted], 9]
    outputs = scheduler.update_from_output(output, result_of(output, {"0": tokens}))
    assert scheduler.requests["0"].num_computed_tokens == 21 + num_accepted
    stats = outputs[0].scheduler_stats
    assert stats is not None
    counts = stats.spec_decoding_stats
    assert counts is not None
    assert (counts.num_drafts, counts.num_draft_tokens) == (1, 2)
    assert counts.num_accepted_tokens == num_accepted
    assert len(counts.num_accepted_tokens_per_pos) == counts.num_spec_tokens == 2


def test_aborts_from_outside() -> None:
    scheduler = make_scheduler()
    for name in "012":
        scheduler.add_request(make_request(name, [int(name)] * 20))
    scheduler.schedule()
    assert scheduler.get_num_unfinished_requests() == 3
    aborted = RequestStatus.FINISHED_ABORTED
    assert scheduler.finish_requests("0", aborted) == [("0", 0)]
    assert scheduler.finish_requests(["0", "1", "unknown"], aborted) == [("1", 0)]
    assert scheduler.finish_requests(None, aborted) == [("2", 0)]
    assert scheduler.get_num_unfinished_requests() == 0
    assert scheduler.has_finished_requests()
    assert scheduler.has_requests()
    scheduler.schedule()
    assert not scheduler.has_requests()


@pytest.mark.parametrize("resets_running", [False, True])
def test_resets_while_blocks_are_held(resets_running: bool) -> None:
    scheduler = make_scheduler()
    for name in "012":
        scheduler.add_request(make_request(name, [int(name)] * 20))
    scheduler.schedule()
    assert scheduler.reset_prefix_cache(reset_running_requests=resets_running) is resets_running
    if resets_running:
        assert [r.request_id for r in scheduler.waiting] == ["0", "1", "2"]
        assert not scheduler.running
        # They begin anew: workers are told all of their tokens, though they were in the last step.
        cached = scheduler.schedule().scheduled_cached_reqs
        assert cached.resumed_req_ids == {"0", "1", "2"}
        assert cached.all_token_ids == {name: [int(name)] * 20 for name in "012"}


def test_a_scheduler_that_runs_ahead() -> None:
    scheduler = make_scheduler(use_async=True)
    scheduler.add_request(make_request("0", [1] * 20, max_tokens=2))
    first = scheduler.schedule()
    request = scheduler.requests["0"]
    assert request.num_output_placeholders == 1
    second = scheduler.schedule()
    assert second.num_scheduled_tokens == {"0": 1}
    # prompt + max_tokens - 1 are scheduled: the end is certain.
    assert scheduler.schedule().num_scheduled_tokens == {}
    scheduler.update_from_output(first, result_of(first, {"0": [5]}))
    assert request.num_output_placeholders == 1
    scheduler.update_from_output(second, result_of(second, {"0": [6]}))
    assert request.is_finished()


# ---- 10.4 outputs, 10.5 stop rules -------------------------------------------------------------


def test_outputs_are_plain_data() -> None:
    empty = CachedRequestData.make_empty()
    assert (empty.num_reqs, empty.req_ids, empty.resumed_req_ids) == (0, [], set())
    result = ModelRunnerOutput(req_ids=["0"], req_id_to_index={"0": 0})
    assert (result.sampled_token_ids, result.logprobs, result.prompt_logprobs_dict) == (
        [],
        None,
        {},
    )
    assert dataclasses.replace(result, sampled_token_ids=[[1]]).sampled_token_ids == [[1]]
    report = KVConnectorOutput()
    assert (report.invalid_block_ids, report.expected_finished_count) == (set(), 0)
    scheduler = make_scheduler()
    scheduler.add_request(make_request("0", [1] * 20))
    (new,) = scheduler.schedule().scheduled_new_reqs
    for text in (repr(new), new.anon_repr()):
        assert "prompt_embeds_shape=None" in text
    assert "[1, 1" not in new.anon_repr()


def stopping(tokens: list[int], **params: Any) -> Request:
    sampling = SamplingParams(**{"max_tokens": 20, **params})
    sampling.update_from_generation_config({}, eos_token_id=EOS)
    request = plain_request(sampling_params=sampling)
    request.append_output_token_ids(tokens)
    return request


@pytest.mark.parametrize(
    ("tokens", "params", "status", "reason"),
    [
        ([5], {}, None, None),
        ([EOS], {}, "FINISHED_STOPPED", None),
        ([EOS], {"ignore_eos": True}, None, None),
        ([EOS], {"min_tokens": 2}, None, None),
        ([9], {"stop_token_ids": [9]}, "FINISHED_STOPPED", 9),
        ([5, 6], {"max_tokens": 2}, "FINISHED_LENGTH_CAPPED", None),
        ([5] * 7, {}, "FINISHED_LENGTH_CAPPED", None),  # 3 + 7 tokens of 10
        (
            [5, 6, 5, 6],
            {"repetition_detection": RepetitionDetectionParams(2, 2, 2)},
            "FINISHED_REPETITION",
            "repetition_detected",
        ),
    ],
)
def test_stop_rules(tokens: list[int], params: Any, status: str | None, reason: Any) -> None:
    request = stopping(tokens, **params)
    assert check_stop(request, 10) is (status is not None)
    if status is not None:
        assert (request.status.name, request.stop_reason) == (status, reason)


@pytest.mark.parametrize(
    ("tokens", "sizes", "repeats"),
    [
        ([1, 2, 1, 2], (2, 1, 2), True),
        ([1, 2, 1, 2, 3], (2, 1, 2), False),
        ([3, 3, 3], (2, 0, 3), True),
        ([3, 3, 3], (2, 2, 3), False),
        ([3, 3, 3], (0, 0, 3), False),
        ([3, 3, 3], (2, 1, 1), False),
    ],
)
def test_repetition(tokens: list[int], sizes: tuple[int, int, int], repeats: bool) -> None:
    assert check_sequence_repetition(tokens, RepetitionDetectionParams(*sizes)) is repeats
