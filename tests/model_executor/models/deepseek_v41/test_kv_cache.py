"""Caches of DeepSeek-V4.1: bytes a token and a checkpoint, and the sizes that are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.model_executor.models.deepseek_v41.release import RELEASE
from tests.model_executor.models.deepseek_v41.tiny import tiny_v41
from tests.v1.engine.fakes import make_config
from vllm.config import KVTransferConfig, VllmConfig
from vllm.exceptions import ConfigError
from vllm.model_executor.models.deepseek_v41.config import DeepseekV41Config
from vllm.model_executor.models.deepseek_v41.kv_cache import deepseek_v41_kv_cache_specs
from vllm.v1.attention.layout import CacheLayout
from vllm.v1.core.geometry import CacheGeometry
from vllm.v1.core.layout.packing import group_for_packing, padded_page_bytes
from vllm.v1.engine.kv_cache_setup import KVCachePlan, describe_kv_cache, plan_kv_cache
from vllm.v1.engine.startup_report import report_start
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec


def find_specs(block_size: int) -> dict[str, KVCacheSpec]:
    config = DeepseekV41Config.from_dict(RELEASE)
    return deepseek_v41_kv_cache_specs(config, block_size, torch.bfloat16, torch.float32)


@pytest.mark.parametrize("block_size", [32, 64, 128])
def test_bytes(block_size: int) -> None:
    specs = find_specs(block_size)
    by_kind: dict[str, list[KVCacheSpec]] = {}
    for name, spec in specs.items():
        by_kind.setdefault(name.rpartition(".")[2], []).append(spec)
    assert {kind: len(own) for kind, own in by_kind.items()} == {
        "window": 40,
        "mla": 4,
        "indexer": 4,
        "state": 3,
    }
    dense = [*by_kind["mla"], *by_kind["indexer"]]
    assert {spec.block_size for spec in dense} == {4 * block_size}
    assert sum(spec.page_size_bytes for spec in dense) == 3200 * 4 * block_size
    windows = by_kind["window"]
    assert sum(spec.page_size_bytes for spec in windows) == 40 * 1024 * block_size
    assert sum(spec.page_size_bytes for spec in by_kind["state"]) == 24_576


@pytest.mark.parametrize("unit", [32, 64, 128])
def test_groups(unit: int) -> None:
    """One dense group, windows split before layer 20, and what a block costs."""
    groups = group_for_packing(find_specs(unit))
    widths = [
        sum(padded_page_bytes(spec) for spec in group.layer_specs().values()) for group in groups
    ]
    scale = unit // 32
    windows = [327_680] * 4
    assert widths == [*(width * scale for width in (409_600, *windows)), 24_576]
    layers = [sorted(int(name.split(".")[1]) for name in g.layer_names) for g in groups[1:5]]
    assert sorted(layers[0] + layers[1]) == list(range(20))
    assert sorted(layers[2] + layers[3]) == list(range(20, 40))
    # What of a prompt is further than this before its end serves no output.
    assert {spec.lazy_reach for spec in groups[4].layer_specs().values()} == {20 * 127}
    assert {spec.lazy_reach for spec in groups[1].layer_specs().values()} == {0}
    config = KVCacheConfig(1, [], groups, hit_unit=unit)
    geometry = CacheGeometry.from_config(config)
    # Every unit is a boundary without any state of a compressor.
    assert (geometry.lean, geometry.rebuild_tokens) == (unit, 128 + 39 * 127)
    assert [len(group.rows_below(8 * unit)) for group in geometry.windows][-1] == 0
    layout = CacheLayout.from_kv_cache_config(config)
    assert [layout.find_table(i) for i in range(len(layout.groups))] == [0, 1, 2, 3, 4, 5, 0]
    ratios = {layout.groups[layout.group_of[f"layers.{s}.attn.mla"]].ratio for s in (2, 8, 14)}
    assert ratios == {2}
    assert layout.groups[layout.group_of["layers.20.attn.indexer"]].rows_per_block == 4 * unit


@pytest.mark.parametrize(
    ("block_size", "change", "named"),
    [
        (16, {}, "use 32, 64 or 128"),
        (32, {"compress_ratios": [0, 0, 3, 3, 3, *[1] * 5]}, "ratio 3"),
    ],
)
def test_refused_sizes(block_size: int, change: dict[str, object], named: str) -> None:
    config = DeepseekV41Config.from_dict(tiny_v41(**change))
    with pytest.raises(ConfigError, match=named):
        deepseek_v41_kv_cache_specs(config, block_size, torch.float32, torch.float32)


def plan_release(tmp_path: Path, **changes: Any) -> tuple[VllmConfig, KVCachePlan]:
    vllm_config = make_config(tmp_path, num_blocks=400)
    vllm_config.cache_config.block_size = 32
    for name, value in changes.items():
        setattr(vllm_config.cache_config, name, value)
    return vllm_config, plan_kv_cache(vllm_config, [find_specs(32)], [1 << 28])


def test_the_start_up_log_says_bytes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """3,200 bytes a token and 127 rows of 40 layers in bf16; inside a prompt of 20 layers."""
    caplog.set_level("INFO", logger="vllm")
    vllm_config, plan = plan_release(tmp_path)
    info = describe_kv_cache(vllm_config, plan)
    assert info.dense_token_bytes == 3200
    assert info.checkpoint_bytes == 127 * 40 * 1024 == 5_201_920
    assert info.partial_checkpoint_bytes == 127 * 20 * 1024
    # Four blocks in each of four groups; a block of dense rows holds 128 tokens.
    assert (info.checkpoint_tokens, info.partial_checkpoint_tokens) == (2048, 1024)
    assert info.rebuild_tokens == 128 + 39 * 127
    report_start(vllm_config, info, 1.0)
    assert "rows: 3,200 bytes a token. A checkpoint" in caplog.text
    assert "5,201,920 bytes, in the room of 2,048 tokens' rows; inside a prompt" in caplog.text
    assert "2,600,960 bytes, of 1,024" in caplog.text


@pytest.mark.parametrize("change", ["interval", "connector"])
def test_where_all_layers_compute_all_rows_none_is_partial(tmp_path: Path, change: str) -> None:
    changes = {"prefix_cache_retention_interval": 0} if change == "interval" else {}
    vllm_config, plan = plan_release(tmp_path, **changes)
    if change == "connector":
        vllm_config.kv_transfer_config = KVTransferConfig(kv_connector="any", kv_role="kv_both")
    info = describe_kv_cache(vllm_config, plan)
    assert info.checkpoint_tokens == 2048
    assert info.partial_checkpoint_tokens is info.partial_checkpoint_bytes is None
