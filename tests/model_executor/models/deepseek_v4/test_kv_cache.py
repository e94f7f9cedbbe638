"""The table of block sizes, value by value."""

import pytest
import torch

from tests.model_executor.models.hf_reference import sixteen_rate
from tests.model_executor.models.tiny_config import tiny_config
from vllm.exceptions import ConfigError
from vllm.model_executor.models.deepseek_v4.config import DeepseekV4Config
from vllm.model_executor.models.deepseek_v4.kv_cache import deepseek_v4_kv_cache_specs
from vllm.v1.attention.layout import CacheLayout, GroupLayout
from vllm.v1.kv_cache_interface import (
    CompressorStateSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    LatentRowsSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
)


def build(block_size: int, **overrides: object) -> dict[str, KVCacheSpec]:
    config = DeepseekV4Config.from_dict(tiny_config(num_nextn_predict_layers=1, **overrides))
    return deepseek_v4_kv_cache_specs(config, block_size, torch.bfloat16, torch.float32)


def test_names() -> None:
    assert list(build(32)) == [
        "layers.0.attn.window",
        "layers.1.attn.window",
        "layers.1.attn.mla",
        "layers.1.attn.state",
        "layers.1.attn.indexer",
        "layers.1.attn.indexer_state",
        "layers.2.attn.window",
        "layers.2.attn.mla",
        "layers.2.attn.state",
        "layers.3.attn.window",
        "layers.3.attn.mla",
        "layers.3.attn.state",
        "layers.3.attn.indexer",
        "layers.3.attn.indexer_state",
        "mtp.0.attn.window",
    ]


def test_roles() -> None:
    specs = {name: spec for name, spec in build(32).items() if isinstance(spec, LatentRowsSpec)}
    assert {name for name, spec in specs.items() if spec.is_drafter} == {"mtp.0.attn.window"}
    assert {name.split(".", 2)[2] for name, spec in specs.items() if spec.is_indexer} == {
        "attn.indexer",
        "attn.indexer_state",
    }
    # Of one layout: the drafter's rows join the group of the other windows.
    assert specs["mtp.0.attn.window"] == specs["layers.0.attn.window"]


@pytest.mark.parametrize(
    ("block_size", "csa_state", "hca_state"), [(32, 2, 8), (64, 4, 16), (128, 8, 32)]
)
def test_block_sizes(block_size: int, csa_state: int, hca_state: int) -> None:
    specs = build(block_size)
    window = specs["layers.0.attn.window"]
    assert window == SlidingWindowMLASpec(
        block_size=block_size,
        num_kv_heads=1,
        head_size=16,
        dtype=torch.bfloat16,
        sliding_window=128,
    )
    for name, width, ratio in (
        ("layers.1.attn.mla", 16, 4),
        ("layers.1.attn.indexer", 16, 4),
        ("layers.2.attn.mla", 16, 128),
    ):
        assert specs[name] == MLAAttentionSpec(
            block_size=ratio * block_size,
            num_kv_heads=1,
            head_size=width,
            dtype=torch.bfloat16,
            compress_ratio=ratio,
        )
        assert specs[name].storage_block_size == block_size
    assert specs["layers.1.attn.state"] == CompressorStateSpec(
        block_size=csa_state,
        num_kv_heads=1,
        head_size=4 * 16,
        dtype=torch.float32,
        sliding_window=8,
        state_ratio=4,
        state_overlap=True,
    )
    assert specs["layers.2.attn.state"] == CompressorStateSpec(
        block_size=hca_state,
        num_kv_heads=1,
        head_size=2 * 16,
        dtype=torch.float32,
        sliding_window=128,
        state_ratio=128,
        state_overlap=False,
    )


def test_another_rate_gets_a_state_block_that_divides_its_window() -> None:
    config = DeepseekV4Config.from_dict(sixteen_rate(tiny_config()))
    sizes = {
        block_size: deepseek_v4_kv_cache_specs(config, block_size, torch.float32, torch.float32)[
            "layers.2.attn.state"
        ].block_size
        for block_size in (32, 64, 128)
    }
    assert sizes == {32: 8, 64: 16, 128: 16}


@pytest.mark.parametrize("block_size", [0, 1, 16, 48, 256])
def test_another_block_size_is_refused(block_size: int) -> None:
    with pytest.raises(ConfigError, match=rf"--block-size {block_size} .*32, 64 or 128"):
        build(block_size)


def test_a_rate_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="--block-size 64 and the hca compress rate 96"):
        build(64, compress_ratios=[0, 4, 96, 4, 0])
    build(32, compress_ratios=[0, 4, 96, 4, 0])


def test_layout_reads_groups_back() -> None:
    specs = build(32)
    names = ["layers.0.attn.window", "layers.1.attn.mla", "layers.1.attn.state"]
    layout = CacheLayout.from_kv_cache_config(
        KVCacheConfig(1, [], [KVCacheGroupSpec([name], specs[name]) for name in names])
    )
    assert layout.groups == (
        GroupLayout("window", 32, 32, window=128),
        GroupLayout("dense", 128, 32, ratio=4),
        GroupLayout("state", 2, 2, ratio=4, has_overlap=True),
    )
    assert layout.group_of == {name: index for index, name in enumerate(names)}


def test_layout_refuses_other_specs() -> None:
    spec = SinkFullAttentionSpec(
        block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32, sink_len=16
    )
    with pytest.raises(ConfigError, match="SinkFullAttentionSpec"):
        CacheLayout.from_kv_cache_config(KVCacheConfig(1, [], [KVCacheGroupSpec(["a"], spec)]))
