"""What is made beside the steps: who waits, who passes, and what becomes of room."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from tests.v1.core.sched.builders import answer, make_request, make_scheduler
from tests.v1.core.sched.test_encoder_inputs import request_with
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.sched.encoder_inputs import EncoderPlanner
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.sched.tower_orders import TowerOrders
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus


def seeing(room: int = 64, **fields: Any) -> Scheduler:
    """A scheduler whose items are made beside the steps."""
    scheduler = make_scheduler(max_num_batched_tokens=64, **fields)
    scheduler._encoder = EncoderPlanner(
        EncoderCacheManager(room, Request.encoder_key), compute_budget=64, orders=TowerOrders()
    )
    return scheduler


def step(
    scheduler: Scheduler,
    made: Iterable[tuple[str, bool]] = (),
    seconds: Mapping[str, float] = MappingProxyType({}),
) -> SchedulerOutput:
    """Run a step whose worker reports what was made by its end, and for how long towers ran."""
    output = scheduler.schedule()
    result: ModelRunnerOutput = answer(output, {})
    result.made_pictures, result.tower_s = list(made), dict(seconds)
    scheduler.update_from_output(output, result)
    assert scheduler._encoder.cache.find_faults() == []
    return output


def test_the_text_before_an_item_is_computed_while_it_is_made() -> None:
    scheduler = seeing()
    scheduler.add_request(request_with(("a", 20, 30), num_tokens=60))
    first = step(scheduler)
    assert [order.key for order in first.tower_orders] == ["a"]
    assert (first.num_scheduled_tokens, first.scheduled_encoder_inputs) == ({"0": 20}, {})
    idle = step(scheduler, [("a", True)])
    assert (idle.num_scheduled_tokens, idle.tower_orders) == ({}, [])
    assert step(scheduler).num_scheduled_tokens == {"0": 40}


def test_others_pass_a_request_that_waits_and_it_is_not_refused() -> None:
    scheduler = seeing()
    scheduler.add_request(request_with(("a", 0, 30), num_tokens=40))
    scheduler.add_request(make_request("1", 10))
    assert step(scheduler).num_scheduled_tokens == {"1": 10}
    scheduler.finish_requests("1", RequestStatus.FINISHED_ABORTED)
    # Alone, with every block free: it waits for no room.
    for _ in range(3):
        assert step(scheduler).num_scheduled_tokens == {}
    step(scheduler, [("a", True)])
    assert step(scheduler).num_scheduled_tokens == {"0": 40}


def test_an_item_is_made_while_its_prompt_waits_for_a_step_of_its_own() -> None:
    scheduler = seeing(joint_prompt_tokens=8)
    scheduler.add_request(make_request("1", 30))
    scheduler.add_request(request_with(("a", 10, 20), num_tokens=40))
    first = step(scheduler)
    assert (first.num_scheduled_tokens, len(first.tower_orders)) == ({"1": 30}, 1)
    assert step(scheduler, [("a", True)]).num_scheduled_tokens == {"0": 10}
    assert step(scheduler).num_scheduled_tokens == {"0": 30}


def test_two_requests_wait_for_one_item() -> None:
    scheduler = seeing()
    for name in "01":
        scheduler.add_request(request_with(("a", 0, 20), num_tokens=25, name=name))
    assert len(step(scheduler).tower_orders) == 1
    scheduler.finish_requests("0", RequestStatus.FINISHED_ABORTED)
    assert step(scheduler, [("a", True)]).dropped_orders == []
    assert step(scheduler).num_scheduled_tokens == {"1": 25}


def test_an_abort_gives_an_item_up_and_a_later_request_has_it_made_again() -> None:
    scheduler = seeing()
    scheduler.add_request(request_with(("a", 0, 40), num_tokens=50))
    step(scheduler)
    scheduler.finish_requests("0", RequestStatus.FINISHED_ABORTED)
    scheduler.add_request(request_with(("a", 0, 40), num_tokens=50, name="1"))
    assert step(scheduler).dropped_orders == ["a"]
    # The worker gave it up before it heard of the other one.
    step(scheduler, [("a", False)])
    assert [order.key for order in step(scheduler).tower_orders] == ["a"]
    step(scheduler, [("a", True)])
    assert step(scheduler).num_scheduled_tokens == {"1": 50}


def test_items_that_do_not_fit_together_are_made_in_turn() -> None:
    scheduler = seeing(room=40)
    scheduler.add_request(request_with(("a", 0, 30), ("b", 30, 30), num_tokens=64))
    scheduler.add_request(request_with(("c", 0, 30), num_tokens=35, name="1"))
    made: list[str] = []
    done: dict[str, int] = {"0": 0, "1": 0}
    for _ in range(12):
        output = step(scheduler, [(key, True) for key in made])
        made = [order.key for order in output.tower_orders]
        for name, count in output.num_scheduled_tokens.items():
            done[name] += count
    assert done == {"0": 64, "1": 35}


def test_each_item_of_a_request_is_counted_once() -> None:
    scheduler = seeing()
    scheduler.log_stats = False  # statistics would drain the counts
    scheduler.add_request(request_with(("a", 0, 20), ("a", 20, 20), num_tokens=45))
    step(scheduler)
    step(scheduler, [("a", True)], {"a": 1.5, "gone": 0.25})
    assert scheduler._requests.by_id["0"].encoder_s == 1.5
    step(scheduler)
    scheduler.add_request(request_with(("a", 0, 20), ("b", 20, 10), num_tokens=45, name="1"))
    for made in ((), [("b", True)], ()):
        step(scheduler, made)
    assert scheduler._encoder.counts.take() == (3, 1, 1.75)
    assert scheduler._encoder.counts.take() == (0, 0, 0.0)
    for name in "01":
        scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
    assert scheduler._encoder.counts._counted == {}
