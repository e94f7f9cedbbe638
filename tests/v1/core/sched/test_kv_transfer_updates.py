"""Loads and stores of a KV connector, seen by the scheduler."""

from typing import Any

import pytest

from tests.v1.core.sched.builders import (
    BLOCK_SIZE,
    all_blocks_free,
    answer,
    make_request,
    make_scheduler,
    outputs_by_request,
)
from tests.v1.core.window_geometry import GPT_OSS_LIKE, MISTRAL_LIKE, window_config
from vllm.config import KVTransferConfig
from vllm.v1.core.kv_cache_coordinator import as_served
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.messages import FinishReason
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import RequestStatus


def connected(
    policy: str = "fail",
    num_blocks: int = 100,
    kv_cache_config: KVCacheConfig | None = None,
    use_async: bool = False,
    order: str = "fcfs",
    **extra: Any,
) -> Scheduler:
    """A scheduler with a ScriptedConnector."""
    return make_scheduler(
        num_blocks=num_blocks,
        use_async=use_async,
        policy=order,
        kv_cache_config=kv_cache_config,
        kv_transfer_config=KVTransferConfig(
            kv_connector="ScriptedConnector",
            kv_role="kv_both",
            kv_connector_module_path="tests.v1.core.sched.scripted_connector",
            kv_connector_extra_config=extra,
            kv_load_failure_policy=policy,
        ),
    )


def report(scheduler: Scheduler, output: Any, tokens: Any = None, **fields: Any) -> dict[str, Any]:
    """Return the step's result with a connector output."""
    result = answer(output, tokens or {})
    result.kv_connector_output = KVConnectorOutput(**fields)
    return outputs_by_request(scheduler.update_from_output(output, result))


def test_sync_load_starts_behind_the_external_tokens() -> None:
    scheduler = connected(matched=32)
    scheduler.add_request(make_request("0", 50))
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"0": 18}
    assert output.scheduled_new_reqs[0].num_computed_tokens == 32
    assert len(output.scheduled_new_reqs[0].block_ids[0]) == 4
    assert output.kv_connector_metadata is not None
    assert scheduler.connector.allocated == [("0", 32)]
    bundles = scheduler.update_from_output(output, answer(output, {"0": [1]}))
    stats = bundles[0].scheduler_stats
    assert stats is not None
    assert stats.connector_prefix_cache_stats is not None
    assert stats.connector_prefix_cache_stats.queries == 50
    assert stats.connector_prefix_cache_stats.hits == 32
    prefill = bundles[0].outputs[0].prefill_stats
    assert prefill is not None
    assert prefill.num_cached_tokens == 32
    # What is loaded needs no computing; every other token has a reason.
    assert (prefill.num_prompt_tokens, prefill.num_external_tokens) == (50, 32)
    assert prefill.dense_match_tokens == 0
    assert prefill.miss_tokens == {"first_seen": 16, "above_last_boundary": 2}
    # The local cache had none of it.
    cache = stats.prefix_cache_stats
    assert (cache.queries, cache.hits) == (50, 0)
    assert cache.miss_tokens == {"external": 32, **prefill.miss_tokens}


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("matched", [16, 10_000])
def test_loaded_tokens_are_hits_of_the_connector_alone(is_async: bool, matched: int) -> None:
    scheduler = connected(matched=matched, is_async=is_async)
    for name in "ab":
        scheduler.add_request(make_request(name, 48, max_tokens=2))
    output = scheduler.schedule()
    tokens = {name: [1] for name in output.num_scheduled_tokens}
    bundles = scheduler.update_from_output(output, answer(output, tokens))
    stats = next(iter(bundles.values())).scheduler_stats
    assert stats is not None
    loaded = min(matched, 48 if is_async else 47)
    external, local = stats.connector_prefix_cache_stats, stats.prefix_cache_stats
    assert external is not None
    # Counted in the step that takes the blocks, loading or not.
    assert (external.requests, external.queries, external.hits) == (2, 96, 2 * loaded)
    assert (local.requests, local.queries, local.hits) == (2, 96, 0)
    assert local.miss_tokens["external"] == 2 * loaded
    assert sum(local.miss_tokens.values()) == 96
    assert external.preempted_requests == local.preempted_requests == 0
    scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)


def test_local_hits_and_loads_are_counted_apart() -> None:
    scheduler = connected(matched=0)
    prompt = list(range(80))
    scheduler.add_request(make_request("0", prompt[:40], max_tokens=1))
    output = scheduler.schedule()
    scheduler.update_from_output(output, answer(output, {"0": [1]}))
    scheduler.connector.matched = 16
    scheduler.add_request(make_request("1", prompt, max_tokens=1))
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"1": 32}
    bundles = scheduler.update_from_output(output, answer(output, {"1": [1]}))
    record = bundles[0].outputs[0].prefill_stats
    assert record is not None
    assert (record.num_cached_tokens, record.num_external_tokens) == (48, 16)
    assert record.dense_match_tokens == 32
    assert record.num_cached_tokens + sum(record.miss_tokens.values()) == 80
    stats = bundles[0].scheduler_stats
    assert stats is not None
    assert stats.connector_prefix_cache_stats is not None
    external, local = stats.connector_prefix_cache_stats, stats.prefix_cache_stats
    assert (external.queries, external.hits) == (48, 16)
    assert (local.queries, local.hits, local.miss_tokens["external"]) == (80, 32, 16)


def test_tokens_resent_after_a_failed_load_are_queries_again() -> None:
    scheduler = connected("recompute", matched=32, is_async=True)
    output = load(scheduler)
    bad = scheduler.kv_cache_manager.get_block_ids("0")[0][0]
    report(scheduler, output, invalid_block_ids={bad}, finished_recving={"0"})
    scheduler.connector.matched = 0
    scheduler.schedule()
    stats = scheduler.make_stats()
    assert stats is not None
    assert stats.connector_prefix_cache_stats is not None
    # The connector was asked a second time; the admission counted before.
    assert stats.connector_prefix_cache_stats.queries == 50
    assert stats.prefix_cache_stats.queries == 0


def test_unknown_match_is_asked_again() -> None:
    scheduler = connected(matched=None)
    scheduler.add_request(make_request("0", 50))
    assert scheduler.schedule().num_scheduled_tokens == {}
    assert len(scheduler.skipped_waiting) == 1
    scheduler.connector.matched = 0
    assert scheduler.schedule().num_scheduled_tokens == {"0": 50}


def load(scheduler: Scheduler, name: str = "0", num_tokens: int = 50) -> Any:
    """Begin an asynchronous load."""
    scheduler.add_request(make_request(name, num_tokens, max_tokens=2))
    output = scheduler.schedule()
    assert scheduler.requests[name].status is RequestStatus.WAITING_FOR_REMOTE_KVS
    return output


def test_async_load_waits_and_goes_on() -> None:
    scheduler = connected(matched=32, is_async=True)
    output = load(scheduler)
    request = scheduler.requests["0"]
    assert output.num_scheduled_tokens == {}
    assert request.num_computed_tokens == 32
    assert request in scheduler._inflight_prefills
    report(scheduler, output)
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {}
    report(scheduler, output, finished_recving={"0"})
    assert scheduler.finished_recving_kv_req_ids == {"0"}
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"0": 18}
    assert scheduler.finished_recving_kv_req_ids == set()
    assert request not in scheduler._inflight_prefills
    assert scheduler.connector.allocated == [("0", 32), ("0", 0)]
    # What was loaded serves others now.
    scheduler.connector.matched = 0
    scheduler.add_request(make_request("twin", list(request.all_token_ids)))
    output = scheduler.schedule()
    assert output.num_scheduled_tokens["twin"] == 2


def test_a_fully_loaded_prompt_computes_its_last_token() -> None:
    scheduler = connected(matched=64, is_async=True)
    output = load(scheduler, num_tokens=48)
    assert scheduler.requests["0"].num_computed_tokens == 48
    report(scheduler, output, finished_recving=["0"])
    assert scheduler.schedule().num_scheduled_tokens == {"0": 1}


@pytest.mark.parametrize("how", ["finished_recving", "failed_recving"])
def test_abort_while_loading_keeps_the_blocks_until_the_writer_is_done(how: str) -> None:
    scheduler = connected(matched=32, is_async=True)
    output = load(scheduler)
    assert scheduler.finish_requests("0", RequestStatus.FINISHED_ABORTED) == [("0", 0)]
    assert "0" in scheduler.requests
    assert not all_blocks_free(scheduler)
    report(scheduler, output)
    scheduler.schedule()
    assert scheduler.has_finished_requests()
    output = scheduler.schedule()
    report(scheduler, output, **{how: {"0"}})
    assert all_blocks_free(scheduler)
    assert not scheduler.requests
    scheduler.schedule()
    assert not scheduler.has_requests()


def test_abort_after_loading_frees_at_once() -> None:
    scheduler = connected(matched=32, is_async=True)
    output = load(scheduler)
    report(scheduler, output, finished_recving={"0"})
    scheduler.finish_requests("0", RequestStatus.FINISHED_ABORTED)
    assert all_blocks_free(scheduler)
    assert not scheduler.finished_recving_kv_req_ids


def test_a_connector_keeps_blocks_until_they_are_sent() -> None:
    scheduler = connected(keeps_blocks=True)
    scheduler.add_request(make_request("0", 20, max_tokens=1))
    output = scheduler.schedule()
    items = report(scheduler, output, {"0": [1]})
    assert items["0"].kv_transfer_params == {"blocks": 2}
    assert scheduler.connector.finished == ["0"]
    assert not all_blocks_free(scheduler)
    assert scheduler.has_finished_requests()
    output = scheduler.schedule()
    report(scheduler, output, finished_sending=["0"])
    assert all_blocks_free(scheduler)
    assert not scheduler.has_requests()


def test_loads_leave_room_for_what_began_before() -> None:
    # 10 blocks; each request needs 5 and loads 2 of them.
    scheduler = connected(matched=32, is_async=True, num_blocks=12)
    for name in "abc":
        scheduler.add_request(make_request(name, 80, max_tokens=1))
    output = scheduler.schedule()
    states = {name: r.status for name, r in scheduler.requests.items()}
    loading = RequestStatus.WAITING_FOR_REMOTE_KVS
    # 11 - 5 - 5 leaves one block: c would wait for a and b for ever if it took two of theirs.
    assert states == {"a": loading, "b": loading, "c": RequestStatus.WAITING}
    done: dict[str, list[int]] = {}
    for _ in range(20):
        ready = {n for n, r in scheduler.requests.items() if r.status is loading}
        tokens = {name: [1] for name in output.num_scheduled_tokens}
        for name, item in report(scheduler, output, tokens, finished_recving=ready).items():
            done.setdefault(name, []).extend(item.new_token_ids)
        output = scheduler.schedule()
    assert done == {"a": [1], "b": [1], "c": [1]}
    assert all_blocks_free(scheduler)


@pytest.mark.parametrize("is_async", [False, True])
def test_failed_loads_end_the_request_by_default(is_async: bool) -> None:
    scheduler = connected(matched=32, is_async=is_async)
    scheduler.add_request(make_request("0", 50))
    output = scheduler.schedule()
    bad = scheduler.kv_cache_manager.get_block_ids("0")[0][1]
    tokens = {"0": [1]} if not is_async else {}
    items = report(scheduler, output, tokens, invalid_block_ids={bad})
    assert items["0"].finish_reason is FinishReason.ERROR
    assert items["0"].new_token_ids == []
    assert "failed to load" in items["0"].stop_reason
    assert all_blocks_free(scheduler)
    assert scheduler.get_num_unfinished_requests() == 0


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_nothing_computed_from_a_bad_block_serves_others(policy: str) -> None:
    scheduler = connected(policy, matched=32)
    prompt = list(range(70))
    scheduler.add_request(make_request("0", prompt))
    output = scheduler.schedule()
    bad = scheduler.kv_cache_manager.get_block_ids("0")[0][1]
    report(scheduler, output, {"0": [1]}, invalid_block_ids={bad})
    if policy == "recompute":
        scheduler.finish_requests("0", RequestStatus.FINISHED_ABORTED)
    scheduler.connector.matched = 0
    # The first block arrived well. Even where the bad second one is there again, the third and the
    # fourth, computed from it, are not.
    for name, num_tokens, num_hit in (("1", 33, 16), ("2", 70, 32)):
        scheduler.add_request(make_request(name, prompt[:num_tokens], max_tokens=1))
        output = scheduler.schedule()
        assert output.num_scheduled_tokens == {name: num_tokens - num_hit}
        scheduler.update_from_output(output, answer(output, {name: [1]}))


def test_failed_sync_load_is_computed_again() -> None:
    scheduler = connected("recompute", matched=32)
    scheduler.add_request(make_request("0", 50))
    output = scheduler.schedule()
    bad = scheduler.kv_cache_manager.get_block_ids("0")[0][1]
    assert report(scheduler, output, {"0": [1]}, invalid_block_ids={bad}) == {}
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"0": 34}
    assert output.scheduled_cached_reqs.num_computed_tokens == [16]


def test_a_void_step_leaves_no_token_in_flight() -> None:
    scheduler = connected("recompute", use_async=True, matched=32)
    scheduler.add_request(make_request("0", 50))
    output = scheduler.schedule()
    assert output.loads_within
    bad = scheduler.kv_cache_manager.get_block_ids("0")[0][1]
    assert report(scheduler, output, {"0": [1]}, invalid_block_ids={bad}) == {}
    output = scheduler.schedule()
    assert not output.loads_within
    assert output.num_scheduled_tokens == {"0": 34}
    assert report(scheduler, output, {"0": [5]})["0"].new_token_ids == [5]
    assert scheduler.schedule().num_scheduled_tokens == {"0": 1}
    assert scheduler.requests["0"].num_output_placeholders == 1


@pytest.mark.parametrize(("index", "start"), [(0, 0), (1, 16)])
def test_failed_async_load_keeps_what_arrived(index: int, start: int) -> None:
    scheduler = connected("recompute", matched=32, is_async=True)
    output = load(scheduler)
    bad = scheduler.kv_cache_manager.get_block_ids("0")[0][index]
    report(scheduler, output, invalid_block_ids={bad}, finished_recving={"0"})
    scheduler.connector.matched = 0
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"0": 50 - start}
    assert not scheduler._requests.failed_load_ids
    # Its tokens were counted when it was admitted, with what was promised.
    stats = scheduler.make_stats()
    assert stats is not None
    assert stats.prefix_cache_stats.requests == 0
    record = scheduler.requests["0"].prefill_stats
    assert record is not None
    assert record.num_cached_tokens == 32
    assert sum(record.miss_tokens.values()) == 18


def test_a_load_that_failed_altogether_is_looked_up_anew() -> None:
    scheduler = connected("recompute", matched=32, is_async=True)
    load(scheduler)
    bad = scheduler.kv_cache_manager.get_block_ids("0")[0][0]
    scheduler.connector.matched = 0
    # Meanwhile another request computes the same prompt.
    scheduler.add_request(make_request("1", scheduler.requests["0"].prompt_token_ids or ()))
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"1": 50}
    report(scheduler, output, {"1": [5]}, invalid_block_ids={bad}, finished_recving={"0"})
    assert scheduler.schedule().num_scheduled_tokens == {"1": 1, "0": 2}


def test_a_load_that_failed_altogether_keeps_no_room_for_another_one() -> None:
    scheduler = connected("recompute", num_blocks=7, matched=64, is_async=True)
    output = load(scheduler, num_tokens=67)
    bad = scheduler.kv_cache_manager.get_block_ids("0")[0][0]
    report(scheduler, output, invalid_block_ids={bad}, finished_recving={"0"})
    assert scheduler.schedule().num_scheduled_tokens == {}
    # It loads again, with what it held free.
    assert scheduler.connector.allocated == [("0", 64), ("0", 64)]
    assert [r.request_id for r in scheduler._requests.find_loading()] == ["0"]


def test_who_was_loaded_passes_who_has_no_room_for_it() -> None:
    scheduler = connected(num_blocks=8, order="priority", matched=64, is_async=True)
    scheduler.add_request(make_request("low", 70, max_tokens=2, priority=1))
    output = scheduler.schedule()
    scheduler.connector.matched = 0
    # Seven blocks, of which four are taken.
    scheduler.add_request(make_request("high", 100, max_tokens=4, priority=0))
    scheduler.add_request(make_request("small", 10, max_tokens=4, priority=1))
    report(scheduler, output)
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {}
    report(scheduler, output, finished_recving={"low"})
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"low": 6}
    report(scheduler, output, {"low": [1]})
    output = scheduler.schedule()
    report(scheduler, output, {"low": [1]})
    assert scheduler.schedule().num_scheduled_tokens == {"high": 100}


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("kinds", [MISTRAL_LIKE, GPT_OSS_LIKE])
@pytest.mark.parametrize("which", ["window", "last"])
def test_a_bad_block_of_a_checkpoint_undoes_its_load(kinds: str, policy: str, which: str) -> None:
    """Windows have tables of their own, with other bases than 0, or there is nothing else."""
    scheduler = connected(
        policy,
        kv_cache_config=window_config(BLOCK_SIZE, 600, 32, kinds),
        matched=160,
        is_async=True,
    )
    output = load(scheduler, num_tokens=200)
    cache = as_served(scheduler.kv_cache_manager.coordinator).requests["0"]
    table = cache.windows[0] if which == "window" else cache.tables()[0]
    bad = table.blocks[-1].block_id
    items = report(scheduler, output, invalid_block_ids={bad}, finished_recving={"0"})
    if policy == "fail":
        assert items["0"].finish_reason is FinishReason.ERROR
        assert all_blocks_free(scheduler)
        return
    scheduler.connector.matched = 0
    assert scheduler.schedule().num_scheduled_tokens == {"0": 200}
    record = scheduler.requests["0"].prefill_stats
    assert record is not None
    assert record.num_cached_tokens == record.num_external_tokens == 0
    assert sum(record.miss_tokens.values()) == 200
    scheduler.kv_cache_manager.check_invariants()


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("kinds", [MISTRAL_LIKE, GPT_OSS_LIKE])
def test_a_load_of_which_nothing_may_be_used(kinds: str, policy: str) -> None:
    config = window_config(BLOCK_SIZE, 600, 32, kinds)
    scheduler = connected(policy, kv_cache_config=config, matched=160, is_async=True)
    output = load(scheduler, num_tokens=200)
    items = report(scheduler, output, failed_recving={"0"})
    if policy == "fail":
        assert items["0"].finish_reason is FinishReason.ERROR
        assert all_blocks_free(scheduler)
        return
    scheduler.connector.matched = 0
    assert scheduler.schedule().num_scheduled_tokens == {"0": 200}
    scheduler.kv_cache_manager.check_invariants({"0": 200})
    checkpoints = as_served(scheduler.kv_cache_manager.coordinator).index.checkpoints
    assert all(record.position > 0 for record in checkpoints.values())
    assert not scheduler._requests.failed_load_ids
    scheduler.finish_requests("0", RequestStatus.FINISHED_ABORTED)
    assert all_blocks_free(scheduler)


@pytest.mark.parametrize("kinds", [MISTRAL_LIKE, GPT_OSS_LIKE])
def test_what_arrived_is_hit_by_others(kinds: str) -> None:
    config = window_config(BLOCK_SIZE, 600, 32, kinds)
    scheduler = connected(kv_cache_config=config, matched=160, is_async=True)
    output = load(scheduler, num_tokens=170)
    prompt = scheduler.requests["0"].prompt_token_ids
    assert prompt is not None
    report(scheduler, output, finished_recving={"0"})
    scheduler.connector.matched = 0
    # In the very step in which the first goes on.
    scheduler.add_request(make_request("1", prompt))
    assert scheduler.schedule().num_scheduled_tokens == {"0": 10, "1": 10}
    # It is a request like others: what it leaves behind at its end is published too.
    assert not as_served(scheduler.kv_cache_manager.coordinator).requests["0"].is_loading


def test_a_window_that_moved_on_says_which_tokens_it_holds() -> None:
    scheduler = connected(kv_cache_config=window_config(BLOCK_SIZE, 600, 32, MISTRAL_LIKE))
    scheduler.add_request(make_request("0", 200))
    output = scheduler.schedule()
    scheduler.update_from_output(output, answer(output, {"0": [1]}))
    scheduler.schedule()
    coordinator = as_served(scheduler.kv_cache_manager.coordinator)
    (window,) = coordinator.requests["0"].windows
    assert window.base > 0
    for index, block_id in enumerate(window.block_ids, window.base):
        assert coordinator.find_first_token("0", {block_id}) == index * BLOCK_SIZE
    held = set(window.block_ids)
    assert coordinator.list_blocks_from("0", 0) == held
    last = (window.end - 1) * BLOCK_SIZE
    assert coordinator.list_blocks_from("0", last) == {window.block_ids[-1]}
    assert coordinator.find_first_token("0", {max(held) + 1}) is None


def test_strangers_are_ignored() -> None:
    scheduler = connected()
    output = scheduler.schedule()
    result = ModelRunnerOutput([], {})
    result.kv_connector_output = KVConnectorOutput(
        finished_sending={"x"}, finished_recving={"y"}, invalid_block_ids={5}
    )
    scheduler.update_from_output(output, result)
    assert not scheduler.requests


def test_reset_connector_cache() -> None:
    scheduler = connected()
    assert scheduler.reset_connector_cache()
    scheduler.connector.reset_cache = lambda: False
    assert not scheduler.reset_connector_cache()
    assert not scheduler.reset_prefix_cache(reset_connector=True)
