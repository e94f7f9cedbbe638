"""DeepSeek-V4's cache specs without torch, for tests of the control plane."""

from dataclasses import dataclass

from vllm.v1.core.layout.packing import build_packed_tensors, group_for_packing
from vllm.v1.kv_cache_interface import (
    CompressorStateSpec,
    KVCacheConfig,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
)


@dataclass(frozen=True)
class FakeDtype:
    """Stands in for a torch dtype: specs only ask for its item size."""

    itemsize: int


BF16 = FakeDtype(2)
FP32 = FakeDtype(4)


def v4_specs(
    block_size: int,
    ratios: list[int],
    *,
    head: int = 512,
    index_head: int = 128,
    mtp: bool = True,
    length: int = 128,
) -> dict[str, KVCacheSpec]:
    """Specs of a DeepSeek-V4 with the given compress ratio per layer (0: window only)."""
    specs: dict[str, KVCacheSpec] = {}

    def window(name: str) -> None:
        specs[name] = SlidingWindowMLASpec(
            block_size=block_size,
            num_kv_heads=1,
            head_size=head,
            dtype=BF16,
            sliding_window=length,
        )

    def entries(name: str, ratio: int, width: int) -> None:
        specs[name] = MLAAttentionSpec(
            block_size=ratio * block_size,
            num_kv_heads=1,
            head_size=width,
            dtype=BF16,
            compress_ratio=ratio,
        )

    def state(name: str, ratio: int, width: int) -> None:
        overlap = ratio == 4
        specs[name] = CompressorStateSpec(
            block_size=block_size // (16 if overlap else 4),
            num_kv_heads=1,
            head_size=(4 if overlap else 2) * width,
            dtype=FP32,
            sliding_window=2 * ratio if overlap else ratio,
            state_ratio=ratio,
            state_overlap=overlap,
        )

    for i, ratio in enumerate(ratios):
        window(f"layers.{i}.attn.window")
        if ratio:
            entries(f"layers.{i}.attn.mla", ratio, head)
            state(f"layers.{i}.attn.state", ratio, head)
        if ratio == 4:
            entries(f"layers.{i}.attn.indexer", ratio, index_head)
            state(f"layers.{i}.attn.indexer_state", ratio, index_head)
    if mtp:
        window("mtp.0.attn.window")
    return specs


SMALL = [0, 4, 128, 4, 128, 4]
FLASH = [0, 0] + [4, 128] * 20 + [4]
PRO = [128, 128] + [4, 128] * 29 + [4]


def v4_config(
    block_size: int, num_blocks: int, ratios: list[int] = SMALL, length: int = 128
) -> KVCacheConfig:
    """A KV cache config that hits at one unit, windows of ``length`` tokens."""
    groups = group_for_packing(v4_specs(block_size, ratios, length=length))
    blocks, tensors = build_packed_tensors(groups, 0, num_blocks)
    return KVCacheConfig(blocks, tensors, groups, hit_unit=block_size)
