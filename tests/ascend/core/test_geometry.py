"""The published tables, from the real grouping on V4-Flash's and V4-Pro's layer lists with MTP."""

import pytest

from tests.ascend.v4_models import A5_PAGES, DEVICE_PAGES, FLASH, FLOAT_PAGES, PRO, v4_config
from vllm.exceptions import ConfigError
from vllm.model_executor.models.deepseek_v4.kv_cache import deepseek_v4_kv_cache_specs
from vllm.v1.core.geometry import CacheGeometry
from vllm.v1.core.layout.packing import group_for_packing, packed_block_stride
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    UniformTypeKVCacheSpecs,
)
from vllm_ascend.core import geometry
from vllm_ascend.core.geometry import Generation, v4_geometry
from vllm_ascend.core.specs import (
    PACKED_BYTES_PER_UNIT_TOKEN,
    PUBLISHED_BYTES_PER_BLOCK,
    CompressAttentionSpec,
    aggregate_page_size_bytes,
    ascend_kv_cache_specs,
    explain_bytes_per_block,
    get_dsv4_compressed_kv_block_size,
    unpack_groups,
)
from vllm_ascend.envs import COMPRESSED_BLOCK_VARIABLE

# bs: C4, C128, window, C4 state, C128 state tokens; row, indexer, C4 state, indexer state, C128
# state bytes (the two middle ones before padding).
A2_A3 = {
    128: (512, 16384, 128, 8, 32, 131072, 16640, 65536, 16384, 131072),
    64: (256, 8192, 64, 4, 16, 65536, 8320, 32768, 8192, 65536),
    32: (128, 4096, 32, 2, 8, 32768, 4160, 16384, 4096, 32768),
}
A5 = {
    128: (512, 16384, 128, 8, 16, 81920, 16896, 65536, 16384, 65536),
    64: (256, 8192, 64, 4, 8, 40960, 8448, 32768, 8192, 32768),
    32: (128, 4096, 32, 2, 4, 20480, 4224, 16384, 4096, 16384),
}


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(COMPRESSED_BLOCK_VARIABLE, raising=False)


def grouped(ratios: list[int], unit: int, generation: Generation) -> list[KVCacheGroupSpec]:
    pages = DEVICE_PAGES if generation is Generation.A2_A3 else A5_PAGES
    return group_for_packing(ascend_kv_cache_specs(v4_config(ratios), unit, pages, generation))


def pages_of(group: KVCacheGroupSpec) -> set[tuple[int, int]]:
    """(real, padded) page bytes of a group's layers."""
    spec = group.kv_cache_spec
    members = spec.kv_cache_specs.values() if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]
    return {(m.real_page_size_bytes, m.page_size_bytes) for m in members}


@pytest.mark.parametrize("unit", [32, 64, 128])
@pytest.mark.parametrize(
    ("generation", "table"), [(Generation.A2_A3, A2_A3), (Generation.A5, A5)], ids=["A3", "A5"]
)
def test_formulas_give_the_table(unit: int, generation: Generation, table: dict) -> None:
    g = v4_geometry(unit, generation)
    blocks = (g.c4_block, g.c128_block, g.window_block, g.c4_state_block, g.c128_state_block)
    pages = (g.row_page, g.indexer_page, g.c4_state_page, g.indexer_state_page, g.c128_state_page)
    assert blocks + pages == table[unit]


@pytest.mark.parametrize("unit", [32, 64, 128])
@pytest.mark.parametrize(("ratios", "num_c4", "num_c128"), [(FLASH, 21, 20), (PRO, 30, 31)])
@pytest.mark.parametrize(
    ("generation", "table"), [(Generation.A2_A3, A2_A3), (Generation.A5, A5)], ids=["A3", "A5"]
)
def test_the_grouping_gives_the_table(
    unit: int, ratios: list[int], num_c4: int, num_c128: int, generation: Generation, table: dict
) -> None:
    c4, c128, window, c4_state, c128_state, row, index, state, index_state, state128 = table[unit]
    groups = grouped(ratios, unit, generation)
    num_windows = len(ratios) + 1
    assert [(len(g.layer_names), g.kv_cache_spec.block_size) for g in groups] == [
        (2 * num_c4, c4),
        (num_c128, c128),
        (num_windows // 2, window),
        (num_windows // 2, window),
        (2 * num_c4, c4_state),
        (num_c128, c128_state),
    ]
    assert [pages_of(g) for g in groups] == [
        {(row, row), (index, index)},
        {(row, row)},
        {(row, row)},
        {(row, row)},
        {(state, row), (index_state, index)},
        {(state128, row)},
    ]
    # The unit is what the operator set, never the least block (2 .. 8 tokens).
    config = KVCacheConfig(8, [], groups, hit_unit=unit)
    assert CacheGeometry.from_config(config).unit == unit


@pytest.mark.parametrize("unit", [32, 64, 128])
def test_bytes_per_block_id(unit: int) -> None:
    scale = unit // 32
    flash = grouped(FLASH, unit, Generation.A2_A3)
    pro = grouped(PRO, unit, Generation.A2_A3)
    assert packed_block_stride(flash) == 775_488 * scale
    assert packed_block_stride(pro) == 1_107_840 * scale
    assert PACKED_BYTES_PER_UNIT_TOKEN["V4-Flash"] * unit == 775_488 * scale
    assert PACKED_BYTES_PER_UNIT_TOKEN["V4-Pro"] * unit == 1_107_840 * scale
    assert PUBLISHED_BYTES_PER_BLOCK[unit] == 845_184 * scale
    g = v4_geometry(unit)
    # The published number is made of what the sentence says it is made of.
    assert PUBLISHED_BYTES_PER_BLOCK[unit] == 23 * g.row_page + 22 * g.indexer_page
    for groups, ours in ((flash, 775_488), (pro, 1_107_840)):
        text = explain_bytes_per_block(groups, unit)
        assert text.startswith(f"{ours * scale} bytes per block id at --block-size {unit}")
        assert f"{775_488 * scale} for V4-Flash and {1_107_840 * scale} for V4-Pro" in text
        assert f"{845_184 * scale} is published for V4-Flash" in text
        assert f"23 row tensors of {g.row_page} and 22 indexer tensors of {g.indexer_page}" in text
    # Every layer of every group counts, not the first group's alone.
    every_page = (21 + 20 + 44 + 21 + 20) * g.row_page + (21 + 21) * g.indexer_page
    assert aggregate_page_size_bytes(flash) == every_page
    assert f"all 6 groups: {every_page} bytes" in explain_bytes_per_block(flash, unit)


@pytest.mark.parametrize("unit", [32, 64, 128])
def test_bytes_per_block_id_on_an_a5(unit: int) -> None:
    scale = unit // 32
    for ratios, num_c4 in ((FLASH, 21), (PRO, 30)):
        g = v4_geometry(unit, Generation.A5)
        stride = packed_block_stride(grouped(ratios, unit, Generation.A5))
        assert stride == num_c4 * (g.row_page + g.indexer_page) == num_c4 * 24_704 * scale


def test_fp32_pages_are_the_cores() -> None:
    config = v4_config(FLASH)
    specs = ascend_kv_cache_specs(config, 32, FLOAT_PAGES)
    core = deepseek_v4_kv_cache_specs(config, 32, FLOAT_PAGES.rows, FLOAT_PAGES.state)
    assert {n: (s.block_size, s.page_size_bytes) for n, s in specs.items()} == {
        n: (s.block_size, s.page_size_bytes) for n, s in core.items()
    }
    assert isinstance(specs["layers.2.attn.mla"], CompressAttentionSpec)


def test_block_size_unset_means_32_and_others_are_refused() -> None:
    assert v4_geometry(None).unit == 32
    assert get_dsv4_compressed_kv_block_size(128) == 32
    for bad in (0, 16, 48, 256):
        with pytest.raises(ConfigError, match=f"{bad} .*32, 64 or 128"):
            v4_geometry(bad)


def test_the_variable_counts_where_the_ratio_is_128(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COMPRESSED_BLOCK_VARIABLE, "64")
    assert get_dsv4_compressed_kv_block_size(128) == 64
    assert get_dsv4_compressed_kv_block_size(128, 64) == 64
    assert get_dsv4_compressed_kv_block_size(4) == 32
    assert get_dsv4_compressed_kv_block_size(4, 128) == 128
    with pytest.raises(ConfigError, match=f"--block-size 32 .*{COMPRESSED_BLOCK_VARIABLE}=64"):
        get_dsv4_compressed_kv_block_size(128, 32)
    # --block-size left out: the variable says it, for the whole table.
    assert (v4_geometry(None).unit, v4_geometry(None).c4_block) == (64, 256)


@pytest.mark.parametrize("value", ["16", "-32", "many", "32.0", "²"])
def test_a_bad_variable_is_named(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COMPRESSED_BLOCK_VARIABLE, value)
    with pytest.raises(ConfigError, match=f"{COMPRESSED_BLOCK_VARIABLE}='{value}'"):
        get_dsv4_compressed_kv_block_size(128)


@pytest.mark.parametrize("rows", [0, 8, 24, 1040])
def test_pages_that_no_kernel_takes(rows: int) -> None:
    geometry.check_kernel_rows(1024)
    with pytest.raises(ConfigError, match=f"{rows} rows"):
        geometry.check_kernel_rows(rows)


def test_unpacking_reads_a_members_block_size() -> None:
    groups = grouped(FLASH, 32, Generation.A2_A3)
    unpacked = unpack_groups(groups)
    assert not any(isinstance(g.kv_cache_spec, UniformTypeKVCacheSpecs) for g in unpacked)
    assert [g.kv_cache_spec.block_size for g in unpacked] == [128, 4096, 32, 32, 2, 8]
    mixed = groups[0].kv_cache_spec
    wrong = KVCacheGroupSpec(["a"], UniformTypeKVCacheSpecs(64, mixed.kv_cache_specs))
    with pytest.raises(ConfigError, match="64-token"):
        unpack_groups([wrong])
