"""Events, metrics, configurations, connectors and sampling (sections 11 to 14)."""

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.v1.core.cache_helpers import make_config, make_manager, make_request
from tests.v1.core.specs import swa
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    ECTransferConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.config.kv_events import KVEventsConfig
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventPublisherFactory,
)
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_metrics import BlockMetricsState, KVCacheMetricsCollector
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_cache_interface import KVCacheGroupSpec
from vllm.v1.metrics.stats import CachingMetrics, PrefixCacheStats
from vllm.v1.worker.utils import add_kv_sharing_layers_to_kv_cache_groups

# ---- 11 events -----------------------------------------------------------------------------------


def test_events_are_values() -> None:
    stored = BlockStored([1], None, [5, 6], 2, None, "GPU", None)
    assert (stored.extra_keys, stored.group_idx, stored.kv_cache_spec_kind) == (None, None, None)
    assert stored == BlockStored([1], None, [5, 6], 2, None, "GPU", None)
    stored.group_idx = 3
    assert stored != BlockStored([1], None, [5, 6], 2, None, "GPU", None)
    assert BlockRemoved([1], "GPU") == BlockRemoved([1], "GPU")
    assert AllBlocksCleared() == AllBlocksCleared()


def test_a_manager_says_of_which_kind_a_stored_block_is() -> None:
    manager = make_manager(make_config(4, [swa()]), enable_kv_cache_events=True)
    for i in range(2):
        request = make_request(str(i), [i] * 33)
        assert manager.allocate_slots(request, 33) is not None
        manager.free(request)
    events = manager.take_events()
    stored = [event for event in events if isinstance(event, BlockStored)]
    assert {(e.kv_cache_spec_kind, e.kv_cache_spec_sliding_window) for e in stored} == {
        ("sliding_window", 128)
    }
    # What the second took was removed before its own were stored.
    kinds = [type(event).__name__ for event in events]
    assert kinds == ["BlockStored", "BlockRemoved", "BlockRemoved", "BlockStored"]
    assert all(event.group_idx == 0 for event in events)


def test_events_are_off_unless_asked_for() -> None:
    publisher = EventPublisherFactory.create(KVEventsConfig(), 0)
    assert "null" in type(publisher).__name__.lower()
    publisher.shutdown()
    config = VllmConfig(kv_events_config=KVEventsConfig(enable_kv_cache_events=True))
    assert config.scheduler_config.disable_hybrid_kv_cache_manager is False


# ---- 12 metrics and helpers ----------------------------------------------------------------------


def test_hit_rates_of_recent_requests() -> None:
    metrics = CachingMetrics(max_recent_requests=5)
    assert metrics.hit_rate == 0.0
    stats = PrefixCacheStats()
    assert dataclasses.astuple(stats)[:4] == (False, 0, 0, 0)
    stats.record(num_tokens=100, num_hits=20, preempted=False)
    stats.record(num_tokens=10, num_hits=10, preempted=True)
    assert (stats.requests, stats.queries, stats.hits) == (1, 100, 20)
    assert (stats.preempted_requests, stats.preempted_queries, stats.preempted_hits) == (1, 10, 10)
    metrics.observe(stats)
    assert metrics.hit_rate == 0.2
    metrics.observe(PrefixCacheStats())
    assert len(metrics.query_queue) == 1
    # More than the limit at once: the newest stays.
    metrics.observe(PrefixCacheStats(requests=9, queries=900, hits=900))
    assert (metrics.aggregated_requests, metrics.hit_rate) == (9, 1.0)
    assert (metrics.aggregated_query_total, metrics.aggregated_query_hit) == (900, 900)
    metrics.observe(PrefixCacheStats(reset=True, requests=1, queries=4, hits=1))
    assert metrics.hit_rate == 0.25
    metrics.reset()
    assert metrics.hit_rate == 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    now = [0]
    monkeypatch.setattr(time, "monotonic_ns", lambda: now[0])
    return iter([now])  # type: ignore[return-value]


def test_a_blocks_life(clock: Iterator[list[int]]) -> None:
    now = next(clock)
    state = BlockMetricsState()
    for second in (1, 3, 6, 10, 15):
        now[0] = second * 10**9
        state.record_access()
    now[0] = 20 * 10**9
    assert state.birth_time_ns == 0
    assert state.access_history.maxlen == 4
    assert (state.get_lifetime_seconds(), state.get_idle_time_seconds()) == (20.0, 5.0)
    assert state.get_reuse_gaps_seconds() == [3.0, 4.0, 5.0]


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.1])
def test_sample_rates(rate: float) -> None:
    with pytest.raises(AssertionError):
        KVCacheMetricsCollector(rate)


def test_a_collector_samples_lives() -> None:
    collector = KVCacheMetricsCollector(1.0)
    block = KVCacheBlock(7)
    collector.on_block_allocated(block)
    assert set(collector.block_metrics) == {7}
    collector.on_block_accessed(block)
    collector.on_block_evicted(block)
    (event,) = collector.drain_events()
    assert isinstance(event.reuse_gaps_seconds, tuple)
    assert event.lifetime_seconds >= event.idle_seconds >= 0
    assert collector.drain_events() == []
    collector.on_block_allocated(block)
    collector.reset()
    assert not collector.block_metrics


def test_layers_that_share_rows_join_their_targets_group() -> None:
    groups = [KVCacheGroupSpec(["a"], swa()), KVCacheGroupSpec(["b"], swa())]
    add_kv_sharing_layers_to_kv_cache_groups({"c": "b"}, groups)
    assert [group.layer_names for group in groups] == [["a"], ["b", "c"]]


# ---- 13 configurations ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        (CacheConfig(), {"block_size": 16, "enable_prefix_caching": True, "hash_block_size": None}),
        (CacheConfig(), {"prefix_caching_hash_algo": "sha256", "num_gpu_blocks_override": None}),
        (CacheConfig(), {"mamba_cache_mode": "none", "cache_dtype": "auto"}),
        (SchedulerConfig(), {"max_num_batched_tokens": 2048, "max_num_seqs": 128}),
        (SchedulerConfig(), {"max_num_scheduled_tokens": None, "enable_chunked_prefill": True}),
        (SchedulerConfig(), {"policy": "fcfs", "scheduler_reserve_full_isl": True}),
        (SchedulerConfig(max_num_batched_tokens=99, max_num_seqs=9), {"encoder_cache_size": 99}),
        (ParallelConfig(), {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1}),
        (ParallelConfig(), {"pipeline_parallel_size": 1, "data_parallel_index": 0}),
        (KVEventsConfig(), {"enable_kv_cache_events": False}),
        (ModelConfig("m", max_model_len=-1), {"original_max_model_len": -1}),
        (ModelConfig("m"), {"original_max_model_len": None, "is_encoder_decoder": False}),
    ],
)
def test_defaults(config: Any, fields: dict[str, Any]) -> None:
    assert {name: getattr(config, name) for name in fields} == fields


def test_lengths_of_a_scheduler_are_no_fields() -> None:
    config = SchedulerConfig(max_model_len=100, is_encoder_decoder=True)
    names = {field.name for field in dataclasses.fields(config)}
    assert not names & {"max_model_len", "is_encoder_decoder"}
    assert (config.enable_chunked_prefill, config.disable_chunked_mm_input) == (False, True)
    assert config.long_prefill_token_threshold == 0
    assert SchedulerConfig.DEFAULT_MAX_NUM_BATCHED_TOKENS == 2048


@pytest.mark.parametrize(
    "fields",
    [
        {"max_model_len": 4096, "max_num_batched_tokens": 2048, "enable_chunked_prefill": False},
        {"max_num_batched_tokens": 8, "max_num_seqs": 9},
    ],
)
def test_steps_that_are_too_small(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        SchedulerConfig(**fields)


def test_parts_are_kept_by_reference() -> None:
    cache, scheduler = CacheConfig(), SchedulerConfig()
    config = VllmConfig(cache_config=cache, scheduler_config=scheduler)
    assert config.cache_config is cache
    cache.num_gpu_blocks = 5
    assert config.cache_config.num_gpu_blocks == 5
    assert (config.lora_config, config.use_v2_model_runner) == (None, False)
    observed = config.observability_config
    assert (observed.kv_cache_metrics, observed.enable_mfu_metrics) == (False, False)
    assert scheduler.disable_hybrid_kv_cache_manager is False
    assert DeviceConfig("cpu").device == DeviceConfig(device="cpu").device


def test_a_drafter_of_text_is_no_eagle() -> None:
    config = SpeculativeConfig(model="ngram", num_speculative_tokens=3)
    assert config.method == "ngram"
    assert not config.use_eagle()


def test_transfers() -> None:
    transfer = KVTransferConfig(
        kv_connector="X", kv_role="kv_both", kv_connector_extra_config={"a": 1}
    )
    assert (transfer.get_from_extra_config("a", 0), transfer.get_from_extra_config("b", 2)) == (
        1,
        2,
    )
    assert transfer.kv_load_failure_policy == "fail"
    encoder = ECTransferConfig(
        ec_connector="X", ec_role="ec_consumer", ec_connector_extra_config={"a": 1}
    )
    assert (encoder.is_ec_consumer, encoder.is_ec_producer) == (True, False)
    assert encoder.get_from_extra_config("a", 0) == 1


# ---- 14 connectors, items, sampling --------------------------------------------------------------


class Plain(KVConnectorBase_V1):
    """A connector that overrides what the interface calls abstract, and nothing else."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass


def test_a_connector_has_harmless_defaults() -> None:
    transfer = KVTransferConfig(kv_connector="X", kv_role="kv_both")
    connector = Plain(
        VllmConfig(kv_transfer_config=transfer), KVConnectorRole.SCHEDULER, make_config(4, [swa()])
    )
    assert connector.role is KVConnectorRole.SCHEDULER
    assert connector._kv_transfer_config is transfer
    assert connector.request_finished(None, []) == (False, None)
    assert tuple(connector.take_events()) == ()
    for call in (connector.on_new_request, connector.bind_gpu_block_pool):
        call(None)
    connector.update_connector_output(None)
    connector.reset_cache()
    connector.get_kv_connector_stats()
    connector.shutdown()


def test_a_connector_is_registered_once() -> None:
    with pytest.raises(ValueError, match="ExampleConnector"):
        KVConnectorFactory.register_connector("ExampleConnector", "nowhere", "Nothing")


def test_placeholders() -> None:
    item = PlaceholderRange(offset=4, length=6)
    assert item.get_num_embeds() == 6
    assert item.get_embeds_indices_in_range(1, 4) == (1, 4)


def test_sampling_parameters() -> None:
    params = SamplingParams()
    assert (params.max_tokens, params.min_tokens, params.ignore_eos) == (16, 0, False)
    assert (params.prompt_logprobs, params.structured_outputs, params.extra_args) == (None,) * 3
    params.update_from_generation_config({}, eos_token_id=7)
    assert params.eos_token_id == 7
    adapter = LoRARequest("name", 3, "path")
    assert (adapter.adapter_id, adapter.name, adapter.lora_int_id) == (3, "name", 3)
