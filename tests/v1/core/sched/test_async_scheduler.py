"""Steps scheduled before the last one returned."""

import random
from collections import deque

import pytest

from tests.v1.core.sched.builders import (
    EOS,
    all_blocks_free,
    answer,
    make_request,
    make_scheduler,
    make_v4_scheduler,
    outputs_by_request,
)
from tests.v1.core.sched.fake_executor import FakeExecutor, scripted
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import RequestStatus


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5])
@pytest.mark.parametrize("depth", [2, 3])
def test_no_step_is_scheduled_in_vain(max_tokens: int, depth: int) -> None:
    scheduler = make_scheduler(use_async=True)
    executor = FakeExecutor(scheduler.kv_cache_config, scripted({"0": [1, 2, 3, 4, 5]}))
    scheduler.add_request(make_request("0", 10, max_tokens))
    in_flight = deque()
    total, tokens = 0, []
    while scheduler.has_requests():
        output = scheduler.schedule()
        total += output.total_num_scheduled_tokens
        in_flight.append((output, executor.execute(output)))
        if len(in_flight) == depth:
            bundles = scheduler.update_from_output(*in_flight.popleft())
            for item in outputs_by_request(bundles).values():
                tokens += item.new_token_ids
    assert total == 10 + max_tokens - 1
    assert tokens == [1, 2, 3, 4, 5][:max_tokens]
    assert all_blocks_free(scheduler)


def test_placeholders() -> None:
    scheduler = make_scheduler(use_async=True, max_num_batched_tokens=16)
    scheduler.add_request(make_request("0", 20))
    request = scheduler.requests["0"]
    first = scheduler.schedule()
    assert (request.num_output_placeholders, request.is_prefill_chunk) == (0, True)
    second = scheduler.schedule()
    assert (request.num_output_placeholders, request.num_computed_tokens) == (1, 20)
    third = scheduler.schedule()
    assert third.num_scheduled_tokens == {"0": 1}
    assert third.scheduled_cached_reqs.num_output_tokens == [1]
    assert request.num_output_placeholders == 2
    scheduler.update_from_output(first, answer(first, {}))
    scheduler.update_from_output(second, answer(second, {"0": [4]}))
    assert request.num_output_placeholders == 1
    scheduler.update_from_output(third, answer(third, {"0": [5]}))
    assert request.num_output_placeholders == 0
    assert list(request.output_token_ids) == [4, 5]


def test_blocks_are_cached_once_their_tokens_are_known() -> None:
    scheduler = make_scheduler(use_async=True)
    scheduler.add_request(make_request("0", 15))
    request = scheduler.requests["0"]
    steps = [scheduler.schedule(), scheduler.schedule()]
    pool = scheduler.kv_cache_manager.block_pool
    assert len(pool.cached_block_hash_to_block) == 0
    scheduler.update_from_output(steps[0], answer(steps[0], {"0": [4]}))
    # The block's last token is known now, but its row belongs to the step in flight.
    assert len(pool.cached_block_hash_to_block) == 0
    scheduler.update_from_output(steps[1], answer(steps[1], {"0": [5]}))
    assert len(pool.cached_block_hash_to_block) == 1
    assert request.num_computed_tokens == 16


def test_a_stop_makes_later_steps_void() -> None:
    scheduler = make_scheduler(use_async=True)
    scheduler.add_request(make_request("0", 10))
    steps = [scheduler.schedule(), scheduler.schedule(), scheduler.schedule()]
    bundles = scheduler.update_from_output(steps[0], answer(steps[0], {"0": [EOS]}))
    assert outputs_by_request(bundles)["0"].finished
    for output in steps[1:]:
        bundles = scheduler.update_from_output(output, answer(output, {"0": [1]}))
        assert not outputs_by_request(bundles)
    assert all_blocks_free(scheduler)


def test_drafts_are_placeholders_too() -> None:
    scheduler = make_scheduler(use_async=True, num_speculative_tokens=2)
    scheduler.add_request(make_request("0", 10))
    request = scheduler.requests["0"]
    first = scheduler.schedule()
    assert request.spec_token_ids == [-1, -1]
    second = scheduler.schedule()
    assert second.num_scheduled_tokens == {"0": 3}
    assert second.scheduled_spec_decode_tokens == {"0": [-1, -1]}
    assert request.num_output_placeholders == 4
    assert request.num_computed_tokens == 13
    scheduler.update_from_output(first, answer(first, {"0": [1]}))
    assert request.num_output_placeholders == 3
    # One of two drafts is accepted.
    scheduler.update_from_output(second, answer(second, {"0": [2, 3]}))
    assert request.num_output_placeholders == 0
    assert request.num_computed_tokens == 12
    assert request.num_tokens == 13
    scheduler.update_draft_token_ids(DraftTokenIds(["0"], [[8, 9]]))
    assert scheduler.schedule().scheduled_spec_decode_tokens == {"0": [8, 9]}


@pytest.mark.parametrize("seed", range(4))
def test_drafts_in_flight_take_no_window_rows_away_and_publish_nothing(seed: int) -> None:
    rng = random.Random(seed)
    scheduler = make_v4_scheduler(600, use_async=True, num_speculative_tokens=4)
    scheduler.add_request(make_request("0", rng.randrange(5, 70), 100, block_size=32))
    request = scheduler.requests["0"]
    in_flight = [scheduler.schedule()]
    while scheduler.running:
        in_flight.append(scheduler.schedule())
        output = in_flight.pop(0)
        drafts = output.scheduled_spec_decode_tokens.get("0", [])
        tokens = [rng.randrange(1000) for _ in range(1 + rng.randrange(len(drafts) + 1))]
        scheduler.update_from_output(output, answer(output, {"0": tokens}))
        accepted = request.num_computed_tokens - request.num_output_placeholders
        running = {item.request_id: accepted for item in scheduler.running}
        scheduler.kv_cache_manager.check_invariants(running)
    # The last token was never computed.
    resent = make_request("1", request.all_token_ids, 1, block_size=32)
    _, num_hit = scheduler.kv_cache_manager.get_computed_blocks(resent)
    assert num_hit == (request.num_tokens - 1) // 32 * 32


def test_a_reset_discards_tokens_in_flight() -> None:
    scheduler = make_scheduler(use_async=True)
    scheduler.add_request(make_request("0", 10))
    request = scheduler.requests["0"]
    stale = [scheduler.schedule(), scheduler.schedule()]
    assert scheduler.reset_prefix_cache(reset_running_requests=True)
    assert request.async_tokens_to_discard == 2
    fresh = scheduler.schedule()
    assert fresh.num_scheduled_tokens == {"0": 10}
    # Again, before any of them came back.
    assert scheduler.reset_prefix_cache(reset_running_requests=True)
    assert request.async_tokens_to_discard == 3
    newest = scheduler.schedule()
    for output in (*stale, fresh):
        bundles = scheduler.update_from_output(output, answer(output, {"0": [9]}))
        assert not outputs_by_request(bundles)
    scheduler.update_from_output(newest, answer(newest, {"0": [5]}))
    assert list(request.output_token_ids) == [5]
    assert request.num_output_placeholders == 0


@pytest.mark.parametrize("at_one_unit", [True, False])
def test_a_preempted_request_waits_for_its_token(at_one_unit: bool) -> None:
    # It holds nothing that could be cached then.
    if at_one_unit:
        scheduler = make_v4_scheduler(300, max_model_len=600, use_async=True)
    else:
        scheduler = make_scheduler(use_async=True)
    scheduler.add_request(make_request("0", 10, block_size=32))
    first = scheduler.schedule()
    request = scheduler.running.pop()
    scheduler._get_holdings().preempt(request, 0.0)
    assert scheduler.schedule().num_scheduled_tokens == {}
    assert request.status is RequestStatus.PREEMPTED
    scheduler.update_from_output(first, answer(first, {"0": [3]}))
    assert scheduler.schedule().num_scheduled_tokens == {"0": 11}


def test_prefixes_are_shared_within_one_step() -> None:
    scheduler = make_scheduler(use_async=True)
    for name in "ab":
        scheduler.add_request(make_request(name, list(range(40))))
    assert scheduler.schedule().num_scheduled_tokens == {"a": 40, "b": 8}
