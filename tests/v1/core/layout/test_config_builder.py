import copy

import pytest

from tests.v1.core.specs import full, make_vllm_config, mla, swa, swa_mla
from tests.v1.core.v4_geometry import v4_specs
from vllm.config import KVTransferConfig
from vllm.exceptions import ConfigError
from vllm.utils.mem_constants import GiB_bytes
from vllm.v1.core.geometry import CacheGeometry
from vllm.v1.core.layout import config_builder as builder
from vllm.v1.core.layout.config_builder import (
    _project_kv_cache_groups_to_worker,
    generate_scheduler_kv_cache_config,
    get_kv_cache_configs,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.layout.sizing import get_max_concurrency_for_kv_cache_config
from vllm.v1.core.retention.sizes import max_request_blocks
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    UniformTypeKVCacheSpecs,
)

PAGE = full().page_size_bytes


def named(prefix, spec, n):
    return {f"{prefix}{i}": spec for i in range(n)}


class TestOneWorker:
    def test_no_cache_at_all(self):
        assert get_kv_cache_configs(make_vllm_config(), [{}, {}], [0, 0]) == [
            KVCacheConfig(1, [], []),
            KVCacheConfig(1, [], []),
        ]

    def test_one_tensor_per_layer(self):
        memory = PAGE * 2 * 70 + 5
        assert get_kv_cache_configs(make_vllm_config(), [named("l", full(), 2)], [memory]) == [
            KVCacheConfig(
                num_blocks=70,
                kv_cache_tensors=[
                    KVCacheTensor(70 * PAGE, ["l0"]),
                    KVCacheTensor(70 * PAGE, ["l1"]),
                ],
                kv_cache_groups=[KVCacheGroupSpec(["l0", "l1"], full())],
            )
        ]

    def test_groups_share_tensors(self):
        specs = named("f", full(), 2) | named("w", swa(), 3)
        [config] = get_kv_cache_configs(make_vllm_config(), [specs], [PAGE * 2 * 200])
        assert config.num_blocks == 200
        assert config.kv_cache_tensors == [
            KVCacheTensor(200 * PAGE, ["f0", "w0", "w1"]),
            KVCacheTensor(200 * PAGE, ["f1", "w2"]),
        ]

    def test_unequal_widths_have_own_tensors(self):
        wide = full(head_size=192)
        specs = {"a": full(), "b": wide}
        total = PAGE + wide.page_size_bytes
        [config] = get_kv_cache_configs(make_vllm_config(), [specs], [total * 64 + 7])
        assert config.num_blocks == 64
        assert config.kv_cache_tensors == [
            KVCacheTensor(64 * PAGE, ["a"]),
            KVCacheTensor(64 * wide.page_size_bytes, ["b"]),
        ]
        assert config.kv_cache_groups[0].kv_cache_spec == UniformTypeKVCacheSpecs(16, specs)

    def test_override_replaces_memory(self):
        config = make_vllm_config(num_gpu_blocks_override=80)
        [result] = get_kv_cache_configs(config, [named("l", full(), 2)], [0])
        assert result.num_blocks == 80
        assert [tensor.size for tensor in result.kv_cache_tensors] == [80 * PAGE, 80 * PAGE]

    def test_unknown_spec(self):
        with pytest.raises(ValueError, match="layer x"):
            get_kv_cache_configs(make_vllm_config(), [{"x": KVCacheSpec(16)}], [GiB_bytes])


class TestMemoryCheck:
    def test_exactly_one_request(self):
        needed = PAGE * 2 * 64
        specs = [named("l", full(), 2)]
        [config] = get_kv_cache_configs(make_vllm_config(1024), specs, [needed])
        assert config.num_blocks == 64
        with pytest.raises(ValueError, match="max seq len") as error:
            get_kv_cache_configs(make_vllm_config(1024), specs, [needed - 1])
        assert isinstance(error.value, ConfigError)
        assert "longest length that fits is 1008" in str(error.value)

    @pytest.mark.parametrize("memory", [0, -1])
    def test_no_memory(self, memory):
        with pytest.raises(ValueError, match="no memory for KV cache blocks"):
            get_kv_cache_configs(make_vllm_config(), [named("l", full(), 2)], [memory])

    def test_override_too_small(self):
        config = make_vllm_config(1024, num_gpu_blocks_override=63)
        with pytest.raises(ValueError, match="max seq len"):
            get_kv_cache_configs(config, [named("l", full(), 2)], [GiB_bytes])

    def test_the_smaller_worker_decides(self):
        specs = [named("l", full(), 2), named("m", full(), 2)]
        with pytest.raises(ValueError, match="max seq len"):
            get_kv_cache_configs(make_vllm_config(1024), specs, [GiB_bytes, PAGE])


class TestFitModelLen:
    def test_shrinks_to_what_fits(self):
        config = make_vllm_config(1024, original_max_model_len=-1)
        get_kv_cache_configs(config, [named("l", full(), 2)], [PAGE * 2 * 40])
        assert config.model_config.max_model_len == 640

    def test_never_grows(self):
        config = make_vllm_config(1024, original_max_model_len=-1)
        get_kv_cache_configs(config, [named("l", full(), 2)], [GiB_bytes])
        assert config.model_config.max_model_len == 1024

    def test_smallest_worker(self):
        config = make_vllm_config(1024, original_max_model_len=-1)
        specs = [named("l", full(), 2), named("m", full(), 2)]
        get_kv_cache_configs(config, specs, [PAGE * 2 * 40, PAGE * 2 * 30])
        assert config.model_config.max_model_len == 480

    def test_nothing_fits(self):
        config = make_vllm_config(1024, original_max_model_len=-1)
        with pytest.raises(ValueError, match="does not hold one token"):
            get_kv_cache_configs(config, [named("l", full(), 2)], [PAGE])
        assert config.model_config.max_model_len == 1024

    def test_only_if_asked(self):
        config = make_vllm_config(1024, original_max_model_len=1024)
        with pytest.raises(ValueError, match="max seq len"):
            get_kv_cache_configs(config, [named("l", full(), 2)], [PAGE * 2 * 40])


class TestWorkers:
    def test_minimum_of_blocks(self):
        """Every worker ends with the fewest blocks, and tensors to match."""
        specs = [named("l", full(), 2), named("m", full(), 3)]
        memory = [PAGE * 2 * 100, PAGE * 3 * 70]
        first, second = get_kv_cache_configs(make_vllm_config(), specs, memory)
        assert first.num_blocks == second.num_blocks == 70
        assert [t.size for t in first.kv_cache_tensors] == [70 * PAGE] * 2
        assert [t.size for t in second.kv_cache_tensors] == [70 * PAGE] * 3
        assert first.kv_cache_groups == [KVCacheGroupSpec(["l0", "l1"], full())]
        assert second.kv_cache_groups == [KVCacheGroupSpec(["m0", "m1", "m2"], full())]

    def test_tensor_parallel_workers_hold_the_same(self):
        specs = named("l", full(), 2)
        configs = get_kv_cache_configs(make_vllm_config(), [specs, dict(specs)], [GiB_bytes] * 2)
        assert configs[0] == configs[1]

    def test_groups_are_global(self):
        """A pipeline stage without a layer of a group still has the group."""
        specs = [{"f0": full(), "w0": swa()}, {"w1": swa()}]
        first, second = get_kv_cache_configs(make_vllm_config(), specs, [GiB_bytes] * 2)
        assert [g.layer_names for g in first.kv_cache_groups] == [["f0"], ["w0"], []]
        assert [g.layer_names for g in second.kv_cache_groups] == [[], [], ["w1"]]
        assert [t.shared_by for t in first.kv_cache_tensors] == [["f0", "w0"]]
        assert [t.shared_by for t in second.kv_cache_tensors] == [["w1"]]
        assert first.num_blocks == second.num_blocks

    def test_stage_without_layers(self):
        specs = [{}, named("l", full(), 2)]
        first, second = get_kv_cache_configs(make_vllm_config(), specs, [0, PAGE * 2 * 70])
        assert first == KVCacheConfig(70, [], [KVCacheGroupSpec([], full())])
        assert second.num_blocks == 70

    def test_disagreement(self):
        with pytest.raises(AssertionError, match="layer a"):
            get_kv_cache_configs(
                make_vllm_config(), [{"a": full()}, {"a": full(head_size=8)}], [GiB_bytes] * 2
            )


class TestProjection:
    def test_spec_by_identity(self):
        spec = full()
        groups = [KVCacheGroupSpec(["a", "b"], spec, is_eagle_group=True)]
        [mine] = _project_kv_cache_groups_to_worker(groups, {"b": full()})
        assert mine.kv_cache_spec is spec
        assert mine.layer_names == ["b"]
        assert mine.is_eagle_group
        [none] = _project_kv_cache_groups_to_worker(groups, {"c": full()})
        assert none == KVCacheGroupSpec([], spec, is_eagle_group=False)
        assert groups[0].layer_names == ["a", "b"]

    def test_uniform_is_narrowed(self):
        inner = {"a": full(), "b": full(head_size=8)}
        groups = [KVCacheGroupSpec(["a", "b"], UniformTypeKVCacheSpecs(16, inner))]
        [mine] = _project_kv_cache_groups_to_worker(groups, {"b": inner["b"], "z": full()})
        assert mine.kv_cache_spec == UniformTypeKVCacheSpecs(16, {"b": inner["b"]})
        assert groups[0].kv_cache_spec.kv_cache_specs == inner


class TestPackedPool:
    RATIOS = (0, 4, 128, 4)

    def test_whole_pool_is_one_tensor(self):
        specs = v4_specs(32, list(self.RATIOS))
        config = make_vllm_config(4096, block_size=32)
        [result] = get_kv_cache_configs(config, [specs], [GiB_bytes])
        [tensor] = result.kv_cache_tensors
        assert set(tensor.shared_by) == set(specs) == set(tensor.offsets)
        assert result.num_blocks == GiB_bytes // tensor.block_stride
        assert tensor.size == result.num_blocks * tensor.block_stride
        assert result.hit_unit is None  # the engine core's decision

    def test_needs_what_admission_counts(self):
        """The start-up check and the admission gate agree to the block, null block besides."""
        specs = v4_specs(32, list(self.RATIOS))
        config = make_vllm_config(4096, block_size=32)
        [big] = get_kv_cache_configs(config, [specs], [GiB_bytes])
        geometry = CacheGeometry.from_config(KVCacheConfig(1, [], big.kv_cache_groups, hit_unit=32))
        needed = max_request_blocks(geometry, 4096) + 1
        stride = big.kv_cache_tensors[0].block_stride
        [exact] = get_kv_cache_configs(config, [specs], [needed * stride])
        assert exact.num_blocks == needed
        with pytest.raises(ValueError, match="max seq len"):
            get_kv_cache_configs(config, [specs], [needed * stride - 1])
        override = make_vllm_config(4096, block_size=32, num_gpu_blocks_override=needed)
        [overridden] = get_kv_cache_configs(override, [specs], [0])
        assert overridden == exact

    def test_blocks_that_fit_no_unit(self):
        """Latent windows outside DeepSeek-V4 fall back to the specs' own bounds."""
        specs = {"c": mla(block_size=48), "w": swa_mla(block_size=48)}
        config = make_vllm_config(480, block_size=32, max_num_batched_tokens=100)
        [result] = get_kv_cache_configs(config, [specs], [GiB_bytes])
        concurrency = get_max_concurrency_for_kv_cache_config(config, result)
        assert concurrency == result.num_blocks / (10 + 6)

    def test_smaller_worker_shrinks_the_pool(self):
        specs = v4_specs(32, list(self.RATIOS))
        config = make_vllm_config(4096, block_size=32)
        big, small = get_kv_cache_configs(config, [specs, dict(specs)], [GiB_bytes, GiB_bytes // 2])
        assert big == small


class TestSchedulerConfig:
    def test_uniform_group_is_represented(self):
        inner = {"a": full(), "b": full(head_size=8)}
        worker = KVCacheConfig(
            10,
            [KVCacheTensor(10, ["a"])],
            [KVCacheGroupSpec(["a", "b"], UniformTypeKVCacheSpecs(16, inner))],
        )
        before = copy.deepcopy(worker)
        result = generate_scheduler_kv_cache_config([worker, worker])
        assert result.kv_cache_groups == [KVCacheGroupSpec(["a", "b"], full())]
        assert result.num_blocks == 10
        assert worker == before
        result.kv_cache_groups[0].layer_names.append("x")
        assert worker == before

    def test_equal_pools(self):
        with pytest.raises(AssertionError, match=r"\[1, 2\]"):
            generate_scheduler_kv_cache_config([KVCacheConfig(1, [], []), KVCacheConfig(2, [], [])])


class TestBlockSizes:
    def config(self, sizes, hit_unit=None):
        groups = [KVCacheGroupSpec([str(i)], full(block_size=s)) for i, s in enumerate(sizes)]
        return KVCacheConfig(10, [], groups, hit_unit=hit_unit)

    @pytest.mark.parametrize(
        ("sizes", "cache", "dcp", "expected"),
        [
            ([], {"block_size": 64}, 1, (64, 64)),
            ([32], {}, 1, (32, 32)),
            ([32], {}, 2, (64, 64)),
            ([32, 8], {}, 1, (32, 8)),
            ([24, 16], {}, 1, (48, 8)),
            ([32, 8], {"hash_block_size": 4}, 1, (32, 4)),
            ([32, 8], {"enable_prefix_caching": False}, 1, (32, 32)),
            ([256, 64, 8, 4], {}, 1, (256, 4)),
        ],
    )
    def test_sizes(self, sizes, cache, dcp, expected):
        config = make_vllm_config(dcp=dcp, **cache)
        assert resolve_kv_cache_block_sizes(self.config(sizes), config) == expected

    def test_a_connector_needs_hashes_too(self):
        config = make_vllm_config(enable_prefix_caching=False)
        config.kv_transfer_config = KVTransferConfig("ExampleConnector", "kv_both")
        assert resolve_kv_cache_block_sizes(self.config([32, 8]), config) == (32, 8)

    def test_hit_unit(self):
        config = make_vllm_config(block_size=32)
        assert resolve_kv_cache_block_sizes(self.config([128, 4096, 32, 2], 32), config) == (
            4096,
            32,
        )

    def test_bad_hash_block(self):
        with pytest.raises(ConfigError, match=r"hash_block_size=16 .*use 8"):
            resolve_kv_cache_block_sizes(self.config([32, 8]), make_vllm_config(hash_block_size=16))

    def test_context_parallel_wants_one_group(self):
        with pytest.raises(ConfigError, match="Context parallelism over 2 ranks"):
            resolve_kv_cache_block_sizes(self.config([32, 8]), make_vllm_config(dcp=2))


def test_report_counts_tokens(caplog):
    with caplog.at_level("DEBUG", logger=builder.__name__):
        get_kv_cache_configs(make_vllm_config(1024), [named("l", full(), 1)], [PAGE * 96])
    assert "96 blocks, 1536 tokens; 1.50 requests of 1024 tokens" in caplog.text
