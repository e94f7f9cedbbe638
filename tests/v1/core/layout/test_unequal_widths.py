"""Full and window layers of unequal width: Gemma 4's caches, to the byte."""

import pytest
import torch

from tests.v1.core.layout.test_grouping import make_vllm_config
from vllm.model_executor.models.decoder.kv_cache import decoder_kv_cache_specs
from vllm.model_executor.models.registry import resolve_model
from vllm.v1.core.geometry import CacheGeometry
from vllm.v1.core.layout.grouping import get_kv_cache_groups
from vllm.v1.core.layout.sizing import build_tensors, bytes_per_block
from vllm.v1.core.layout.unequal_widths import find_row_width
from vllm.v1.kv_cache_interface import KVCacheConfig

KIB, MIB = 1 << 10, 1 << 20
# Layers, period of the pattern, key heads of window and full layers, window, sharing layers; then
# what one token's full rows and one boundary's window rows take in bf16.
SIZES = {
    "E2B": (35, 5, 1, 1, 512, 20, 6 * KIB, 511 * 12 * KIB),
    "E4B": (42, 6, 2, 2, 512, 18, 16 * KIB, 511 * 40 * KIB),
    "12B": (48, 6, 8, 1, 1024, 0, 16 * KIB, 1023 * 320 * KIB),
    "26B-A4B": (30, 6, 8, 2, 1024, 0, 20 * KIB, 1023 * 200 * KIB),
    "31B": (60, 6, 16, 4, 1024, 0, 80 * KIB, 1023 * 800 * KIB),
}


def config_of(size: str) -> object:
    layers, period, local, full, window, shared, _, _ = SIZES[size]
    raw = {
        "model_type": "gemma4_text",
        "num_hidden_layers": layers,
        "layer_types": [
            "sliding_attention" if (i + 1) % period else "full_attention" for i in range(layers)
        ],
        "num_attention_heads": 32,
        "num_key_value_heads": local,
        "num_global_key_value_heads": full,
        "attention_k_eq_v": local != full,
        "sliding_window": window,
        "num_kv_shared_layers": shared,
    }
    return resolve_model(["Gemma4ForCausalLM"]).parse_config(raw)


@pytest.mark.parametrize("unit", [16, 32, 128])
@pytest.mark.parametrize("size", list(SIZES))
def test_no_byte_of_a_row_is_unused(size: str, unit: int) -> None:
    *_, window, _, full_bytes, window_bytes = SIZES[size]
    specs = decoder_kv_cache_specs(config_of(size), unit, torch.bfloat16, torch.float32)  # type: ignore[arg-type]
    groups = get_kv_cache_groups(make_vllm_config(), dict(specs), hits_at_units=True)
    stride = bytes_per_block(groups)
    dense = [group for group in groups if group.kv_cache_spec.keeps_every_token]
    windows = [group for group in groups if not group.kv_cache_spec.keeps_every_token]
    per_token = sum(stride / group.kv_cache_spec.block_size for group in dense)
    per_row = sum(stride / group.kv_cache_spec.block_size for group in windows)
    print(f"{size}: {len(groups)} groups, {per_token:.0f} + {per_row:.0f} bytes a token and row")
    assert per_token == full_bytes
    assert per_row * (window - 1) == window_bytes
    for group in groups:
        assert len(group.layer_names) * group.kv_cache_spec.page_size_bytes == stride
    geometry = CacheGeometry.from_config(KVCacheConfig(1, [], groups, hit_unit=unit))
    # Owners alone count, each a window further back.
    owners = sum(len(group.layer_names) for group in windows)
    assert geometry.rebuild_tokens == owners * (window - 1) + 1


def test_pages_lie_apart_in_a_row() -> None:
    specs = decoder_kv_cache_specs(config_of("E2B"), 16, torch.bfloat16, torch.float32)  # type: ignore[arg-type]
    groups = get_kv_cache_groups(make_vllm_config(), dict(specs), hits_at_units=True)
    num_blocks, (tensor,) = build_tensors(groups, 10 * MIB)
    assert (num_blocks, tensor.block_stride) == (10 * MIB // (96 * KIB), 96 * KIB)
    for group in groups:
        size = group.kv_cache_spec.page_size_bytes
        starts = [tensor.offsets[name] for name in group.layer_names]
        assert starts == list(range(0, size * len(starts), size))


def test_odd_widths_waste_little() -> None:
    # 3 heads of 80 beside 1 of 96: neither divides the other.
    raw = {
        "model_type": "gemma4_text",
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 3,
        "head_dim": 80,
        "global_head_dim": 96,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
    }
    config = resolve_model(["Gemma4ForCausalLM"]).parse_config(raw)
    specs = decoder_kv_cache_specs(config, 16, torch.bfloat16, torch.float32)
    groups = get_kv_cache_groups(make_vllm_config(), dict(specs), hits_at_units=True)
    CacheGeometry.from_config(KVCacheConfig(1, [], groups, hit_unit=16))
    used = sum(len(g.layer_names) * g.kv_cache_spec.page_size_bytes for g in groups)
    assert used >= 0.7 * bytes_per_block(groups) * len(groups)


@pytest.mark.parametrize(
    ("layers", "width"),
    [({2: 3, 1: 12}, 6), ({2: 4, 1: 20}, 4), ({1: 8}, 8), ({3: 2, 2: 5}, 6)],
)
def test_the_row_that_wastes_least(layers: dict[int, int], width: int) -> None:
    assert find_row_width(layers) == width
