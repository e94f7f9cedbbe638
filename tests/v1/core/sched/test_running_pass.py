"""Where chunks end, and who is held back for it."""

from unittest.mock import Mock

from tests.v1.core.sched.builders import answer, make_request, make_scheduler, make_v4_scheduler
from vllm.v1.core.sched.running_pass import RunningPass
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.sched.step_builder import StepBuilder, fit_chunk


def run(scheduler: Scheduler, step: StepBuilder) -> StepBuilder:
    RunningPass(scheduler._get_holdings(), scheduler.limits, step).run()
    return step


def busy_step(budget: int) -> StepBuilder:
    step = StepBuilder(budget, 0)
    step.num_scheduled_tokens["other"] = 1
    return step


def test_fit_chunk_counts_from_the_hit() -> None:
    scheduler = make_v4_scheduler(300, max_model_len=600)
    request = make_request("0", 500, block_size=32)
    for start, wanted, expected in (
        (0, 500, 500),  # the whole prompt
        (0, 300, 256),
        (96, 300, 288),  # up to 384
        (96, 404, 404),  # to the end
        (96, 40, 32),  # up to 128
        (160, 31, 31),  # none in reach
        (499, 1, 1),  # a decode step
    ):
        assert (
            fit_chunk(scheduler.kv_cache_manager, busy_step(500), request, start, wanted)
            == expected
        )


def test_a_manager_may_ask_to_wait_for_budget() -> None:
    scheduler = make_scheduler()
    scheduler.kv_cache_manager.coordinator.chunk_end = Mock(return_value=0)  # type: ignore[method-assign]
    request = make_request("0", 500)
    assert fit_chunk(scheduler.kv_cache_manager, busy_step(500), request, 0, 31) == 0
    # Alone, it would wait for ever.
    assert fit_chunk(scheduler.kv_cache_manager, StepBuilder(500, 0), request, 0, 31) == 31


def test_fit_chunk_leaves_the_contracts_manager_alone() -> None:
    scheduler = make_scheduler()
    request = make_request("0", 500)
    assert fit_chunk(scheduler.kv_cache_manager, busy_step(500), request, 0, 77) == 77


def test_a_waiting_prefill_holds_admission() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=200)
    scheduler.add_request(make_request("0", 500))
    scheduler.schedule()
    scheduler.kv_cache_manager.coordinator.chunk_end = Mock(return_value=0)  # type: ignore[method-assign]
    step = run(scheduler, busy_step(60))
    assert step.holds_admission
    assert step.running == []
    scheduler.kv_cache_manager.coordinator.chunk_end = Mock(return_value=32)  # type: ignore[method-assign]
    step = run(scheduler, busy_step(60))
    assert not step.holds_admission
    assert step.num_scheduled_tokens["0"] == 32


def test_who_has_nothing_to_compute_does_not_hold_up_those_behind() -> None:
    scheduler = make_scheduler(use_async=True)
    scheduler.add_request(make_request("done", 10, 1))
    scheduler.add_request(make_request("goes on", 12, 5))
    scheduler.schedule()
    # The only token of the first is on its way.
    step = run(scheduler, StepBuilder(100, 0))
    assert step.num_scheduled_tokens == {"goes on": 1}
    assert not step.holds_admission


def test_all_who_run_are_scheduled_whatever_they_do() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=100)
    for name, num_tokens in (("0", 10), ("1", 12), ("2", 150)):
        scheduler.add_request(make_request(name, num_tokens))
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"0": 10, "1": 12, "2": 78}
    scheduler.update_from_output(output, answer(output, {"0": [5], "1": [6]}))
    # Two decode steps and a chunk, then a chunk before a decode step.
    assert run(scheduler, StepBuilder(100, 0)).num_scheduled_tokens == {"0": 1, "1": 1, "2": 72}
    scheduler.running.reverse()
    assert run(scheduler, StepBuilder(100, 0)).num_scheduled_tokens == {"0": 1, "1": 1, "2": 72}


def test_room_that_preemption_made_is_for_those_who_run() -> None:
    scheduler = make_scheduler(num_blocks=5, policy="priority")
    for priority, name in enumerate(("0", "1"), start=1):
        scheduler.add_request(make_request(name, 32, priority=priority))
    output = scheduler.schedule()
    scheduler.update_from_output(output, answer(output, {"0": [5], "1": [5]}))
    # It would come first, and fit into what is left of the victim's blocks.
    scheduler.add_request(make_request("2", 10))
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"0": 1}
    assert [request.request_id for request in scheduler.waiting] == ["2", "1"]
    scheduler.update_from_output(output, answer(output, {"0": [5]}))
    assert scheduler.schedule().num_scheduled_tokens == {"0": 1, "2": 10}
