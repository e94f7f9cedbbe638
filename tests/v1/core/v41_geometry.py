"""DeepSeek-V4.1's cache, small: two ratios in one dense group, windows split in two sections.

The upper one, from the last source on, leaves out rows that no output depends on.
"""

from tests.v1.core.v4_geometry import BF16, FP32
from vllm.v1.core.layout.packing import build_packed_tensors, group_for_packing
from vllm.v1.kv_cache_interface import (
    CompressorStateSpec,
    KVCacheConfig,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
)


def v41_config(unit: int, num_blocks: int, length: int = 128) -> KVCacheConfig:
    """Return the cache of a model with sources in layers 1 (ratio 2) and 3 (ratio 1)."""
    specs: dict[str, KVCacheSpec] = {}
    for layer in range(6):
        specs[f"layers.{layer}.window"] = SlidingWindowMLASpec(
            block_size=unit,
            num_kv_heads=1,
            head_size=16,
            dtype=BF16,
            sliding_window=length,
            section=int(layer >= 3),
            lazy_reach=3 * (length - 1) if layer >= 3 else 0,
        )
        ratio = {1: 2, 3: 1}.get(layer)
        if ratio is None:
            continue
        for name, width in ((f"layers.{layer}.mla", 16), (f"layers.{layer}.indexer", 8)):
            specs[name] = MLAAttentionSpec(
                block_size=4 * unit,
                num_kv_heads=1,
                head_size=width,
                dtype=BF16,
                compress_ratio=ratio,
                mixes_ratios=True,
            )
        if ratio > 1:
            specs[f"layers.{layer}.state"] = CompressorStateSpec(
                block_size=2,
                num_kv_heads=1,
                head_size=32,
                dtype=FP32,
                sliding_window=2,
                state_ratio=2,
                state_overlap=False,
            )
    groups = group_for_packing(specs)
    count, tensors = build_packed_tensors(groups, 0, num_blocks)
    return KVCacheConfig(count, tensors, groups, hit_unit=unit)
