"""Which multimodal items a step encodes."""

from typing import Any
from unittest.mock import Mock

import pytest

from tests.v1.core.sched.builders import answer, make_request, make_scheduler
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem, PlaceholderRange
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager, EncoderDecoderCacheManager
from vllm.v1.core.sched.encoder_inputs import EncoderPlanner
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request


def request_with(*items: tuple[str, int, int], num_tokens: int = 100, name: str = "0") -> Request:
    """Build a request; items are (identifier, offset, length)."""
    features = [
        MultiModalFeatureSpec(
            MultiModalKwargsItem.dummy(), "image", identifier, PlaceholderRange(offset, length)
        )
        for identifier, offset, length in items
    ]
    return make_request(name, num_tokens, mm_features=features)


def planner(size: int = 1000, **kwargs: Any) -> EncoderPlanner:
    fields: dict[str, Any] = {
        "cache": EncoderCacheManager(size),
        "ec_connector": None,
        "is_encoder_decoder": False,
        "disable_chunked_mm_input": False,
        "shift": 0,
    }
    return EncoderPlanner(**{**fields, **kwargs})


def test_items_in_the_range() -> None:
    request = request_with(("a", 0, 20), ("b", 30, 20), ("c", 60, 20))
    for start, count, expected in (
        (0, 100, [0, 1, 2]),
        (0, 30, [0]),
        (0, 31, [0, 1]),
        (20, 10, []),
        (19, 1, [0]),
        (50, 50, [2]),
    ):
        decision = planner().decide(request, start, count, 500)
        assert (decision.compute, decision.num_new_tokens) == (expected, count)
        assert decision.budget == 500 - 20 * len(expected)


def test_the_drafter_reads_ahead() -> None:
    request = request_with(("a", 30, 20))
    assert planner().decide(request, 0, 30, 500).compute == []
    assert planner(shift=1).decide(request, 0, 30, 500).compute == [0]


def test_cached_and_repeated_items_are_not_computed_twice() -> None:
    request = request_with(("a", 0, 20), ("b", 30, 20), ("b", 60, 20))
    plan = planner()
    other = request_with(("a", 0, 20), name="other")
    plan.cache.allocate(other, 0)
    decision = plan.decide(request, 0, 100, 500)
    assert decision.compute == [1]


@pytest.mark.parametrize(("size", "budget"), [(30, 500), (500, 30)])
def test_without_room_or_budget_the_step_ends_before_the_item(size: int, budget: int) -> None:
    request = request_with(("a", 0, 20), ("b", 30, 20))
    plan = planner(size)
    decision = plan.decide(request, 0, 100, budget)
    assert (decision.compute, decision.num_new_tokens) == ([0], 30)
    decision = plan.decide(request, 30, 70, 10)
    assert (decision.compute, decision.num_new_tokens) == ([], 0)


@pytest.mark.parametrize(("start", "expected"), [(0, 29), (10, 19), (29, 0)])
def test_a_drafter_must_not_read_an_item_that_is_not_taken(start: int, expected: int) -> None:
    request = request_with(("a", 30, 20))
    decision = planner(10, shift=1).decide(request, start, 100 - start, 500)
    assert (decision.compute, decision.num_new_tokens) == ([], expected)


def test_no_split_of_an_item() -> None:
    request = request_with(("a", 10, 40))
    decision = planner(disable_chunked_mm_input=True).decide(request, 0, 30, 500)
    assert (decision.compute, decision.num_new_tokens) == ([], 10)
    decision = planner(disable_chunked_mm_input=True).decide(request, 0, 50, 500)
    assert (decision.compute, decision.num_new_tokens) == ([0], 50)


@pytest.mark.parametrize(
    ("start", "count", "room", "expected"),
    [
        (0, 5, 5, 5),  # ends before it
        (0, 10, 10, 10),
        (0, 11, 60, 10),  # would end inside: before it
        (10, 5, 40, 40),  # begins with it: behind it, if there is room
        (10, 5, 39, 0),
        (25, 5, 25, 25),  # begins inside, behind a hit
        (25, 5, 24, 0),
        (25, 25, 25, 25),
        (49, 1, 1, 1),
        (50, 5, 5, 5),
    ],
)
def test_no_step_ends_inside_an_item_that_stays_whole(
    start: int, count: int, room: int, expected: int
) -> None:
    request = request_with(("a", 10, 40))
    plan = planner(disable_chunked_mm_input=True)
    assert plan.decide(request, start, count, 500, room).num_new_tokens == expected
    assert planner().decide(request, start, count, 500, room).num_new_tokens == count


def test_tenants_and_salts_share_no_outputs() -> None:
    plain, mine = (request_with(("a", 10, 40), name=name) for name in "12")
    mine.cache_salt = "mine"
    plan = planner(cache=EncoderCacheManager(1000, Request.encoder_key))
    for request in (plain, mine):
        decision = plan.decide(request, 0, 100, 500)
        assert decision.compute == [0]
        plan.commit(request, decision)
    assert plan.decide(request_with(("a", 10, 40), name="3"), 0, 100, 500).compute == []
    assert plan.cache.find_faults() == []


def test_sources_in_order_and_room_for_all() -> None:
    connector = Mock(has_cache_item=Mock(side_effect=lambda identifier: identifier == "b"))
    plan = planner(ec_connector=connector)
    request = request_with(("a", 0, 20), ("b", 30, 20))
    decision = plan.decide(request, 0, 100, 500)
    assert (decision.compute, decision.external) == ([0], [1])
    assert decision.budget == 480
    plan.commit(request, decision)
    assert plan.cache.num_free_slots == 960
    assert [call.args[1] for call in connector.update_state_after_alloc.call_args_list] == [0, 1]


def test_encoder_decoder_encodes_once() -> None:
    plan = planner(cache=EncoderDecoderCacheManager(1000), is_encoder_decoder=True)
    request = request_with(("a", 0, 300), num_tokens=10)
    decision = plan.decide(request, 0, 10, 500)
    assert decision.compute == [0]
    assert plan.num_encoder_tokens(request, decision) == 300
    decision = plan.decide(request, 10, 1, 500)
    assert decision.compute == []
    assert plan.num_encoder_tokens(request, decision) == 0


def multimodal() -> Scheduler:
    scheduler = make_scheduler(max_num_batched_tokens=64)
    scheduler.max_num_encoder_input_tokens = 64
    scheduler.encoder_cache_manager = EncoderCacheManager(64)
    return scheduler


def test_scheduler_encodes_and_lets_go() -> None:
    scheduler = multimodal()
    scheduler.add_request(request_with(("a", 10, 40), ("b", 60, 30)))
    output = scheduler.schedule()
    # b begins at 60 and does not fit beside a.
    assert output.num_scheduled_tokens == {"0": 60}
    assert output.scheduled_encoder_inputs == {"0": [0]}
    scheduler.update_from_output(output, answer(output, {}))
    assert scheduler.encoder_cache_manager.get_cached_input_ids(scheduler.requests["0"]) == set()
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"0": 40}
    assert output.scheduled_encoder_inputs == {"0": [1]}
    assert output.free_encoder_mm_hashes == ["a"]


def test_a_second_request_shares_an_item() -> None:
    scheduler = multimodal()
    scheduler.add_request(request_with(("a", 0, 20), num_tokens=30))
    scheduler.add_request(request_with(("a", 0, 20), num_tokens=31, name="1"))
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"0": 30, "1": 31}
    assert output.scheduled_encoder_inputs == {"0": [0]}


def test_a_request_that_waits_holds_no_room() -> None:
    """It looked at an output that another made, and did not enter: that may be evicted."""
    scheduler = multimodal()
    scheduler.add_request(request_with(("a", 0, 40), num_tokens=60, name="0"))
    scheduler.schedule()
    waiting = request_with(("a", 0, 40), num_tokens=60, name="1")
    scheduler.add_request(waiting)
    scheduler.kv_cache_manager.allocate_slots = Mock(return_value=None)
    cache = scheduler.encoder_cache_manager
    admitted = scheduler.requests["0"]
    assert cache.get_cached_input_ids(admitted) == {0}
    scheduler.schedule()
    assert cache.get_cached_input_ids(waiting) == set()


def test_what_a_preempted_request_was_to_make_is_forgotten() -> None:
    scheduler = multimodal()
    request = request_with(("a", 0, 40), num_tokens=60)
    scheduler.add_request(request)
    scheduler.schedule()
    cache = scheduler.encoder_cache_manager
    cache.free(request)
    cache.forget(request, [0])
    assert (cache.cached, cache.num_free_slots, cache.find_faults()) == ({}, 64, [])


def test_ec_connector_may_hold_a_request_back() -> None:
    scheduler = multimodal()
    scheduler.ec_connector = Mock(
        ensure_cache_available=Mock(return_value=False), has_cache_item=Mock(return_value=True)
    )
    scheduler.add_request(request_with(("a", 0, 20), num_tokens=30))
    assert scheduler.schedule().num_scheduled_tokens == {}
    scheduler.ec_connector.ensure_cache_available.return_value = True
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"0": 30}
    assert output.scheduled_encoder_inputs == {}
    request = scheduler.requests["0"]
    scheduler.ec_connector.update_state_after_alloc.assert_called_once_with(request, 0)


def test_ends_of_items_are_marked_behind_the_first_marks() -> None:
    plain = request_with(("a", 0, 40), ("b", 60, 30))
    assert plain.cache_boundaries == (90, 60, 40)
    marked = make_request(
        "1", 100, cache_boundaries=(7, 90, 50), mm_features=list(plain.mm_features)
    )
    assert marked.cache_boundaries == (7, 90, 60, 50, 40)
    assert make_request("2", 100, cache_boundaries=(7, 3)).cache_boundaries == (7, 3)
