"""Six groups, one pool: the geometry of DeepSeek-V4."""

import pytest

from tests.v1.core.v4_geometry import BF16, FLASH, PRO, SMALL, v4_config, v4_specs
from vllm.exceptions import ConfigError
from vllm.v1.core.geometry import CacheGeometry
from vllm.v1.core.layout.packing import (
    PAGE_ALIGNMENT_BYTES,
    build_packed_tensors,
    group_for_packing,
    packed_block_stride,
)
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
    member_spec,
)


@pytest.mark.parametrize("block_size", [32, 64, 128])
@pytest.mark.parametrize(
    ("ratios", "sizes"),
    [
        (FLASH, [42, 20, 22, 22, 42, 20]),
        (PRO, [60, 31, 31, 31, 60, 31]),
        (SMALL, [6, 2, 4, 3, 6, 2]),
    ],
)
def test_six_groups(block_size: int, ratios: list[int], sizes: list[int]) -> None:
    groups = group_for_packing(v4_specs(block_size, ratios))
    assert [len(group.layer_names) for group in groups] == sizes
    tokens = [member_spec(group.kv_cache_spec).block_size for group in groups]
    b = block_size
    assert tokens == [4 * b, 128 * b, b, b, b // 16, b // 4]
    names = [name for group in groups for name in group.layer_names]
    assert sorted(names) == sorted(v4_specs(block_size, ratios))


def test_unequal_pages_become_a_uniform_type_spec() -> None:
    c4 = group_for_packing(v4_specs(32, FLASH))[0].kv_cache_spec
    assert isinstance(c4, UniformTypeKVCacheSpecs)
    sizes = {spec.page_size_bytes for spec in c4.kv_cache_specs.values()}
    assert sizes == {32 * 512 * 2, 32 * 128 * 2}


def test_stride_is_the_widest_group_and_pages_do_not_overlap() -> None:
    specs = v4_specs(32, FLASH)
    groups = group_for_packing(specs)
    stride = packed_block_stride(groups)
    assert stride == 21 * (32 * 512 * 2 + 32 * 128 * 2)
    num_blocks, (tensor,) = build_packed_tensors(groups, stride * 7 + 5)
    assert num_blocks == 7
    assert tensor.size == 7 * stride
    assert tensor.block_stride == stride
    assert tensor.offsets is not None
    for group in groups:
        end = 0
        for name in group.layer_names:
            assert tensor.offsets[name] >= end
            assert tensor.offsets[name] % PAGE_ALIGNMENT_BYTES == 0
            end = tensor.offsets[name] + specs[name].page_size_bytes
        assert end <= stride


def test_override_wins_over_memory() -> None:
    groups = group_for_packing(v4_specs(32, SMALL))
    assert build_packed_tensors(groups, 0, 12)[0] == 12


def test_a_foreign_spec_is_refused_by_name() -> None:
    specs = v4_specs(32, SMALL)
    specs["odd"] = ChunkedLocalAttentionSpec(
        16, num_kv_heads=1, head_size=8, dtype=BF16, attention_chunk_size=64
    )
    with pytest.raises(ConfigError, match="Layer odd: a ChunkedLocalAttentionSpec cannot share"):
        group_for_packing(specs)


def test_kinds_of_one_shape_do_not_share_a_group() -> None:
    specs = v4_specs(32, SMALL)
    specs["keys"] = FullAttentionSpec(128, num_kv_heads=1, head_size=8, dtype=BF16)
    specs["latents"] = MLAAttentionSpec(128, num_kv_heads=1, head_size=8, dtype=BF16)
    groups = group_for_packing(specs)
    alone = {tuple(group.layer_names) for group in groups if len(group.layer_names) == 1}
    assert alone == {("keys",), ("latents",)}
    assert len(groups) == 8


def test_geometry_of_the_groups() -> None:
    geometry = CacheGeometry.from_config(v4_config(32, 50))
    assert geometry.lean == 128
    first = [group.first_needed(992) for group in geometry.groups]
    assert first == [0, 0, 865, 865, 988, 896]
    assert [group.first_needed(1024) for group in geometry.groups][-1] == 1024
