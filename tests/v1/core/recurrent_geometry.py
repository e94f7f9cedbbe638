"""Cache specs of recurrent models without torch: states beside rows, and beside pools of keys."""

from typing import Any

from tests.v1.core.v4_geometry import BF16, FP32
from vllm.v1.core.layout.packing import group_for_packing
from vllm.v1.kv_cache_interface import (
    CompressorStateSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MLAAttentionSpec,
    RecurrentStateSpec,
    StateShape,
)

_SHAPE = StateShape(
    num_layers=3, num_heads=4, key_dim=16, value_dim=16, num_channels=192, num_columns=3
)


def recurrent_config(unit: int, num_blocks: int, *, pool_size: int = 0) -> KVCacheConfig:
    """Return a cache of one attention layer and states of five blocks.

    Args:
        unit: Tokens of the smallest hit, and of a block.
        num_blocks: Of the pool.
        pool_size: Tokens of a pool that an indexer keeps a key of, as GLM 5.3; 0: there are none.
    """
    dtypes: Any = {"bf16": BF16, "fp32": FP32}
    specs: dict[str, KVCacheSpec] = {
        "rows": FullAttentionSpec(
            block_size=unit, num_kv_heads=1, head_size=64, head_size_v=0, dtype=dtypes["bf16"]
        )
    }
    if pool_size:
        specs["keys"] = MLAAttentionSpec(
            block_size=unit * pool_size * 4,
            num_kv_heads=1,
            head_size=16,
            dtype=dtypes["bf16"],
            compress_ratio=pool_size,
        )
        specs["pool"] = CompressorStateSpec(
            block_size=unit,
            num_kv_heads=1,
            head_size=32,
            dtype=dtypes["fp32"],
            sliding_window=pool_size,
            state_ratio=pool_size,
            state_overlap=False,
        )
    specs["states"] = RecurrentStateSpec(
        block_size=unit, shape=_SHAPE, page_values=1024, dtype=dtypes["fp32"]
    )
    return KVCacheConfig(num_blocks, [], group_for_packing(specs), hit_unit=unit)
