"""The scheduler's behaviours, one by one."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import numpy as np
import pytest

from tests.v1.core.sched.builders import (
    EOS,
    all_blocks_free,
    answer,
    hybrid_config,
    make_request,
    make_scheduler,
    make_v4_scheduler,
    outputs_by_request,
    run_all,
    step,
)
from tests.v1.core.sched.fake_executor import FakeExecutor, scripted
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.messages import EngineCoreEventType, FinishReason, PrefillStats
from vllm.v1.metrics.stats import PrefixCacheStats
from vllm.v1.outputs import DraftTokenIds, LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus


def names(requests: Any) -> list[str]:
    return [request.request_id for request in requests]


def executor_of(scheduler: Scheduler, **scripts: list[int]) -> FakeExecutor:
    return FakeExecutor(
        scheduler.kv_cache_config, scripted(dict(scripts)), scheduler.kv_cache_manager
    )


# ---------------------------------------------------------------- batching and order


def test_first_step_takes_whole_prompts() -> None:
    scheduler = make_scheduler()
    for i in range(3):
        scheduler.add_request(make_request(f"{i}", 10))
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"0": 10, "1": 10, "2": 10}
    assert output.total_num_scheduled_tokens == 30
    assert [data.req_id for data in output.scheduled_new_reqs] == ["0", "1", "2"]
    assert output.scheduled_cached_reqs.num_reqs == 0
    assert output.finished_req_ids == set()
    assert names(scheduler.running) == ["0", "1", "2"]
    assert not scheduler.waiting


def test_decode_after_prefill() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("0", 20))
    first = scheduler.schedule()
    bundles = scheduler.update_from_output(first, answer(first, {"0": [5]}))
    told = outputs_by_request(bundles)["0"]
    assert told.new_token_ids == [5]
    assert (told.num_draft_tokens, told.num_accepted_tokens) == (0, 0)
    second = scheduler.schedule()
    assert second.num_scheduled_tokens == {"0": 1}
    cached = second.scheduled_cached_reqs
    assert cached.req_ids == ["0"]
    assert cached.num_computed_tokens == [20]
    assert cached.num_output_tokens == [1]
    assert cached.new_block_ids == [None]
    assert cached.all_token_ids == {}


def test_budget_splits_prompts_and_running_come_first() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=100)
    scheduler.add_request(make_request("0", 80))
    scheduler.add_request(make_request("1", 80))
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"0": 80, "1": 20}
    scheduler.update_from_output(output, answer(output, {"0": [1]}))
    scheduler.add_request(make_request("2", 80))
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"0": 1, "1": 60, "2": 39}
    assert scheduler.requests["2"].is_prefill_chunk
    assert not scheduler.requests["1"].is_prefill_chunk


def test_long_prefill_threshold() -> None:
    scheduler = make_scheduler(long_prefill_token_threshold=30)
    scheduler.add_request(make_request("0", 80))
    scheduler.add_request(make_request("1", 10))
    sizes = []
    for _ in range(3):
        output = scheduler.schedule()
        sizes.append(output.num_scheduled_tokens["0"])
        scheduler.update_from_output(output, answer(output, {}))
    assert sizes == [30, 30, 20]


def test_without_chunked_prefill_a_prompt_waits_for_budget() -> None:
    scheduler = make_scheduler(
        enable_chunked_prefill=False, max_num_batched_tokens=100, max_model_len=100
    )
    scheduler.add_request(make_request("0", 60))
    scheduler.add_request(make_request("1", 60))
    scheduler.add_request(make_request("2", 10))
    output = scheduler.schedule()
    # Strictly in order: 2 would fit but does not pass 1.
    assert output.num_scheduled_tokens == {"0": 60}
    assert names(scheduler.waiting) == ["1", "2"]


def test_max_num_seqs() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for i in range(3):
        scheduler.add_request(make_request(f"{i}", 4))
    assert set(scheduler.schedule().num_scheduled_tokens) == {"0", "1"}
    assert scheduler.get_request_counts() == (2, 1)
    assert scheduler.get_num_unfinished_requests() == 3


def test_max_num_scheduled_tokens_wins() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=100, max_num_scheduled_tokens=40)
    scheduler.add_request(make_request("0", 80))
    assert scheduler.schedule().num_scheduled_tokens == {"0": 40}


def test_priority_order() -> None:
    scheduler = make_scheduler(policy="priority", max_num_seqs=3)
    for name, priority, arrival in (("a", 2, 0.0), ("b", 0, 2.0), ("c", 0, 1.0), ("d", 1, 3.0)):
        scheduler.add_request(make_request(name, 4, priority=priority, arrival_time=arrival))
    output = scheduler.schedule()
    assert list(output.num_scheduled_tokens) == ["c", "b", "d"]
    assert names(scheduler.waiting) == ["a"]


# ---------------------------------------------------------------- preemption


def test_fcfs_preempts_the_last() -> None:
    scheduler = make_scheduler(num_blocks=11, enable_prefix_caching=False)
    scheduler.add_request(make_request("0", 80))
    scheduler.add_request(make_request("1", 80))
    output = scheduler.schedule()
    scheduler.update_from_output(output, answer(output, {"0": [1], "1": [1]}))
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"0": 1}
    assert output.preempted_req_ids == {"1"}
    victim = scheduler.requests["1"]
    assert victim.status is RequestStatus.PREEMPTED
    assert victim.num_computed_tokens == 0
    assert victim.num_preemptions == 1
    assert names(scheduler.waiting) == ["1"]


def test_priority_preempts_the_least_important_even_if_scheduled_already() -> None:
    scheduler = make_scheduler(num_blocks=11, policy="priority", enable_prefix_caching=False)
    scheduler.add_request(make_request("low", 80, priority=5, arrival_time=0.0))
    scheduler.add_request(make_request("high", 79, priority=0, arrival_time=1.0))
    output = scheduler.schedule()
    # The unimportant one stands first in the running list.
    scheduler.running.reverse()
    assert names(scheduler.running) == ["low", "high"]
    tokens = {"low": [1], "high": [1]}
    scheduler.update_from_output(output, answer(output, tokens))
    low = scheduler.requests["low"]
    assert low.num_computed_tokens == 80
    output = scheduler.schedule()
    # low needs a sixth block, nothing is free: low itself is the victim.
    assert output.preempted_req_ids == {"low"}
    assert output.num_scheduled_tokens == {}
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"high": 1}


def test_a_victim_gives_back_what_the_step_gave_it() -> None:
    scheduler = make_scheduler(
        num_blocks=11,
        policy="priority",
        enable_prefix_caching=False,
        max_num_batched_tokens=160,
    )
    scheduler.add_request(make_request("low", 79, priority=5, arrival_time=0.0))
    scheduler.add_request(make_request("high", 80, priority=0, arrival_time=1.0))
    output = scheduler.schedule()
    scheduler.running.reverse()
    assert names(scheduler.running) == ["low", "high"]
    scheduler.update_from_output(output, answer(output, {"low": [1], "high": [1]}))
    output = scheduler.schedule()
    # low had its token scheduled in its fifth block when high needed a sixth.
    assert output.num_scheduled_tokens == {"high": 1}
    assert output.total_num_scheduled_tokens == 1
    assert output.scheduled_cached_reqs.req_ids == ["high"]
    assert output.preempted_req_ids == {"low"}


def test_resumed_request_is_described_whole() -> None:
    scheduler = make_scheduler(num_blocks=11, enable_prefix_caching=False)
    scheduler.add_request(make_request("0", 80, max_tokens=2))
    scheduler.add_request(make_request("1", 80, max_tokens=2))
    executor = executor_of(scheduler)
    step(scheduler, executor)
    step(scheduler, executor)
    output = scheduler.schedule()
    cached = output.scheduled_cached_reqs
    assert output.num_scheduled_tokens == {"1": 81}
    assert cached.resumed_req_ids == {"1"}
    assert len(cached.all_token_ids["1"]) == 81
    assert cached.num_output_tokens == [1]
    assert cached.new_block_ids[0] is not None
    assert len(cached.new_block_ids[0][0]) == 6
    assert output.finished_req_ids == {"0"}


def test_preemption_is_told_to_the_client() -> None:
    scheduler = make_scheduler(num_blocks=11, enable_prefix_caching=False)
    executor = executor_of(scheduler)
    scheduler.add_request(make_request("0", 80, max_tokens=3))
    scheduler.add_request(make_request("1", 80, max_tokens=3))
    last: dict[str, Any] = {}
    events: dict[str, list[EngineCoreEventType]] = {"0": [], "1": []}
    while scheduler.has_requests():
        for name, item in step(scheduler, executor).items():
            last[name] = item
            events[name] += [event.type for event in item.events or ()]
    assert last["1"].num_preemptions == 1
    assert last["0"].num_preemptions == 0
    kinds = EngineCoreEventType
    assert events["0"] == [kinds.QUEUED, kinds.SCHEDULED]
    assert events["1"] == [kinds.QUEUED, kinds.SCHEDULED, kinds.PREEMPTED, kinds.SCHEDULED]


# ---------------------------------------------------------------- prefix cache


def test_prefixes_are_shared_within_one_step() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("0", list(range(40))))
    scheduler.add_request(make_request("1", list(range(40))))
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"0": 40, "1": 8}
    first, second = output.scheduled_new_reqs
    assert first.block_ids[0][:2] == second.block_ids[0][:2]
    assert second.num_computed_tokens == 32
    assert scheduler.requests["1"].num_computed_tokens == 40


def test_prefill_stats_come_once_with_the_first_output() -> None:
    scheduler = make_scheduler()
    executor = executor_of(scheduler)
    scheduler.add_request(make_request("0", list(range(40)), max_tokens=2))
    first = step(scheduler, executor)["0"].prefill_stats
    assert first is not None
    assert (first.num_prompt_tokens, first.num_cached_tokens) == (40, 0)
    assert step(scheduler, executor)["0"].prefill_stats is None
    scheduler.add_request(make_request("1", list(range(40)), max_tokens=1))
    again = step(scheduler, executor)["1"].prefill_stats
    assert again is not None
    assert again.num_cached_tokens == 32


@pytest.mark.parametrize("make", [make_scheduler, lambda **kw: make_v4_scheduler(1000, **kw)])
def test_without_caching_every_token_is_bypassed(make: Callable[..., Scheduler]) -> None:
    scheduler = make(enable_prefix_caching=False)
    scheduler.add_request(make_request("0", 40, max_tokens=1))
    output = scheduler.schedule()
    bundles = scheduler.update_from_output(output, answer(output, {"0": [1]}))
    assert bundles[0].outputs[0].prefill_stats == PrefillStats(40, 0, 0, {"bypassed": 40})
    stats = bundles[0].scheduler_stats
    assert stats is not None
    assert stats.prefix_cache_stats.queries == 40
    assert stats.prefix_cache_stats.miss_tokens == {"bypassed": 40}


@pytest.mark.parametrize(("make", "num_blocks"), [(make_scheduler, 40), (make_v4_scheduler, 118)])
def test_a_request_without_room_is_counted_once(
    make: Callable[..., Scheduler], num_blocks: int
) -> None:
    """It is looked up again in every step; queries count its admission."""
    scheduler = make(num_blocks=num_blocks, max_model_len=600)
    unit = scheduler.block_size
    executor = executor_of(scheduler)
    prompt = list(range(300))
    scheduler.add_request(make_request("0", prompt, max_tokens=20, block_size=unit))
    scheduler.add_request(make_request("1", prompt, max_tokens=2, block_size=unit))
    scheduler.add_request(make_request("2", list(range(1000, 1590)), 1, block_size=unit))
    totals = PrefixCacheStats()
    num_steps_with_a_queue = 0
    while scheduler.has_requests():
        output = scheduler.schedule()
        bundles = scheduler.update_from_output(output, executor.execute(output))
        stats = next(b.scheduler_stats for b in bundles.values() if b.scheduler_stats)
        cache = stats.prefix_cache_stats
        assert cache.queries == cache.hits + sum(cache.miss_tokens.values())
        totals.record(cache.queries, cache.hits, preempted=False, miss_tokens=cache.miss_tokens)
        num_steps_with_a_queue += stats.num_waiting_reqs > 0
    assert num_steps_with_a_queue > 10
    assert totals.queries == 300 + 300 + 590
    assert totals.hits == 299 // unit * unit


def test_every_token_has_a_reason() -> None:
    scheduler = make_scheduler()
    executor = executor_of(scheduler)
    prompt = list(range(40))
    scheduler.add_request(make_request("0", prompt, max_tokens=1))
    misses = {"first_seen": 32, "above_last_boundary": 8}
    assert step(scheduler, executor)["0"].prefill_stats == PrefillStats(40, 0, 0, misses)
    scheduler.add_request(make_request("1", prompt, max_tokens=1))
    again = step(scheduler, executor)["1"].prefill_stats
    assert again == PrefillStats(40, 32, 32, {"above_last_boundary": 8})


def test_of_several_answers_to_a_prompt_one_counts() -> None:
    scheduler = make_scheduler()
    prompt = list(range(40))
    scheduler.add_request(make_request("0", prompt))
    scheduler.add_request(make_request("1", prompt, is_extra_answer=True))
    output = scheduler.schedule()
    bundles = scheduler.update_from_output(output, answer(output, {"0": [1], "1": [2]}))
    assert [o.prefill_stats.num_cached_tokens for o in bundles[0].outputs] == [0, 32]
    stats = bundles[0].scheduler_stats
    assert stats is not None
    cache = stats.prefix_cache_stats
    assert (cache.requests, cache.queries, cache.hits) == (1, 40, 0)


def test_preempted_requests_are_counted_apart() -> None:
    scheduler = make_scheduler(num_blocks=11)
    scheduler.add_request(make_request("0", 40, max_tokens=4))
    scheduler.schedule()
    scheduler.make_stats()
    assert scheduler.reset_prefix_cache(reset_running_requests=True)
    scheduler.schedule()
    stats = scheduler.make_stats()
    assert stats is not None
    cache = stats.prefix_cache_stats
    assert (cache.reset, cache.requests, cache.queries, cache.miss_tokens) == (True, 0, 0, {})
    assert (cache.preempted_requests, cache.preempted_queries) == (1, 40)


def test_a_preempted_request_keeps_its_first_record() -> None:
    scheduler = make_scheduler(num_blocks=11)
    scheduler.add_request(make_request("0", 40, max_tokens=4))
    output = scheduler.schedule()
    assert scheduler.reset_prefix_cache(reset_running_requests=True)
    request = scheduler.requests["0"]
    first = request.prefill_stats
    assert first is not None
    scheduler.update_from_output(output, answer(output, {}))
    scheduler.schedule()
    assert request.prefill_stats is first


def test_hybrid_groups_serve_hits() -> None:
    config = hybrid_config(40)
    scheduler = make_scheduler(kv_cache_config=config)
    executor = executor_of(scheduler)
    scheduler.add_request(make_request("0", list(range(100)), max_tokens=3))
    run_all(scheduler, executor)
    scheduler.add_request(make_request("1", list(range(100)), max_tokens=3))
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"1": 4}
    executor.execute(output)


def test_reset_prefix_cache() -> None:
    scheduler = make_scheduler()
    for i in range(3):
        scheduler.add_request(make_request(f"{i}", 20))
    output = scheduler.schedule()
    scheduler.update_from_output(output, answer(output, {"0": [1], "1": [1], "2": [1]}))
    assert not scheduler.reset_prefix_cache()
    assert len(scheduler.running) == 3
    assert scheduler.reset_prefix_cache(reset_running_requests=True)
    assert not scheduler.running
    assert names(scheduler.waiting) == ["0", "1", "2"]
    assert scheduler.reset_connector_cache()
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"0": 21, "1": 21, "2": 21}
    assert output.preempted_req_ids == {"0", "1", "2"}
    assert scheduler.schedule().preempted_req_ids == set()


def test_who_ends_after_a_preemption_is_told_as_ended_alone() -> None:
    scheduler = make_scheduler()
    for name in "01":
        scheduler.add_request(make_request(name, [int(name)] * 20))
    scheduler.schedule()
    assert scheduler.reset_prefix_cache(reset_running_requests=True)
    scheduler.finish_requests("1", RequestStatus.FINISHED_ABORTED)
    output = scheduler.schedule()
    assert output.preempted_req_ids == {"0"}
    assert output.finished_req_ids == {"1"}


# ---------------------------------------------------------------- room


def test_whole_prompt_must_fit() -> None:
    for reserve, admitted in ((True, {"0"}), (False, {"0", "1"})):
        scheduler = make_scheduler(
            num_blocks=11, max_num_batched_tokens=100, scheduler_reserve_full_isl=reserve
        )
        scheduler.add_request(make_request("0", 80))
        scheduler.add_request(make_request("1", 100))
        assert set(scheduler.schedule().num_scheduled_tokens) == admitted


@pytest.mark.parametrize("reserve", [True, False])
def test_what_can_never_fit_is_refused(reserve: bool) -> None:
    scheduler = make_scheduler(num_blocks=6, scheduler_reserve_full_isl=reserve)
    executor = executor_of(scheduler, small=[1, 2])
    scheduler.add_request(make_request("big", 100, client_index=3))
    scheduler.add_request(make_request("small", 10, max_tokens=2))
    outputs: dict[str, Any] = {}
    tokens = []
    while scheduler.has_requests():
        for name, item in step(scheduler, executor).items():
            outputs[name] = item
            tokens += item.new_token_ids
    assert outputs["big"].finish_reason is FinishReason.ERROR
    assert "5 blocks" in outputs["big"].stop_reason
    assert "100 prompt tokens" in outputs["big"].stop_reason
    assert tokens == [1, 2]
    assert all_blocks_free(scheduler)


@pytest.mark.parametrize("reserve", [True, False])
def test_an_answer_that_outgrows_the_pool_ends_with_an_error(reserve: bool) -> None:
    scheduler = make_scheduler(num_blocks=6, scheduler_reserve_full_isl=reserve)
    executor = executor_of(scheduler)
    scheduler.add_request(make_request("0", 70, max_tokens=100))
    tokens = run_all(scheduler, executor, max_steps=50)
    # 80 tokens fit; the last of them is sampled from 80, so 11 tokens came out.
    assert len(tokens["0"]) == 11
    assert all_blocks_free(scheduler)


def test_a_hit_that_does_not_fit_is_dropped() -> None:
    scheduler = make_scheduler()
    executor = executor_of(scheduler)
    scheduler.add_request(make_request("0", list(range(64)), max_tokens=1))
    run_all(scheduler, executor)
    manager = scheduler.kv_cache_manager
    allocate = manager.allocate_slots
    calls = []

    def picky(request: Request, num_new_tokens: int, **kwargs: Any) -> Any:
        calls.append((num_new_tokens, kwargs["num_new_computed_tokens"]))
        return (
            None
            if kwargs["num_new_computed_tokens"]
            else allocate(request, num_new_tokens, **kwargs)
        )

    manager.allocate_slots = picky  # type: ignore[method-assign]
    scheduler.add_request(make_request("1", list(range(64)), max_tokens=1))
    assert scheduler.schedule().num_scheduled_tokens == {"1": 64}
    assert calls == [(16, 48), (64, 0)]


# ---------------------------------------------------------------- DeepSeek-V4's manager


def test_non_final_chunks_end_on_a_multiple_of_128() -> None:
    scheduler = make_v4_scheduler(300, max_num_batched_tokens=200, max_model_len=600)
    scheduler.add_request(make_request("0", 450, block_size=32))
    executor = executor_of(scheduler)
    sizes = []
    for _ in range(4):
        output = scheduler.schedule()
        sizes.append(output.num_scheduled_tokens["0"])
        scheduler.update_from_output(output, executor.execute(output))
    assert sizes == [128, 128, 194, 1]


def test_a_chunk_behind_a_hit_ends_on_a_multiple_of_128_too() -> None:
    scheduler = make_v4_scheduler(300, max_num_batched_tokens=200, max_model_len=600)
    executor = executor_of(scheduler)
    prompt = list(range(1, 451))
    scheduler.add_request(make_request("0", prompt[:100], max_tokens=1, block_size=32))
    run_all(scheduler, executor)
    scheduler.add_request(make_request("1", prompt, max_tokens=1, block_size=32))
    output = scheduler.schedule()
    start = output.scheduled_new_reqs[0].num_computed_tokens
    assert start == 96
    assert start + output.num_scheduled_tokens["1"] == 256
    assert output.kv_cache_block_copies or output.window_tables
    executor.execute(output)


def test_a_budget_below_128_is_no_wedge() -> None:
    scheduler = make_v4_scheduler(300, max_num_batched_tokens=50, max_model_len=600)
    executor = executor_of(scheduler, a=[1, 2], b=[3, 4])
    scheduler.add_request(make_request("a", 300, max_tokens=2, block_size=32))
    scheduler.add_request(make_request("b", 200, max_tokens=2, block_size=32))
    assert run_all(scheduler, executor, max_steps=60) == {"a": [1, 2], "b": [3, 4]}


def test_a_prompt_that_needs_more_budget_is_not_passed() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=140)
    scheduler.add_request(make_request("short", 4))
    scheduler.schedule()
    scheduler.kv_cache_manager.coordinator.chunk_end = Mock(return_value=0)  # type: ignore[method-assign]
    scheduler.add_request(make_request("long", 400))
    scheduler.add_request(make_request("late", 4))
    scheduler.requests["short"].append_output_token_ids(1)
    assert scheduler.schedule().num_scheduled_tokens == {"short": 1}


def test_window_tables_and_copies_reach_the_message() -> None:
    scheduler = make_v4_scheduler(300, max_model_len=600)
    executor = executor_of(scheduler)
    scheduler.add_request(make_request("0", [1] * 200, max_tokens=1, block_size=32))
    output = scheduler.schedule()
    assert set(output.window_tables) == {"0"}
    scheduler.update_from_output(output, executor.execute(output))
    scheduler.add_request(make_request("1", [1] * 180 + [2] * 20, max_tokens=1, block_size=32))
    scheduler.add_request(make_request("2", [1] * 200, max_tokens=1, block_size=32))
    output = scheduler.schedule()
    assert output.kv_cache_block_copies
    executor.execute(output)
    assert output.scheduled_new_reqs[1].num_computed_tokens == 192


# ---------------------------------------------------------------- stopping, aborting


def test_tokens_after_a_stop_are_cut() -> None:
    scheduler = make_scheduler(num_speculative_tokens=3)
    scheduler.add_request(make_request("0", 10, params={"stop_token_ids": [42]}))
    output = scheduler.schedule()
    bundles = scheduler.update_from_output(output, answer(output, {"0": [1, 42, 3]}))
    item = outputs_by_request(bundles)["0"]
    assert item.new_token_ids == [1, 42]
    assert item.finish_reason is FinishReason.STOP
    assert item.stop_reason == 42
    assert not scheduler.running
    assert not scheduler.has_unfinished_requests()
    assert scheduler.has_requests()  # the workers must hear of it
    assert scheduler.schedule().finished_req_ids == {"0"}
    assert not scheduler.has_requests()


def test_eos_and_length() -> None:
    scheduler = make_scheduler()
    executor = executor_of(scheduler, a=[1, EOS], b=[1, 2, 3, 4])
    scheduler.add_request(make_request("a", 5))
    scheduler.add_request(make_request("b", 5, max_tokens=3))
    assert run_all(scheduler, executor) == {"a": [1, EOS], "b": [1, 2, 3]}


def test_the_model_length_ends_a_request() -> None:
    scheduler = make_scheduler(max_model_len=20, max_num_batched_tokens=64)
    executor = executor_of(scheduler)
    scheduler.add_request(make_request("0", 15, max_tokens=100))
    assert len(run_all(scheduler, executor)["0"]) == 5


def enter(scheduler: Scheduler, executor: FakeExecutor, state: str) -> None:
    """Bring request 0 into a state."""
    if state != "waiting":
        step(scheduler, executor)
    if state == "preempted":
        scheduler.reset_prefix_cache(reset_running_requests=True)


@pytest.mark.parametrize("state", ["waiting", "prefill", "decode", "preempted", "grammar"])
def test_abort_in_every_state(state: str) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=32, include_finished_set=True)
    executor = executor_of(scheduler)
    params: dict[str, Any] = {}
    if state == "grammar":
        params["structured_outputs"] = StructuredOutputsParams(regex="a*")
    request = make_request("0", 60 if state == "prefill" else 20, params=params, client_index=2)
    scheduler.add_request(request)
    enter(scheduler, executor, state)
    expected = {
        "waiting": RequestStatus.WAITING,
        "preempted": RequestStatus.PREEMPTED,
        "grammar": RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR,
    }.get(state, RequestStatus.RUNNING)
    assert request.status is expected
    assert scheduler.finish_requests("0", RequestStatus.FINISHED_ABORTED) == [("0", 2)]
    assert scheduler.finish_requests("0", RequestStatus.FINISHED_ABORTED) == []
    assert scheduler.get_num_unfinished_requests() == 0
    assert not scheduler.requests
    assert all_blocks_free(scheduler)
    assert not scheduler._inflight_prefills
    output = scheduler.schedule()
    assert output.finished_req_ids == {"0"}
    bundles = scheduler.update_from_output(output, executor.execute(output))
    assert bundles[2].finished_requests == {"0"}


def test_abort_while_the_step_runs() -> None:
    scheduler = make_scheduler()
    for i in range(3):
        scheduler.add_request(make_request(f"{i}", 10))
    output = scheduler.schedule()
    assert scheduler.finish_requests(["0", "2", "x"], RequestStatus.FINISHED_ABORTED) == [
        ("0", 0),
        ("2", 0),
    ]
    bundles = scheduler.update_from_output(output, answer(output, {k: [1] for k in "012"}))
    assert set(outputs_by_request(bundles)) == {"1"}
    assert scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED) == [("1", 0)]
    assert all_blocks_free(scheduler)


def test_clients_get_their_own_outputs() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("0", 10, client_index=4))
    scheduler.add_request(make_request("1", 10, client_index=7))
    output = scheduler.schedule()
    bundles = scheduler.update_from_output(output, answer(output, {"0": [1], "1": [2]}))
    assert {client: [o.request_id for o in b.outputs] for client, b in bundles.items()} == {
        4: ["0"],
        7: ["1"],
    }
    assert [b.scheduler_stats is not None for b in bundles.values()] == [True, False]


def test_a_preempted_request_still_gets_its_token() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("0", 10, max_tokens=1))
    output = scheduler.schedule()
    request = scheduler.running.pop()
    scheduler._get_holdings().preempt(request, 0.0)
    bundles = scheduler.update_from_output(output, answer(output, {"0": [1]}))
    item = outputs_by_request(bundles)["0"]
    assert item.new_token_ids == [1]
    assert item.finish_reason is FinishReason.LENGTH
    assert not scheduler.waiting
    assert all_blocks_free(scheduler)


def test_tokens_of_a_mere_chunk_are_taken() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=16)
    scheduler.add_request(make_request("0", 40))
    output = scheduler.schedule()
    bundles = scheduler.update_from_output(output, answer(output, {"0": [9]}))
    assert outputs_by_request(bundles)["0"].new_token_ids == [9]


def test_an_empty_step_reports_statistics_to_client_0() -> None:
    scheduler = make_scheduler()
    output = scheduler.schedule()
    bundles = scheduler.update_from_output(output, ModelRunnerOutput([], {}))
    stats = bundles[0].scheduler_stats
    assert stats is not None
    assert (stats.num_running_reqs, stats.num_waiting_reqs) == (0, 0)
    quiet = make_scheduler(log_stats=False)
    output = quiet.schedule()
    assert quiet.update_from_output(output, ModelRunnerOutput([], {})) == {}


def test_statistics() -> None:
    scheduler = make_scheduler(num_blocks=11, max_num_seqs=1)
    scheduler.add_request(make_request("0", 80))
    scheduler.add_request(make_request("1", 10))
    grammar = StructuredOutputsParams(regex="a*")
    scheduler.add_request(make_request("2", 10, params={"structured_outputs": grammar}))
    output = scheduler.schedule()
    bundles = scheduler.update_from_output(output, answer(output, {"0": [1]}))
    stats = bundles[0].scheduler_stats
    assert stats is not None
    assert stats.num_running_reqs == 1
    assert stats.num_waiting_reqs == 1
    assert stats.num_skipped_waiting_reqs == 1
    assert stats.kv_cache_usage == pytest.approx(0.5)
    assert stats.prefix_cache_stats.queries == 80
    assert stats.spec_decoding_stats is None


# ---------------------------------------------------------------- drafts


@pytest.mark.parametrize(
    ("drafts", "sampled", "computed", "accepted"),
    [([1, 2, 3], [1, 2, 3, 4], 14, 3), ([1, 2, 3], [1, 5], 12, 1), ([1], [9], 11, 0)],
)
def test_draft_accounting(
    drafts: list[int], sampled: list[int], computed: int, accepted: int
) -> None:
    scheduler = make_scheduler(num_speculative_tokens=3)
    scheduler.add_request(make_request("0", 10))
    output = scheduler.schedule()
    scheduler.update_from_output(output, answer(output, {"0": [0]}))
    scheduler.update_draft_token_ids(DraftTokenIds(["0"], [drafts]))
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"0": 1 + len(drafts)}
    assert output.scheduled_spec_decode_tokens == {"0": drafts}
    bundles = scheduler.update_from_output(output, answer(output, {"0": sampled}))
    request = scheduler.requests["0"]
    assert request.num_computed_tokens == computed
    assert request.num_tokens == computed + 1
    told = outputs_by_request(bundles)["0"]
    assert (told.num_draft_tokens, told.num_accepted_tokens) == (len(drafts), accepted)
    assert bundles[0].scheduler_stats is not None
    stats = bundles[0].scheduler_stats.spec_decoding_stats
    assert stats is not None
    assert (stats.num_drafts, stats.num_draft_tokens) == (1, len(drafts))
    assert stats.num_accepted_tokens == accepted
    assert stats.num_accepted_tokens_per_pos == [int(i < accepted) for i in range(3)]
    assert request.spec_token_ids == []


def test_drafts_are_cut_to_the_budget_and_to_the_model_length() -> None:
    scheduler = make_scheduler(
        num_speculative_tokens=4, max_model_len=14, max_num_batched_tokens=64
    )
    scheduler.add_request(make_request("0", 10))
    output = scheduler.schedule()
    scheduler.update_from_output(output, answer(output, {"0": [0]}))
    scheduler.update_draft_token_ids(DraftTokenIds(["0"], [[1, 2, 3, 4]]))
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"0": 3}
    assert output.scheduled_spec_decode_tokens == {"0": [1, 2]}


@pytest.mark.parametrize(("max_tokens", "drafted"), [(5, [1, 2, 3]), (3, [1]), (2, [])])
def test_no_more_is_drafted_than_the_request_may_say(max_tokens: int, drafted: list[int]) -> None:
    scheduler = make_scheduler(num_speculative_tokens=4)
    scheduler.add_request(make_request("0", 10, max_tokens=max_tokens))
    output = scheduler.schedule()
    scheduler.update_from_output(output, answer(output, {"0": [0]}))
    scheduler.update_draft_token_ids(DraftTokenIds(["0"], [[1, 2, 3, 4]]))
    output = scheduler.schedule()
    assert output.scheduled_spec_decode_tokens.get("0", []) == drafted


def test_drafts_do_not_preempt_anybody() -> None:
    """The block that a guess would need goes to nobody, and the request goes on without it."""
    # Two of 32 tokens each, and the null block.
    scheduler = make_scheduler(num_blocks=5, block_size=16, num_speculative_tokens=4)
    for name in ("0", "1"):
        scheduler.add_request(make_request(name, 28))
    output = scheduler.schedule()
    scheduler.update_from_output(output, answer(output, {"0": [0], "1": [0]}))
    scheduler.update_draft_token_ids(DraftTokenIds(["0", "1"], [[1, 2, 3, 4], [5]]))
    output = scheduler.schedule()
    assert not output.preempted_req_ids
    assert output.num_scheduled_tokens == {"0": 1, "1": 2}
    assert output.scheduled_spec_decode_tokens == {"1": [5]}
    assert scheduler.requests["0"].spec_token_ids == []


def test_drafts_of_chunks_and_strangers_are_ignored() -> None:
    scheduler = make_scheduler(num_speculative_tokens=2, max_num_batched_tokens=16)
    scheduler.add_request(make_request("0", 40))
    scheduler.schedule()
    scheduler.update_draft_token_ids(DraftTokenIds(["0", "x"], [[1], [2]]))
    assert scheduler.requests["0"].spec_token_ids == []


def test_no_sampled_token_is_no_crash() -> None:
    scheduler = make_scheduler(num_speculative_tokens=2)
    scheduler.add_request(make_request("0", 10))
    output = scheduler.schedule()
    scheduler.update_from_output(output, answer(output, {"0": [0]}))
    scheduler.update_draft_token_ids(DraftTokenIds(["0"], [[1, 2]]))
    output = scheduler.schedule()
    bundles = scheduler.update_from_output(output, answer(output, {"0": []}))
    assert bundles[0].outputs == []
    assert bundles[0].scheduler_stats is not None
    assert bundles[0].scheduler_stats.spec_decoding_stats is None


# ---------------------------------------------------------------- log probabilities


def test_logprobs_follow_the_accepted_tokens() -> None:
    scheduler = make_scheduler(num_speculative_tokens=2)
    scheduler.add_request(
        make_request("0", 10, params={"logprobs": 1, "stop_token_ids": [42]}),
    )
    scheduler.add_request(make_request("1", 10))
    output = scheduler.schedule()
    result = answer(output, {"0": [1, 42, 7], "1": [3]})
    result.logprobs = LogprobsLists(
        np.array([[1, 8], [42, 9], [7, 1], [3, 4]]), np.zeros((4, 2)), np.arange(4), [0, 3, 4]
    )
    items = outputs_by_request(scheduler.update_from_output(output, result))
    rows = items["0"].new_logprobs
    assert rows is not None
    assert rows.token_ids == [[1, 8], [42, 9]]
    assert rows.ranks == [0, 1]
    assert items["1"].new_logprobs is None


def test_prompt_logprobs_of_a_chunk_make_an_output() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=16)
    scheduler.add_request(make_request("0", 20, params={"prompt_logprobs": 0}))
    output = scheduler.schedule()
    result = answer(output, {})
    result.prompt_logprobs_dict = {
        "0": (np.array([[5], [6]]), np.zeros((2, 1)), np.array([1, 1])),
    }
    item = outputs_by_request(scheduler.update_from_output(output, result))["0"]
    assert item.new_token_ids == []
    assert item.new_prompt_logprobs is not None
    assert item.new_prompt_logprobs.token_ids == [[5], [6]]


# ---------------------------------------------------------------- grammars


def test_grammar_requests_wait_and_are_passed() -> None:
    scheduler = make_scheduler()
    grammar = StructuredOutputsParams(regex="a*")
    blocked = [make_request(f"g{i}", 10, params={"structured_outputs": grammar}) for i in range(2)]
    for request in blocked:
        scheduler.add_request(request)
    scheduler.add_request(make_request("0", 10))
    assert set(scheduler.schedule().num_scheduled_tokens) == {"0"}
    assert names(scheduler.skipped_waiting) == ["g0", "g1"]
    for request in blocked:
        assert request.structured_output_request is not None
        request.structured_output_request.grammar = Mock()
    output = scheduler.schedule()
    assert list(output.num_scheduled_tokens)[-2:] == ["g0", "g1"]
    assert output.has_structured_output_requests


def bare(cls: type[Scheduler], request: Request, free: Callable[..., Any]) -> Scheduler:
    """A scheduler as outsiders build it: without __init__."""
    scheduler = object.__new__(cls)
    attributes: dict[str, Any] = {
        "perf_metrics": None,
        "connector": None,
        "structured_output_manager": Mock(),
        "requests": {request.request_id: request},
        "running": [request],
        "waiting": Mock(),
        "kv_cache_manager": Mock(take_events=Mock(return_value=None)),
        "kv_event_publisher": Mock(),
        "finished_req_ids": set(),
        "finished_req_ids_dict": None,
        "vllm_config": Mock(),
        "enable_return_routed_experts": False,
        "recompute_kv_load_failures": False,
        "make_stats": Mock(return_value=None),
        "max_model_len": 100,
        "_free_request": free,
    }
    for name, value in attributes.items():
        setattr(scheduler, name, value)
    return scheduler


def decode_step(request: Request) -> SchedulerOutput:
    output = SchedulerOutput.make_empty()
    output.scheduled_cached_reqs = CachedRequestData.make_empty()
    output.num_scheduled_tokens = {request.request_id: 1}
    output.total_num_scheduled_tokens = 1
    return output


@pytest.mark.parametrize("cls", [Scheduler, AsyncScheduler])
@pytest.mark.parametrize("accepts", [True, False])
def test_a_bare_scheduler_updates_and_a_refusing_grammar_ends_the_request(
    cls: type[Scheduler], accepts: bool
) -> None:
    request = make_request("0", 4)
    request.status = RequestStatus.RUNNING
    request.num_computed_tokens = 4
    request.num_output_placeholders = 1
    request.resumable = True
    grammar = Mock(accept_tokens=Mock(return_value=accepts))
    request.structured_output_request = SimpleNamespace(grammar=grammar)  # type: ignore[assignment]
    free = Mock(return_value=None)
    scheduler = bare(cls, request, free)
    output = decode_step(request)
    bundles = scheduler.update_from_output(output, answer(output, {"0": [3]}))
    item = bundles[0].outputs[0]
    assert item.new_token_ids == [3]
    grammar.accept_tokens.assert_called_once_with("0", [3])
    if accepts:
        assert item.finish_reason is None
        assert scheduler.running == [request]
        free.assert_not_called()
    else:
        assert item.finish_reason is FinishReason.ERROR
        assert request.status is RequestStatus.FINISHED_ERROR
        assert request.resumable is False
        assert scheduler.running == []
        free.assert_called_once_with(request)


def test_events_are_published() -> None:
    scheduler = make_scheduler()
    scheduler.kv_event_publisher = Mock()
    scheduler.kv_cache_manager.take_events = Mock(return_value=["event"])  # type: ignore[method-assign]
    scheduler.connector = Mock(take_events=Mock(return_value=iter(["the connector's"])))
    scheduler.schedule()
    (batch,) = scheduler.kv_event_publisher.publish.call_args.args
    assert batch.events == ["event", "the connector's"]


def test_invariants_are_checked_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for wanted in (False, True):
        monkeypatch.setenv("VLLM_CHECK_INVARIANTS", str(int(wanted)))
        scheduler = make_scheduler()
        scheduler.kv_cache_manager.check_invariants = check = Mock()  # type: ignore[method-assign]
        scheduler.add_request(make_request("0", 20))
        scheduler.schedule()
        assert check.call_args_list == ([call({"0": 20})] if wanted else [])


@pytest.mark.parametrize("has_connector", [False, True])
def test_shutdown_ends_the_publisher_and_the_connector(has_connector: bool) -> None:
    scheduler = make_scheduler()
    scheduler.kv_event_publisher = publisher = Mock()
    scheduler.connector = connector = Mock() if has_connector else None
    scheduler.shutdown()
    publisher.shutdown.assert_called_once_with()
    if connector is not None:
        connector.shutdown.assert_called_once_with()


def test_a_connectors_own_loads_begin_when_all_is_admitted() -> None:
    scheduler = make_scheduler()
    scheduler.connector = connector = Mock()
    connector.get_num_new_matched_tokens.return_value = (0, False)
    connector.hooks.explain_admission.return_value = None
    connector.take_events.return_value = ()
    connector.hooks.begin_own_loads.side_effect = lambda: order.append(len(scheduler.running))
    order: list[int] = []
    scheduler.add_request(make_request("0", 10))
    scheduler.schedule()
    assert order == [1]


def test_a_request_that_the_connector_refuses_was_never_there() -> None:
    scheduler = make_scheduler()
    scheduler.connector = Mock()
    scheduler.connector.on_new_request.side_effect = ValueError("no such peer")
    with pytest.raises(ValueError, match="no such peer"):
        scheduler.add_request(make_request("0", 10))
    assert scheduler.get_num_unfinished_requests() == 0
    assert not scheduler.requests


def test_steps_go_on_while_the_connector_has_work() -> None:
    scheduler = make_scheduler()
    scheduler.connector = connector = Mock()
    connector.hooks.has_pending_work.return_value = True
    assert scheduler.has_requests()
    connector.hooks.has_pending_work.return_value = False
    assert not scheduler.has_requests()
