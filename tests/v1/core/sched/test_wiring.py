"""Parts of a scheduler, from the configuration."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from tests.v1.core.sched.builders import full_config
from vllm.config import (
    ECTransferConfig,
    KVTransferConfig,
    ModelConfig,
    ObservabilityConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.distributed.ec_transfer.ec_connector.example_connector import ECExampleConnector
from vllm.exceptions import ConfigError
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager, EncoderDecoderCacheManager
from vllm.v1.core.kv_cache_metrics import KVCacheMetricsCollector
from vllm.v1.core.sched.encoder_inputs import EncoderPlanner
from vllm.v1.core.sched.step_builder import SchedulerLimits
from vllm.v1.core.sched.wiring import make_connector, make_encoder_planner, make_manager


def config(**kwargs: Any) -> VllmConfig:
    return VllmConfig(model_config=ModelConfig("test", skip_tokenizer_init=True), **kwargs)


def planner(vllm_config: VllmConfig, registry: Any = None) -> EncoderPlanner:
    return make_encoder_planner(vllm_config, SchedulerLimits.from_config(vllm_config), registry)


def multimodal(largest: int, **kwargs: Any) -> tuple[Any, Any]:
    """A multimodal model's configuration, and the registry that knows its largest item."""
    plain = config(scheduler_config=SchedulerConfig(**kwargs))
    model = SimpleNamespace(is_multimodal_model=True, is_encoder_decoder=False, max_model_len=2048)
    registry = Mock(get_max_tokens_per_item_by_modality=Mock(return_value={"image": largest}))
    return SimpleNamespace(**{**vars(plain), "model_config": model}), registry


def test_a_text_model_has_no_room_for_encoder_outputs() -> None:
    made = planner(config())
    assert isinstance(made.cache, EncoderCacheManager)
    assert (made.cache.cache_size, made.compute_budget, made.shift) == (0, 0, 0)
    assert made.ec_connector is None
    assert not made.is_encoder_decoder


def test_the_largest_item_always_has_room() -> None:
    made = planner(*multimodal(576, max_num_batched_tokens=100, max_num_seqs=10))
    assert made.compute_budget == 576
    assert made.cache.cache_size == 576


@pytest.mark.parametrize(("batched", "room"), [(100, 576), (1024, 1024)])
def test_a_model_has_its_own_room_without_a_registry(batched: int, room: int) -> None:
    limits = SchedulerConfig(max_num_batched_tokens=batched, max_num_seqs=10)
    model = ModelConfig("llava-hf/llava-1.5-7b-hf", skip_tokenizer_init=True)
    made = planner(VllmConfig(model_config=model, scheduler_config=limits))
    assert (made.compute_budget, made.cache.cache_size) == (room, room)


def test_an_item_that_can_neither_be_split_nor_computed_at_once_is_refused() -> None:
    limits = {"max_num_batched_tokens": 100, "max_num_seqs": 10, "disable_chunked_mm_input": True}
    with pytest.raises(ConfigError, match="576"):
        planner(*multimodal(576, **limits))


def test_cross_attention_keeps_its_own_cache() -> None:
    model = ModelConfig("test", skip_tokenizer_init=True, is_encoder_decoder=True)
    made = planner(VllmConfig(model_config=model))
    assert isinstance(made.cache, EncoderDecoderCacheManager)
    assert made.is_encoder_decoder


def test_a_drafter_reads_one_token_ahead() -> None:
    speculative = SpeculativeConfig(method="mtp", num_speculative_tokens=2)
    assert planner(config(speculative_config=speculative)).shift == 1


def test_connectors_are_made_if_asked_for() -> None:
    assert make_connector(config(), full_config(10), Mock()) is None
    transfer = KVTransferConfig(
        kv_connector="ScriptedConnector",
        kv_role="kv_both",
        kv_connector_module_path="tests.v1.core.sched.scripted_connector",
    )
    made = make_connector(config(kv_transfer_config=transfer), full_config(10), Mock())
    assert type(made).__name__ == "ScriptedConnector"
    encoder = ECTransferConfig(ec_connector="ECExampleConnector", ec_role="ec_consumer")
    assert isinstance(planner(config(ec_transfer_config=encoder)).ec_connector, ECExampleConnector)


@pytest.mark.parametrize("samples", [False, True])
def test_block_lifetimes_are_sampled_if_asked_for(samples: bool) -> None:
    observability = ObservabilityConfig(kv_cache_metrics=samples)
    vllm_config = config(observability_config=observability)
    limits = SchedulerLimits.from_config(vllm_config)
    manager = make_manager(vllm_config, full_config(10), limits, 16, 16)
    found = manager.block_pool.metrics_collector
    assert isinstance(found, KVCacheMetricsCollector) is samples
