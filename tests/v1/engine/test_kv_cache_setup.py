from dataclasses import replace

import pytest

from tests.v1.core.v4_geometry import v4_config
from tests.v1.engine.fakes import Float32
from vllm import platforms
from vllm.config import KVTransferConfig, SpeculativeConfig
from vllm.exceptions import ConfigError
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.core.geometry import CacheGeometry
from vllm.v1.core.kv_cache_coordinator import CheckpointCoordinator
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.retention.sizes import check_room_for_one, max_request_blocks
from vllm.v1.engine.kv_cache_setup import (
    check_fixed_pool,
    describe_kv_cache,
    is_hybrid,
    plan_kv_cache,
)
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


def test_a_plain_model_hits_at_a_block(config):
    vllm_config = config(num_blocks=40)
    plan = plan_kv_cache(vllm_config, [{"a": full(), "b": full()}], [MEMORY])
    assert plan.unit == 16
    assert vllm_config.cache_config.num_gpu_blocks == 40


@pytest.mark.parametrize("interval", [None, "auto", "0", 0])
def test_a_model_without_windows_has_nothing_to_retain(config, interval, monkeypatch):
    if interval is not None:
        monkeypatch.setenv("VLLM_PREFIX_CACHE_RETENTION_INTERVAL", str(interval))
    vllm_config = config(num_blocks=40)
    vllm_config.cache_config.prefix_cache_retention_interval = interval
    plan = plan_kv_cache(vllm_config, [{"a": full()}], [MEMORY])
    manager = KVCacheManager(plan.scheduler_config, 512, plan.unit, plan.unit)
    assert not manager.coordinator.geometry.windows
    assert describe_kv_cache(vllm_config, plan).retention.startswith("every block")


def test_the_pinned_share_reaches_the_pool(config, monkeypatch):
    monkeypatch.setenv("VLLM_PIN_SWA_TOKENS", "1")
    vllm_config = config(num_blocks=41)
    vllm_config.cache_config.block_size = 32
    vllm_config.cache_config.prefix_cache_pinned_share = 0.5
    plan = plan_kv_cache(vllm_config, [hybrid_specs()], [MEMORY])
    manager = KVCacheManager(plan.scheduler_config, 256, 32, 32)
    assert manager.block_pool.pins.max_blocks == 20


def test_a_lone_window_group_follows_the_interval(config):
    vllm_config = config(num_blocks=40)
    vllm_config.cache_config.prefix_cache_retention_interval = "64"
    window = SlidingWindowSpec(block_size=16, sliding_window=32, **COMMON)
    plan = plan_kv_cache(vllm_config, [{"a": window}], [MEMORY])
    assert plan.scheduler_config.hit_unit == 16
    manager = KVCacheManager(plan.scheduler_config, 512, plan.unit, plan.unit)
    assert manager.coordinator.policy.interval == 64


@pytest.mark.parametrize(
    ("speculative", "marked"),
    [
        (None, []),
        (SpeculativeConfig(method="mtp"), ["tail"]),
        (SpeculativeConfig(method="ngram"), []),
    ],
)
def test_the_group_of_a_running_drafter_is_marked(config, speculative, marked):
    """By the role of its rows, whatever their name."""
    vllm_config = config(num_blocks=600)
    vllm_config.cache_config.block_size = 32
    vllm_config.speculative_config = speculative
    specs = hybrid_specs()
    specs["tail"] = replace(specs["layers.0.attn.window"], is_drafter=True)
    plan = plan_kv_cache(vllm_config, [specs], [MEMORY])
    groups = [g for g in plan.scheduler_config.kv_cache_groups if g.is_eagle_group]
    assert [name for group in groups for name in group.layer_names] == marked


def test_a_hybrid_takes_no_connector(config):
    """Where the model's name did not tell, its caches do."""
    vllm_config = config(num_blocks=600)
    vllm_config.kv_transfer_config = KVTransferConfig("ExampleConnector", "kv_both")
    with pytest.raises(ConfigError, match="'ExampleConnector' does not go with this model"):
        plan_kv_cache(vllm_config, [hybrid_specs()], [MEMORY])
    plan_kv_cache(vllm_config, [{"a": full()}], [MEMORY])


def test_a_hybrid_model_hits_at_one_unit(config):
    vllm_config = config(num_blocks=600)
    vllm_config.cache_config.block_size = 32
    vllm_config.cache_config.cache_dtype = "float16"
    plan = plan_kv_cache(vllm_config, [hybrid_specs()], [MEMORY])
    assert plan.unit == 32
    assert [c.hit_unit for c in plan.worker_configs] == [32]
    info = describe_kv_cache(vllm_config, plan)
    assert (info.unit, info.smallest_reusable_prefix) == (32, 32)
    assert [(g.block_size, g.sliding_window) for g in info.groups] == [(128, None), (32, 128)]
    assert info.capacity_bytes == sum(t.size for t in plan.worker_configs[0].kv_cache_tensors)
    assert "window state" in info.retention
    assert info.cache_dtype == "float16"


class TwoRowsMore(CheckpointCoordinator):
    """A platform's own."""

    @classmethod
    def arrange(cls, config):
        full_group, window = config.kv_cache_groups
        return replace(config, kv_cache_groups=[full_group, replace(window, extra_rows=2)])


def test_the_platform_chooses_the_coordinator(config, monkeypatch):
    class Own(CpuPlatform):
        def kv_cache_coordinator_path(self, vllm_config):
            assert vllm_config.cache_config.block_size == 32
            return f"{__name__}.TwoRowsMore"

    vllm_config = config(num_blocks=600)
    vllm_config.cache_config.block_size = 32
    plan = plan_kv_cache(vllm_config, [hybrid_specs()], [MEMORY])
    assert plan.scheduler_config.coordinator_path is None
    monkeypatch.setattr(platforms, "current_platform", Own(), raising=False)
    plan = plan_kv_cache(vllm_config, [hybrid_specs()], [MEMORY])
    assert plan.scheduler_config.coordinator_path == f"{__name__}.TwoRowsMore"
    # What it decides about groups, workers and scheduler hear alike.
    for made in (plan.scheduler_config, *plan.worker_configs):
        assert [group.extra_rows for group in made.kv_cache_groups] == [0, 2]


def test_what_a_checkpoint_weighs(config):
    window = SlidingWindowSpec(block_size=16, sliding_window=33, **COMMON)
    specs = {"f": full(), "w0": window, "w1": window}
    vllm_config = config(num_blocks=400)
    plan = plan_kv_cache(vllm_config, [specs], [MEMORY])
    # 32 rows below a boundary stand in two blocks, in each of two groups; a block of full
    # attention holds 16 tokens.
    assert describe_kv_cache(vllm_config, plan).checkpoint_tokens == 2 * 2 * 16
    plain = config(num_blocks=40)
    plan = plan_kv_cache(plain, [{"f": full()}], [MEMORY])
    assert describe_kv_cache(plain, plan).checkpoint_tokens is None


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
    vllm_config = config(num_blocks=5)
    vllm_config.model_config.original_max_model_len = -1
    plan = plan_kv_cache(vllm_config, [{"a": full()}], [MEMORY])
    info = describe_kv_cache(vllm_config, plan)
    assert info.max_model_len == vllm_config.model_config.max_model_len == 64


class TestFixedPool:
    """A pool of known size is checked before weights load."""

    PAGE = 16 * 2 * 8 * 4  # tokens, K and V, head size, float32

    def check(self, vllm_config, fixed_bytes, total_bytes=1 << 40, specs=None):
        check_fixed_pool(vllm_config, [specs or {"a": full()}], fixed_bytes, lambda: total_bytes)

    def test_an_unknown_size_is_not_checked(self, config):
        vllm_config = config()
        vllm_config.cache_config.num_gpu_blocks_override = None
        check_fixed_pool(vllm_config, [{"a": full()}], None, pytest.fail)

    def test_bytes(self, config):
        vllm_config = config()
        vllm_config.cache_config.num_gpu_blocks_override = None
        needed = (256 // 16 + 1) * self.PAGE  # and the null block
        self.check(vllm_config, needed)
        with pytest.raises(ConfigError, match=r"15 usable blocks, but .* max seq len 256 needs 16"):
            self.check(vllm_config, needed - 1)
        with pytest.raises(ConfigError, match=r"max seq len \(256\)"):
            self.check(vllm_config, needed - 1 - self.PAGE)
        self.check(vllm_config, 1 << 30, total_bytes=1 << 30)
        with pytest.raises(ConfigError, match=r"4\.00 GiB does not fit .* memory of 2\.00 GiB"):
            self.check(vllm_config, 4 << 30, total_bytes=2 << 30)
        # Nothing of the trial is left.
        assert vllm_config.cache_config.num_gpu_blocks is None

    def test_blocks_win_over_bytes(self, config):
        self.check(config(num_blocks=17), 1)
        with pytest.raises(ConfigError, match="num-gpu-blocks-override"):
            self.check(config(num_blocks=16), 1 << 30)
        with pytest.raises(ConfigError, match="num_gpu_blocks_override"):
            self.check(config(num_blocks=15), 1 << 30)
        with pytest.raises(ConfigError, match="does not fit in the device's memory"):
            self.check(config(num_blocks=1 << 31), None)

    def test_it_refuses_what_would_be_refused_after_loading(self, config):
        vllm_config = config(num_blocks=600)
        vllm_config.cache_config.block_size = 32
        refused = []
        for num_blocks in range(1, 40):
            vllm_config.cache_config.num_gpu_blocks_override = num_blocks
            outcomes = []
            for attempt in (
                lambda: self.check(vllm_config, None, specs=hybrid_specs()),
                lambda: self.load(vllm_config),
            ):
                try:
                    attempt()
                except ConfigError as error:
                    outcomes.append(str(error))
                else:
                    outcomes.append(None)
            assert outcomes[0] == outcomes[1], num_blocks
            refused.append(outcomes[0] is not None)
        assert set(refused) == {False, True}

    def load(self, vllm_config):
        plan = plan_kv_cache(vllm_config, [hybrid_specs()], [MEMORY])
        sizes = plan.unit, plan.unit
        max_model_len = vllm_config.model_config.max_model_len
        KVCacheManager(plan.scheduler_config, max_model_len, *sizes)

    def test_the_windows_beside_the_longest_request_count(self):
        geometry = CacheGeometry.from_config(v4_config(32, 500))
        needed = max_request_blocks(geometry, 1024, 2)
        check_room_for_one(geometry, needed + 1, 1024, 2)
        with pytest.raises(ConfigError, match=f"{needed - 1} usable blocks, .* needs {needed}: "):
            check_room_for_one(geometry, needed, 1024, 2)

    def test_a_length_to_be_fitted_needs_room_for_one_token(self, config):
        vllm_config = config()
        vllm_config.cache_config.num_gpu_blocks_override = None
        vllm_config.model_config.original_max_model_len = -1
        self.check(vllm_config, 2 * self.PAGE)
        with pytest.raises(ConfigError):
            self.check(vllm_config, 2 * self.PAGE - 1)
        assert vllm_config.model_config.max_model_len == 256
