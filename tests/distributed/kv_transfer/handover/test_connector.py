"""The scheduler's side: who loads, who waits, who is given back, and what is held."""

from typing import Any

import pytest

from tests.v1.core.sched.builders import answer, full_config, make_request, make_scheduler
from vllm.config import KVTransferConfig, ParallelConfig
from vllm.distributed.kv_transfer.handover.orders import HandoverOrders, HandoverReport
from vllm.distributed.kv_transfer.handover.params import digest_prompt
from vllm.exceptions import UserInputError
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.messages import FinishReason
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

PROMPT = list(range(50))


def connected(policy: str = "recompute", role: str = "kv_both", **parallel: int) -> Scheduler:
    raw = {"kv_connector": "TcpConnector", "kv_role": role, "kv_load_failure_policy": policy}
    return make_scheduler(
        kv_cache_config=full_config(100),
        kv_transfer_config=KVTransferConfig.from_dict(raw),
        parallel_config=ParallelConfig(**parallel),
    )


def params(num_tokens: int = 48, lease: str = "lease-1", **change: Any) -> dict[str, Any]:
    made = {
        "do_remote_prefill": True,
        "remote_engine_id": "p",
        "remote_instance": "run-1",
        "remote_host": "127.0.0.1",
        "remote_port": 5,
        "remote_request_id": lease,
        "remote_num_tokens": num_tokens,
        "remote_prompt_digest": digest_prompt(PROMPT[:num_tokens], None),
    }
    return {**made, **change}


def taking(request_id: str, **change: Any) -> Request:
    request = make_request(request_id, PROMPT)
    request.kv_transfer_params = params(**change)
    return request


def orders_of(output: SchedulerOutput) -> HandoverOrders:
    orders = output.kv_connector_metadata
    assert isinstance(orders, HandoverOrders)
    return orders


def report(
    scheduler: Scheduler, output: SchedulerOutput, tokens: Any = None, **fields: Any
) -> dict[str, Any]:
    """Give the scheduler a step's result; returns the outputs by request."""
    result = answer(output, tokens or {})
    result.kv_connector_output = KVConnectorOutput(
        kv_connector_worker_meta=fields.pop("meta", HandoverReport()), **fields
    )
    bundles = scheduler.update_from_output(output, result)
    return {item.request_id: item for bundle in bundles.values() for item in bundle.outputs}


def hold(scheduler: Scheduler) -> str:
    """Have a prompt computed and held; returns its lease."""
    request = make_request("held", PROMPT, max_tokens=1)
    request.kv_transfer_params = {"do_remote_decode": True}
    scheduler.add_request(request)
    outputs = report(scheduler, scheduler.schedule(), {"held": [1]})
    report(scheduler, scheduler.schedule())
    return str(outputs["held"].kv_transfer_params["remote_request_id"])


def all_free(scheduler: Scheduler) -> bool:
    pool = scheduler.kv_cache_manager.block_pool
    return pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


def test_a_prefix_is_loaded_and_given_back() -> None:
    scheduler = connected()
    scheduler.add_request(taking("a"))
    output = scheduler.schedule()
    (load,) = orders_of(output).loads
    assert (load.request_id, load.blocks.num_tokens, load.blocks.dense_from) == ("a", 48, 0)
    assert len(load.blocks.block_ids[0]) == 3
    assert not output.num_scheduled_tokens
    report(scheduler, output, finished_recving={"a"})
    output = scheduler.schedule()
    # The two tokens behind it are computed, and the holder is told in the same step.
    assert output.num_scheduled_tokens == {"a": 2}
    assert [prefix.lease for prefix in orders_of(output).returned] == ["lease-1"]
    report(scheduler, output, {"a": [7]}, meta=HandoverReport(num_returning=1))
    assert scheduler.connector.hooks.has_pending_work()
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    report(scheduler, scheduler.schedule())
    assert not scheduler.has_requests()
    assert all_free(scheduler)


def test_what_is_here_is_not_loaded() -> None:
    scheduler = connected()
    scheduler.add_request(make_request("first", PROMPT[:48], max_tokens=1))
    output = scheduler.schedule()
    report(scheduler, output, {"first": [1]})
    scheduler.add_request(taking("a"))
    output = scheduler.schedule()
    assert orders_of(output).loads == []
    assert output.num_scheduled_tokens == {"a": 2}
    # Noted in the step that admitted it, told in the next one at the latest.
    returned = [*orders_of(output).returned]
    report(scheduler, output, {"a": [1]})
    returned += orders_of(scheduler.schedule()).returned
    assert [prefix.lease for prefix in returned] == ["lease-1"]


def test_siblings_wait_for_the_one_that_loads() -> None:
    scheduler = connected()
    for name in "abc":
        scheduler.add_request(taking(name))
    output = scheduler.schedule()
    assert [load.request_id for load in orders_of(output).loads] == ["a"]
    report(scheduler, output, finished_recving={"a"})
    output = scheduler.schedule()
    assert orders_of(output).loads == []
    assert output.num_scheduled_tokens == {"a": 2, "b": 2, "c": 2}
    assert len(orders_of(output).returned) == 1


def test_a_load_that_fails_is_computed_again() -> None:
    scheduler = connected("recompute")
    scheduler.add_request(taking("a"))
    report(scheduler, scheduler.schedule(), failed_recving={"a"})
    output = scheduler.schedule()
    assert orders_of(output).loads == [], "it is not tried for ever"
    assert output.num_scheduled_tokens == {"a": 50}
    stats = report(scheduler, output, {"a": [1]})["a"].prefill_stats
    # Its client is not told that it was cached.
    assert (stats.num_cached_tokens, stats.num_external_tokens) == (0, 0)
    assert stats.miss_tokens == {"external": 48, "above_last_boundary": 2}
    scheduler.kv_cache_manager.check_invariants()


def test_a_load_that_fails_ends_the_request() -> None:
    scheduler = connected("fail")
    scheduler.add_request(taking("a"))
    outputs = report(scheduler, scheduler.schedule(), failed_recving={"a"})
    assert outputs["a"].finish_reason is FinishReason.ERROR
    assert all_free(scheduler)


def test_an_abort_waits_for_the_writer() -> None:
    scheduler = connected()
    scheduler.add_request(taking("a"))
    report(scheduler, scheduler.schedule())
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert not all_free(scheduler), "rows may still be written"
    output = scheduler.schedule()
    assert orders_of(output).cancelled == ["a"]
    report(scheduler, output, failed_recving={"a"})
    assert all_free(scheduler)
    assert len(orders_of(scheduler.schedule()).returned) == 1


def test_a_prefix_is_held_until_no_worker_reads_it() -> None:
    scheduler = connected()
    request = make_request("a", PROMPT, max_tokens=1)
    request.kv_transfer_params = {"do_remote_decode": True}
    scheduler.add_request(request)
    outputs = report(scheduler, scheduler.schedule(), {"a": [1]})
    told = outputs["a"].kv_transfer_params
    assert (told["do_remote_prefill"], told["remote_num_tokens"]) == (True, 48)
    assert len(told["remote_block_ids"][0]) == 3
    assert not all_free(scheduler)
    assert scheduler.has_requests(), "the workers must be heard"
    output = scheduler.schedule()
    (lease,) = orders_of(output).offers
    assert lease == told["remote_request_id"]
    scheduler.kv_cache_manager.check_invariants()
    report(scheduler, output, meta=HandoverReport({lease: 1}))
    assert all_free(scheduler)
    assert not scheduler.has_requests()


@pytest.mark.parametrize("how", ["aborted", "too short"])
def test_nothing_is_held_where_nothing_was_computed(how: str) -> None:
    scheduler = connected()
    request = make_request("a", PROMPT if how == "aborted" else PROMPT[:10], max_tokens=1)
    request.kv_transfer_params = {"do_remote_decode": True}
    scheduler.add_request(request)
    output = scheduler.schedule()
    if how == "aborted":
        scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
        report(scheduler, output)
    else:
        outputs = report(scheduler, output, {"a": [1]})
        assert outputs["a"].kv_transfer_params["do_remote_prefill"] is False
    assert all_free(scheduler)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_tokens": 40}, "multiple of 16"),
        ({"num_tokens": 64}, "50 tokens"),
        ({"remote_prompt_digest": "0" * 64}, "another prompt"),
    ],
)
def test_a_prefix_of_another_prompt_is_refused(change: dict[str, Any], named: str) -> None:
    scheduler = connected()
    with pytest.raises(UserInputError, match=named):
        scheduler.add_request(taking("a", **change))
    assert not scheduler.has_requests()


def test_a_request_with_another_salt_is_refused() -> None:
    scheduler = connected()
    request = taking("a")
    request.cache_salt = "mine"
    with pytest.raises(UserInputError, match="cache_salt"):
        scheduler.add_request(request)


def test_reports_of_workers_are_added() -> None:
    other = HandoverReport({"a": 1, "c": 2}, 1, frozenset("g"))
    merged = HandoverReport({"a": 1, "b": 1}, 2, frozenset("f")).aggregate(other)
    assert merged == HandoverReport({"a": 2, "b": 1, "c": 2}, 3, frozenset("fg"))


def test_of_several_workers_the_last_one_lets_go() -> None:
    scheduler = connected(tensor_parallel_size=2)
    lease = hold(scheduler)
    report(scheduler, scheduler.schedule(), meta=HandoverReport({lease: 1}))
    assert not all_free(scheduler), "the other one may still read it"
    report(scheduler, scheduler.schedule(), meta=HandoverReport({lease: 1}))
    assert all_free(scheduler)


def test_a_load_that_failed_at_one_worker_is_given_up_by_the_others() -> None:
    scheduler = connected(tensor_parallel_size=2)
    scheduler.add_request(taking("a"))
    report(scheduler, scheduler.schedule(), meta=HandoverReport(failed=frozenset("a")))
    output = scheduler.schedule()
    assert orders_of(output).cancelled == ["a"]
    assert not output.num_scheduled_tokens, "another worker may still write"
    report(scheduler, output, failed_recving={"a"}, meta=HandoverReport(failed=frozenset("a")))
    output = scheduler.schedule()
    assert orders_of(output).cancelled == []
    assert output.num_scheduled_tokens == {"a": 50}


def test_what_nobody_will_load_is_withdrawn() -> None:
    scheduler = connected()
    lease = hold(scheduler)
    scheduler.connector.hooks.withdraw(["unknown", lease])
    output = scheduler.schedule()
    assert orders_of(output).withdrawn == [lease]
    report(scheduler, output, meta=HandoverReport({lease: 1}))
    assert all_free(scheduler)
    scheduler.connector.hooks.withdraw([lease])
    assert not scheduler.has_requests()
