"""Pools and layer views."""

import pytest
import torch

from vllm.exceptions import ConfigError
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.kv_cache_interface import (
    CompressorStateSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.worker.kv_cache_tensors import allocate_kv_cache, collect_layer_specs, view_layer

CPU = torch.device("cpu")
BF16, FP32 = torch.bfloat16, torch.float32


def dense(width: int) -> MLAAttentionSpec:
    return MLAAttentionSpec(
        block_size=16, num_kv_heads=1, head_size=width, dtype=BF16, compress_ratio=4
    )


def window(dtype: torch.dtype = BF16) -> SlidingWindowMLASpec:
    return SlidingWindowMLASpec(
        block_size=4, num_kv_heads=1, head_size=8, dtype=dtype, sliding_window=8
    )


def state() -> CompressorStateSpec:
    return CompressorStateSpec(
        block_size=2,
        num_kv_heads=1,
        head_size=16,
        dtype=FP32,
        sliding_window=8,
        state_ratio=4,
        state_overlap=True,
    )


def packed_config(num_blocks: int = 5) -> KVCacheConfig:
    main, index = dense(32), dense(8)
    groups = [
        KVCacheGroupSpec(
            ["main", "index"], UniformTypeKVCacheSpecs(16, {"main": main, "index": index})
        ),
        KVCacheGroupSpec(["window"], window()),
        KVCacheGroupSpec(["state"], state()),
    ]
    offsets = {"main": 0, "index": 256, "window": 0, "state": 0}
    return KVCacheConfig(
        num_blocks, [KVCacheTensor(num_blocks * 320, list(offsets), offsets, 320)], groups
    )


def allocate(config: KVCacheConfig, names=("main", "index", "window", "state")):
    return allocate_kv_cache(config, names, CpuPlatform(), CPU)


def test_packed_views_are_strided_over_one_pool() -> None:
    pool = allocate(packed_config())
    (tensor,) = pool.tensors
    assert tensor.shape == (5, 320)
    assert pool.num_bytes == 1600
    shapes = {name: tuple(view.shape) for name, view in pool.layers.items()}
    assert shapes == {
        "main": (5, 4, 32),
        "index": (5, 4, 8),
        "window": (5, 4, 8),
        "state": (5, 2, 16),
    }
    assert pool.layers["state"].dtype == FP32
    pool.layers["index"][3, 1, 2] = 1.5
    raw = torch.zeros(5, 320, dtype=torch.uint8)
    raw[3, 256 + (1 * 8 + 2) * 2 :][:2] = torch.tensor([1.5], dtype=BF16).view(torch.uint8)
    assert torch.equal(tensor, raw)


@pytest.mark.parametrize("name", ["main", "index", "window", "state"])
def test_a_page_stays_inside_its_block(name: str) -> None:
    pool = allocate(packed_config())
    pool.layers[name][2] = 1.0
    touched = pool.tensors[0].any(1).tolist()
    assert touched == [False, False, True, False, False]


def test_contract_layout_shares_a_tensor_between_groups() -> None:
    full = FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=8, dtype=FP32)
    config = KVCacheConfig(
        3,
        [KVCacheTensor(3 * full.page_size_bytes, ["a", "c"]), KVCacheTensor(3 * 512, ["b"])],
        [KVCacheGroupSpec(["a", "b"], full), KVCacheGroupSpec(["c"], full)],
    )
    pool = allocate(config, ["a", "b", "c"])
    assert pool.layers["a"].shape == (3, 4, 32)
    assert pool.layers["a"].data_ptr() == pool.layers["c"].data_ptr()
    assert pool.layers["a"].data_ptr() != pool.layers["b"].data_ptr()


def test_names_that_differ_from_the_model_are_listed() -> None:
    with pytest.raises(ConfigError, match=r"1 missing: drafter; 1 extra: state"):
        allocate(packed_config(), ["main", "index", "window", "drafter"])
    config = packed_config()
    config.kv_cache_tensors[0].shared_by.remove("index")
    with pytest.raises(ConfigError, match=r"tensors.*1 missing: index"):
        allocate(config)
    config.kv_cache_tensors[0].shared_by += ["index", "main"]
    with pytest.raises(ConfigError, match=r"1 repeated: main"):
        allocate(config)
    with pytest.raises(ConfigError, match=r"20 missing: layer00, .* and 12 more"):
        allocate(packed_config(), [f"layer{i:02}" for i in range(20)])


def test_memory_that_is_not_there_is_told_with_a_way_out() -> None:
    class FullHost(CpuPlatform):
        def allocate_kv_pool(
            self, num_blocks: int, stride_bytes: int, device: torch.device
        ) -> torch.Tensor:
            raise MemoryError

    config = packed_config(1 << 32)
    with pytest.raises(ConfigError, match=r"1,280.00 GiB, which cpu.*--kv-cache-memory-bytes"):
        allocate_kv_cache(config, ("main", "index", "window", "state"), FullHost(), CPU)


def test_pages_must_fit_and_be_aligned() -> None:
    config = packed_config()
    config.kv_cache_tensors[0].block_stride = 256
    with pytest.raises(ConfigError, match=r"index's page ends at byte 320 of a row of 256"):
        allocate(config)
    config = packed_config()
    config.kv_cache_tensors[0].offsets["index"] = 100
    with pytest.raises(AssertionError):
        allocate(config)
    config = KVCacheConfig(3, [KVCacheTensor(100, ["a"])], [KVCacheGroupSpec(["a"], window())])
    with pytest.raises(ConfigError, match=r"100 bytes.*3 equal blocks"):
        allocate(config, ["a"])
    config = KVCacheConfig(
        3, [KVCacheTensor(3 * 130, ["a"])], [KVCacheGroupSpec(["a"], window(FP32))]
    )
    with pytest.raises(ConfigError, match="not aligned"):
        allocate(config, ["a"])


def test_states_of_other_kinds_are_refused() -> None:
    spec = MambaSpec(4, ((2, 2),), (FP32,))
    config = KVCacheConfig(3, [KVCacheTensor(48, ["m"])], [KVCacheGroupSpec(["m"], spec)])
    with pytest.raises(ConfigError, match="MambaSpec"):
        allocate(config, ["m"])


def test_groups_of_unequal_layers_are_unpacked() -> None:
    specs = collect_layer_specs(packed_config())
    assert specs["main"] == dense(32)
    assert specs["index"] == dense(8)
    assert list(specs) == ["main", "index", "window", "state"]


def test_a_view_of_part_of_a_tensor_starts_where_the_part_does() -> None:
    whole = torch.zeros(6, 128, dtype=torch.uint8)
    view = view_layer(whole[2:], "w", window(), 64)
    view[1, 0, 0] = 1.0
    assert whole[3, 64:66].any()
    assert int(whole.count_nonzero()) == int(whole[3, 64:66].count_nonzero())
