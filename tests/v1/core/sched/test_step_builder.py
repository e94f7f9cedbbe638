"""Budgets and messages of one step."""

from tests.v1.core.sched.builders import make_request
from vllm.v1.core.kv_cache_blocks import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.step_builder import StepBuilder


def blocks(*block_ids: int) -> KVCacheBlocks:
    return KVCacheBlocks(([KVCacheBlock(i) for i in block_ids],))


def test_withdrawing_gives_everything_back() -> None:
    step = StepBuilder(100, 0)
    a, b = make_request("a", 10), make_request("b", 10)
    step.add(step.running, a, 30, blocks(1))
    step.spec_tokens["a"] = [1]
    step.add(step.running, b, 10, blocks())
    assert step.token_budget == 60
    assert step.withdraw(a)
    assert not step.withdraw(a)
    assert step.token_budget == 90
    assert step.running == [b]
    assert step.spec_tokens == {}
    assert step.total_num_tokens == 10


def test_messages() -> None:
    step = StepBuilder(100, 0)
    going, resumed, fresh = (make_request(name, 10) for name in ("going", "resumed", "fresh"))
    going.num_computed_tokens = 8
    going.append_output_token_ids([5])
    resumed.append_output_token_ids([6, 7])
    step.add(step.running, going, 3, blocks())
    step.spec_tokens["going"] = [9]
    step.add(step.resumed, resumed, 12, blocks())
    step.add(step.new, fresh, 10, blocks(3, 4))

    (new,) = step.make_new_request_data(resumed_as_new=False)
    assert (new.req_id, new.block_ids, new.prefill_token_ids) == ("fresh", ([3, 4],), None)
    cached = step.make_cached_request_data({"going"}, resumed_as_new=False, sends_new_tokens=True)
    assert cached.req_ids == ["going", "resumed"]
    assert cached.resumed_req_ids == {"resumed"}
    # Blocks of a resumed request replace what the workers held, even if there are none.
    assert cached.new_block_ids == [None, ([],)]
    assert cached.new_token_ids[0] == going.all_token_ids[8:10]
    assert cached.all_token_ids == {"resumed": list(resumed.all_token_ids)}
    assert cached.num_output_tokens == [1, 2]

    news = step.make_new_request_data(resumed_as_new=True)
    assert [data.req_id for data in news] == ["fresh", "resumed"]
    assert news[1].prefill_token_ids == list(resumed.all_token_ids)
    cached = step.make_cached_request_data(set(), resumed_as_new=True, sends_new_tokens=False)
    assert cached.req_ids == ["going"]
    assert cached.new_token_ids == [[]]
    assert set(cached.all_token_ids) == {"going"}
