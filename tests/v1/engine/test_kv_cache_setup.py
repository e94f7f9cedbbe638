import pytest

from tests.v1.engine.fakes import Float32
from vllm.exceptions import ConfigError
from vllm.v1.core.kv_cache_manager import make_kv_cache_manager
from vllm.v1.engine.kv_cache_setup import describe_kv_cache, is_hybrid, plan_kv_cache
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

MEMORY = 1 << 22
COMMON = {"num_kv_heads": 1, "head_size": 8, "dtype": Float32()}


def full(block_size=16):
    return FullAttentionSpec(block_size=block_size, **COMMON)


def hybrid_specs(unit=32):
    return {
        "layers.0.attn.mla": MLAAttentionSpec(block_size=4 * unit, compress_ratio=4, **COMMON),
        "layers.0.attn.window": SlidingWindowMLASpec(block_size=unit, sliding_window=128, **COMMON),
    }


def test_a_plain_model_keeps_the_plain_rules(config):
    vllm_config = config(num_blocks=40)
    plan = plan_kv_cache(vllm_config, [{"a": full(), "b": full()}], [MEMORY])
    assert plan.scheduler_config.hit_unit is None
    assert (plan.scheduler_block_size, plan.hash_block_size) == (16, 16)
    assert vllm_config.cache_config.num_gpu_blocks == 40


@pytest.mark.parametrize("interval", [None, "auto", "0", 0])
def test_a_model_without_windows_has_nothing_to_retain(config, interval, monkeypatch):
    if interval is not None:
        monkeypatch.setenv("VLLM_PREFIX_CACHE_RETENTION_INTERVAL", str(interval))
    vllm_config = config(num_blocks=40)
    vllm_config.cache_config.prefix_cache_retention_interval = interval
    plan = plan_kv_cache(vllm_config, [{"a": full()}], [MEMORY])
    manager = make_kv_cache_manager(
        plan.scheduler_config, 1024, plan.scheduler_block_size, plan.hash_block_size
    )
    assert manager.coordinator.retention_interval is None
    assert describe_kv_cache(vllm_config, plan).retention.startswith("every block")


def test_a_lone_window_group_follows_the_interval(config):
    vllm_config = config(num_blocks=40)
    vllm_config.cache_config.prefix_cache_retention_interval = "64"
    window = SlidingWindowSpec(block_size=16, sliding_window=32, **COMMON)
    plan = plan_kv_cache(vllm_config, [{"a": window}], [MEMORY])
    assert plan.scheduler_config.hit_unit is None
    manager = make_kv_cache_manager(
        plan.scheduler_config, 1024, plan.scheduler_block_size, plan.hash_block_size
    )
    assert manager.coordinator.retention_interval == 64


def test_a_hybrid_model_hits_at_one_unit(config):
    vllm_config = config(num_blocks=600)
    vllm_config.cache_config.block_size = 32
    plan = plan_kv_cache(vllm_config, [hybrid_specs()], [MEMORY])
    assert (plan.scheduler_block_size, plan.hash_block_size) == (32, 32)
    assert plan.scheduler_config.hit_unit == 32
    assert [c.hit_unit for c in plan.worker_configs] == [32]
    info = describe_kv_cache(vllm_config, plan)
    assert (info.hit_unit, info.smallest_reusable_prefix) == (32, 32)
    assert [(g.block_size, g.sliding_window) for g in info.groups] == [(128, None), (32, 128)]
    assert info.capacity_bytes == sum(t.size for t in plan.worker_configs[0].kv_cache_tensors)
    assert "window state" in info.retention


def test_without_prefix_caching_nothing_is_reusable(config):
    vllm_config = config()
    vllm_config.cache_config.enable_prefix_caching = False
    plan = plan_kv_cache(vllm_config, [{"a": full()}], [MEMORY])
    info = describe_kv_cache(vllm_config, plan)
    assert info.smallest_reusable_prefix is None
    assert info.retention == "prefix caching is off"


def test_a_model_without_a_cache_prints(config):
    vllm_config = config()
    info = describe_kv_cache(vllm_config, plan_kv_cache(vllm_config, [{}], [0]))
    assert (info.num_blocks, info.max_concurrency, info.capacity_tokens) == (1, 0.0, 0)


def test_several_groups_without_a_window_are_not_hybrid():
    mla = hybrid_specs()["layers.0.attn.mla"]
    window = hybrid_specs()["layers.0.attn.window"]

    def groups(*specs):
        return [KVCacheGroupSpec([str(i)], spec) for i, spec in enumerate(specs)]

    assert not is_hybrid(groups(full(), mla))
    assert not is_hybrid(groups(window))
    assert is_hybrid(groups(mla, window))


def test_too_little_memory_names_the_way_out(config):
    with pytest.raises(ConfigError, match="lower max_model_len"):
        plan_kv_cache(config(num_blocks=2), [{"a": full()}], [MEMORY])


def test_a_fitted_context_is_taken_over(config):
    vllm_config = config(num_blocks=4)
    vllm_config.model_config.original_max_model_len = -1
    plan = plan_kv_cache(vllm_config, [{"a": full()}], [MEMORY])
    info = describe_kv_cache(vllm_config, plan)
    assert info.max_model_len == vllm_config.model_config.max_model_len == 64
