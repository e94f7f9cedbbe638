"""How waiting requests are admitted: whom the pass asks, and what is counted."""

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

from tests.v1.core.sched.builders import (
    all_blocks_free,
    answer,
    make_request,
    make_scheduler,
    run_all,
)
from tests.v1.core.sched.fake_executor import FakeExecutor, scripted
from vllm.config import KVTransferConfig
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, Request
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus


def make_with_prefix(**kwargs: Any) -> Scheduler:
    """Return a scheduler that has 48 tokens of 7 cached."""
    scheduler = make_scheduler(**kwargs)
    scheduler.add_request(make_request("first", [7] * 48, max_tokens=1))
    executor = FakeExecutor(scheduler.kv_cache_config, scripted({}), scheduler.kv_cache_manager)
    run_all(scheduler, executor)
    assert all_blocks_free(scheduler)
    return scheduler


def test_wrapped_methods_of_the_manager_see_every_admission() -> None:
    scheduler = make_with_prefix()
    manager = scheduler.kv_cache_manager
    looked_up = Mock(side_effect=manager.get_computed_blocks)
    allocate_slots = manager.allocate_slots

    def allocate(
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_encoder_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
    ) -> Any:
        """Take the interface's parameters, and no others."""
        return allocate_slots(request, num_new_tokens, num_new_computed_tokens, new_computed_blocks)

    allocated = Mock(side_effect=allocate)
    manager.get_computed_blocks = looked_up  # type: ignore[method-assign]
    manager.allocate_slots = allocated  # type: ignore[method-assign]
    request = make_request("0", [7] * 48)
    scheduler.add_request(request)
    assert scheduler.schedule().num_scheduled_tokens == {"0": 16}
    looked_up.assert_called_once_with(request)
    hit = allocated.call_args.kwargs
    assert hit["num_new_computed_tokens"] == 32
    assert hit["new_computed_blocks"].get_block_ids() == ([1, 2],)


def test_replaced_get_computed_blocks_decides_what_a_hit_is() -> None:
    scheduler = make_with_prefix()
    manager = scheduler.kv_cache_manager
    nothing = (manager.empty_kv_cache_blocks, 0)
    manager.get_computed_blocks = Mock(return_value=nothing)  # type: ignore[method-assign]
    scheduler.add_request(make_request("0", [7] * 48))
    assert scheduler.schedule().num_scheduled_tokens == {"0": 48}


def test_a_connector_that_had_nothing_is_counted_although_the_hit_is_dropped() -> None:
    scheduler = make_with_prefix(
        kv_transfer_config=KVTransferConfig(
            kv_connector="ScriptedConnector",
            kv_role="kv_both",
            kv_connector_module_path="tests.v1.core.sched.scripted_connector",
        )
    )
    scheduler.make_stats()
    manager = scheduler.kv_cache_manager
    allocate = manager.allocate_slots

    def without_hits(request: Request, num_new_tokens: int, **kwargs: Any) -> Any:
        has_hit = kwargs["num_new_computed_tokens"] > 0
        return None if has_hit else allocate(request, num_new_tokens, **kwargs)

    manager.allocate_slots = without_hits  # type: ignore[method-assign]
    scheduler.add_request(make_request("0", [7] * 48))
    assert scheduler.schedule().num_scheduled_tokens == {"0": 48}
    stats = scheduler.make_stats()
    assert stats is not None
    own, connector = stats.prefix_cache_stats, stats.connector_prefix_cache_stats
    assert own is not None
    assert connector is not None
    # Nothing was hit locally, so all was asked of the connector.
    assert (own.requests, own.queries, own.hits) == (1, 48, 0)
    assert (connector.requests, connector.queries, connector.hits) == (1, 48, 0)


def test_a_first_chunk_takes_no_slots_for_drafts() -> None:
    scheduler = make_scheduler(num_speculative_tokens=3)
    scheduler.limits = replace(scheduler.limits, num_lookahead_tokens=3)
    manager = scheduler.kv_cache_manager
    allocated = Mock(side_effect=manager.allocate_slots)
    manager.allocate_slots = allocated  # type: ignore[method-assign]
    scheduler.add_request(make_request("0", 20))
    scheduler.schedule()
    assert allocated.call_args.kwargs["num_lookahead_tokens"] == 0


def test_who_was_preempted_comes_back_only_if_all_of_it_fits() -> None:
    scheduler = make_scheduler(
        num_blocks=8,
        max_num_batched_tokens=32,
        enable_prefix_caching=False,
        scheduler_reserve_full_isl=False,
    )
    scheduler.add_request(make_request("0", 32))
    scheduler.add_request(make_request("1", 96))
    for _ in range(5):
        output = scheduler.schedule()
        scheduler.update_from_output(output, answer(output, {"0": [5]}))
    # Six blocks do not fit beside the other request's three; a chunk's two would.
    assert scheduler.requests["1"].num_preemptions == 1
    assert output.num_scheduled_tokens == {"0": 1}
    scheduler.finish_requests("0", RequestStatus.FINISHED_ABORTED)
    assert list(scheduler.schedule().num_scheduled_tokens) == ["1"]


def schedule(scheduler: Scheduler) -> dict[str, int]:
    """Run a step, in which whose prompt is done gets a token; return the tokens scheduled."""
    output = scheduler.schedule()
    requests = scheduler.requests
    done = [i for i in output.num_scheduled_tokens if not requests[i].is_prefill_chunk]
    scheduler.update_from_output(output, answer(output, {i: [5] for i in done}))
    return output.num_scheduled_tokens


def test_prompts_that_are_too_long_together_are_computed_one_after_another() -> None:
    """The first of three is answered after its own step, and goes on beside the others."""
    scheduler = make_scheduler(joint_prompt_tokens=256, max_num_batched_tokens=1000)
    for name, length in (("long", 400), ("a", 130), ("b", 126), ("c", 1)):
        scheduler.add_request(make_request(name, length))
    assert schedule(scheduler) == {"long": 400}
    assert schedule(scheduler) == {"long": 1, "a": 130, "b": 126}
    assert schedule(scheduler) == {"long": 1, "a": 1, "b": 1, "c": 1}


def test_the_end_of_a_prompt_leaves_room_for_others_in_its_step() -> None:
    scheduler = make_scheduler(joint_prompt_tokens=256, max_num_batched_tokens=1000)
    scheduler.add_request(make_request("long", 1200))
    scheduler.add_request(make_request("a", 56))
    scheduler.add_request(make_request("b", 16))
    assert schedule(scheduler) == {"long": 1000}
    assert schedule(scheduler) == {"long": 200, "a": 56}
    assert schedule(scheduler) == {"long": 1, "a": 1, "b": 16}


def test_answers_take_no_room_from_prompts() -> None:
    scheduler = make_scheduler(joint_prompt_tokens=8, max_num_batched_tokens=1000)
    for i in range(12):
        scheduler.add_request(make_request(f"{i}", 4))
    while scheduler.get_request_counts()[1]:
        schedule(scheduler)
    scheduler.add_request(make_request("last", 8))
    assert schedule(scheduler) == {**{f"{i}": 1 for i in range(12)}, "last": 8}


def test_a_prompt_makes_way_once_for_those_that_pass_it() -> None:
    scheduler = make_scheduler(joint_prompt_tokens=8, policy="priority")
    scheduler.add_request(make_request("long", 400, priority=1))
    scheduler.add_request(make_request("0", 4))
    assert schedule(scheduler) == {"0": 4}
    scheduler.add_request(make_request("1", 4))
    assert schedule(scheduler) == {"0": 1, "1": 4, "long": 400}


def test_a_prompt_waits_for_all_of_the_one_that_it_made_way_for() -> None:
    scheduler = make_scheduler(joint_prompt_tokens=8, long_prefill_token_threshold=30)
    scheduler.add_request(make_request("first", 90))
    scheduler.add_request(make_request("second", 30))
    for _ in range(3):
        assert schedule(scheduler) == {"first": 30}
    assert schedule(scheduler) == {"first": 1, "second": 30}


def test_who_waits_for_a_step_of_its_own_says_what_it_would_hit() -> None:
    scheduler = make_scheduler(joint_prompt_tokens=256)
    announce = Mock()
    scheduler.kv_cache_manager.announce = announce  # type: ignore[method-assign]
    first, second = make_request("first", 200), make_request("second", 200)
    scheduler.add_request(first)
    scheduler.add_request(second)
    schedule(scheduler)
    announce.assert_called_once_with(second)
