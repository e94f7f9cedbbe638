"""KV cache configs of DeepSeek-V4-Flash without torch, for benchmarks of the control plane."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from vllm.cachelab.sim.geometries import GEOMETRIES
from vllm.model_executor.models.deepseek_v4.config import DeepseekV4Config
from vllm.model_executor.models.deepseek_v4.kv_cache import deepseek_v4_kv_cache_specs
from vllm.v1.core.layout.packing import group_for_packing, packed_block_stride
from vllm.v1.kv_cache_interface import (
    CompressorStateSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
)

if TYPE_CHECKING:
    import torch

UNITS = (32, 64, 128)

# Bytes a block id costs in the published Ascend arrangement (A2/A3, MTP), by unit.
PUBLISHED_BLOCK_BYTES = {32: 845_184, 64: 1_690_368, 128: 3_380_736}

# Bytes of a block and tokens of its dense rows in the arrangement of vLLM 0.32 (fp8, MTP).
VLLM_PAGE_BYTES = 1_002_240
VLLM_PAGE_TOKENS = 256
VLLM_WINDOW_BLOCK = 64


@dataclass(frozen=True)
class _FakeDtype:
    """Stands in for a torch dtype: specs only ask for its item size."""

    itemsize: int


_BF16 = cast("torch.dtype", _FakeDtype(2))
_FP32 = cast("torch.dtype", _FakeDtype(4))
_U8 = cast("torch.dtype", _FakeDtype(1))


def flash_architecture() -> DeepseekV4Config:
    """Return the published architecture of DeepSeek-V4-Flash, one MTP block included."""
    return DeepseekV4Config.from_dict(GEOMETRIES["v4-flash"])


def flash_groups(unit: int) -> list[KVCacheGroupSpec]:
    """Return the groups of DeepSeek-V4-Flash in bf16 at ``--block-size unit``."""
    specs = deepseek_v4_kv_cache_specs(flash_architecture(), unit, _BF16, _FP32)
    return group_for_packing(specs)


def flash_block_bytes(unit: int) -> int:
    """Return the bytes a block id costs in our packed pool."""
    return packed_block_stride(flash_groups(unit))


def flash_config(unit: int, num_blocks: int) -> KVCacheConfig:
    """Return a config of DeepSeek-V4-Flash that hits at one unit of 32, 64 or 128 tokens."""
    return KVCacheConfig(num_blocks, [], flash_groups(unit), hit_unit=unit)


def vllm_config(num_blocks: int, unit: int, *, is_strict: bool) -> KVCacheConfig:
    """Return a config with the blocks of vLLM 0.32: one dense group, 256 tokens a block.

    Args:
        num_blocks: Pages of ``VLLM_PAGE_BYTES``.
        unit: Tokens of the smallest hit; 256: whole blocks only.
        is_strict: Whether a hit needs the compressors' whole windows, as there: 16 blocks of C128
            state at every boundary. Else only what the maths needs.
    """
    groups: dict[str, KVCacheSpec] = {
        "dense": MLAAttentionSpec(
            block_size=VLLM_PAGE_TOKENS, num_kv_heads=1, head_size=512, dtype=_U8, compress_ratio=4
        )
    }
    for name in ("window.0", "window.1"):
        groups[name] = _window(VLLM_WINDOW_BLOCK, 128)
    for name, block_size, ratio in (("c4", 4, 4), ("c128", 8, 128)):
        window = 2 * ratio if ratio == 4 else ratio
        groups[name] = (
            _window(block_size, window)
            if is_strict
            else CompressorStateSpec(
                block_size=block_size,
                num_kv_heads=1,
                head_size=1024,
                dtype=_FP32,
                sliding_window=window,
                state_ratio=ratio,
                state_overlap=ratio == 4,
            )
        )
    specs = [KVCacheGroupSpec([name], spec) for name, spec in groups.items()]
    return KVCacheConfig(num_blocks, [], specs, hit_unit=unit)


def _window(block_size: int, window: int) -> SlidingWindowMLASpec:
    return SlidingWindowMLASpec(
        block_size=block_size, num_kv_heads=1, head_size=512, dtype=_U8, sliding_window=window
    )
