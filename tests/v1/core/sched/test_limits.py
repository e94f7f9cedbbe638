"""Numbers read from the configuration."""

from typing import Any

import pytest

from vllm.config import ModelConfig, ParallelConfig, SchedulerConfig, SpeculativeConfig, VllmConfig
from vllm.v1.core.sched.limits import SchedulerLimits
from vllm.v1.core.sched.request_queue import SchedulingPolicy


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
