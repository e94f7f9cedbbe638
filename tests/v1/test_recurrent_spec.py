"""Where the parts of a recurrent state lie, and what it costs beside attention's rows."""

from typing import Any

import pytest

from tests.v1.core.specs import FLOAT, FakeDtype
from vllm.model_executor.models.decoder.kv_cache import STATES, decoder_kv_cache_specs
from vllm.model_executor.models.registry import resolve_model
from vllm.v1.core.geometry import CacheGeometry
from vllm.v1.core.layout.packing import group_for_packing, packed_block_stride
from vllm.v1.kv_cache_interface import KVCacheConfig, RecurrentStateSpec, StateLayout, StateShape

HALF: Any = FakeDtype(2)
# Layers, hidden size, attention heads, key-value heads, value heads of the recurrence.
RELEASES = {
    "0.8B": (24, 1024, 8, 2, 16),
    "4B": (32, 2560, 16, 4, 32),
    "27B": (64, 5120, 24, 4, 48),
}


def release_config(name: str) -> Any:
    layers, hidden, heads, kv_heads, value_heads = RELEASES[name]
    raw = {
        "architectures": ["Qwen3_5ForCausalLM"],
        "vocab_size": 248_320,
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
    }
    return resolve_model(raw["architectures"]).parse_config(raw)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shape", "page_values"),
    [
        (StateShape(3, 4, 16, 16, 128, 3), 2048),
        (StateShape(3, 4, 16, 24, 112, 2), 1000),
        (StateShape(1, 1, 8, 8, 5, 3), 64),
        (StateShape(2, 3, 4, 4, 30, 3), 17),
    ],
)
def test_parts_share_no_place_and_leave_no_block_empty(shape: StateShape, page_values: int) -> None:
    layout = StateLayout(shape, page_values)
    used: dict[int, set[int]] = {}
    for head in range(shape.num_layers * shape.num_heads):
        block, slot = divmod(head, layout.heads_per_block)
        own = range(slot * shape.head_values, (slot + 1) * shape.head_values)
        assert own.stop <= page_values
        assert used.setdefault(block, set()).isdisjoint(own)
        used[block].update(own)
    for channel in range(shape.num_layers * shape.num_channels):
        block, slot = divmod(channel, layout.channels_per_block)
        own = range(slot, layout.channels_per_block * shape.num_columns, layout.channels_per_block)
        assert own[-1] < page_values
        place = used.setdefault(block + layout.num_head_blocks, set())
        assert place.isdisjoint(own)
        place.update(own)
    assert sorted(used) == list(range(layout.num_blocks))
    assert sum(map(len, used.values())) == shape.num_values


@pytest.mark.parametrize("name", RELEASES)
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize("cache_dtype", [HALF, FLOAT])
def test_states_of_releases_widen_no_row_and_waste_little(
    name: str, block_size: int, cache_dtype: Any
) -> None:
    specs = decoder_kv_cache_specs(release_config(name), block_size, cache_dtype, FLOAT)
    groups = group_for_packing(specs)
    assert len(groups) == 2
    stride = packed_block_stride(groups)
    assert stride == packed_block_stride(groups[:1])
    spec = specs[STATES]
    assert isinstance(spec, RecurrentStateSpec)
    used = 4 * spec.shape.num_values
    # Heads fill their blocks exactly; convolution inputs leave part of one.
    assert used <= spec.layout.num_blocks * stride < used + stride
    geometry = CacheGeometry.from_config(KVCacheConfig(1, [], groups, hit_unit=block_size))
    assert geometry.lean == block_size
    assert geometry.rebuild_tokens is None


def test_a_checkpoint_of_the_smallest_release_weighs_1_600_tokens() -> None:
    spec = decoder_kv_cache_specs(release_config("0.8B"), 32, HALF, FLOAT)[STATES]
    assert isinstance(spec, RecurrentStateSpec)
    assert spec.layout.num_blocks * 32 == 1664
    assert spec.page_size_bytes == 384 << 10


def test_a_head_that_fills_more_than_a_block_sets_the_width() -> None:
    raw = {
        **{"architectures": ["Qwen3_5ForCausalLM"], "vocab_size": 96, "hidden_size": 32},
        **{"num_hidden_layers": 4, "num_attention_heads": 1, "head_dim": 16},
        **{"intermediate_size": 32, "linear_num_key_heads": 1, "linear_num_value_heads": 1},
    }
    config = resolve_model(["Qwen3_5ForCausalLM"]).parse_config(raw)
    spec = decoder_kv_cache_specs(config, 16, FLOAT, FLOAT)[STATES]
    assert isinstance(spec, RecurrentStateSpec)
    assert spec.page_values == 128 * 128
