"""What bounds a step; budgets and messages of one."""

from typing import Any

import pytest

from tests.v1.core.sched.builders import make_request
from vllm.config import ModelConfig, ParallelConfig, SchedulerConfig, SpeculativeConfig, VllmConfig
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem, PlaceholderRange
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.step_builder import SchedulerLimits, StepBuilder
from vllm.v1.core.values.kv_cache_blocks import KVCacheBlocks


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


def limits(**kwargs: Any) -> SchedulerLimits:
    return SchedulerLimits.from_config(VllmConfig(model_config=ModelConfig("test"), **kwargs))


def test_defaults() -> None:
    found = limits()
    assert found.policy is SchedulingPolicy.FCFS
    assert found.max_num_tokens == SchedulerConfig.DEFAULT_MAX_NUM_BATCHED_TOKENS
    assert found.reserve_full_isl
    assert (found.num_spec_tokens, found.num_lookahead_tokens, found.use_eagle) == (0, 0, False)
    assert not found.sends_new_tokens


def test_scheduled_tokens_beat_batched_tokens() -> None:
    config = SchedulerConfig(max_num_batched_tokens=500, max_num_scheduled_tokens=200)
    assert limits(scheduler_config=config).max_num_tokens == 200


@pytest.mark.parametrize(("method", "eagle"), [("ngram", False), ("mtp", True), ("eagle", True)])
def test_only_drafters_with_kv_look_ahead(method: str, eagle: bool) -> None:
    found = limits(speculative_config=SpeculativeConfig(method=method, num_speculative_tokens=3))
    assert found.num_spec_tokens == 3
    assert found.use_eagle is eagle
    assert found.num_lookahead_tokens == (3 if eagle else 0)


def test_pipelines_need_the_tokens() -> None:
    parallel = ParallelConfig(pipeline_parallel_size=2)
    assert limits(parallel_config=parallel).sends_new_tokens
    config = SchedulerConfig(async_scheduling=True)
    assert not limits(parallel_config=parallel, scheduler_config=config).sends_new_tokens


def test_chunk_cap() -> None:
    assert limits().cap_chunk(10_000) == 10_000
    found = limits(scheduler_config=SchedulerConfig(long_prefill_token_threshold=50))
    assert [found.cap_chunk(n) for n in (49, 50, 51)] == [49, 50, 50]


def test_withdrawing_gives_the_encoders_budget_back() -> None:
    step = StepBuilder(100, 50)
    feature = MultiModalFeatureSpec(
        MultiModalKwargsItem.dummy(), "image", "a", PlaceholderRange(0, 20)
    )
    request = make_request("0", 40, mm_features=[feature])
    step.add(step.running, request, 40, blocks())
    step.encoder_inputs["0"], step.encoder_budget = [0], 30
    assert (step.token_budget, step.total_num_tokens) == (60, 40)
    assert step.withdraw(request)
    assert (step.token_budget, step.encoder_budget, step.running) == (100, 50, [])
    assert not step.withdraw(request)
    assert (step.token_budget, step.encoder_budget) == (100, 50)
