"""Cache specs of models that mix full attention with plain sliding windows, without torch."""

from tests.v1.core.specs import full, make_vllm_config, swa
from vllm.v1.core.layout.grouping import get_kv_cache_groups
from vllm.v1.core.layout.sizing import build_tensors, bytes_per_block
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

# Gemma 3 repeats five windows and one layer of full attention; gpt-oss alternates.
GEMMA_LIKE = "wwwwwf" * 4 + "ww"
GPT_OSS_LIKE = "wf" * 6
LLAMA_LIKE = "f" * 4
MISTRAL_LIKE = "w" * 4


def window_specs(block_size: int, window: int, kinds: str) -> dict[str, KVCacheSpec]:
    """Return one spec per letter of ``kinds``: "w" attends a window, "f" everything."""
    return {
        f"layers.{i}.attn": full(block_size=block_size)
        if kind == "f"
        else swa(block_size=block_size, sliding_window=window)
        for i, kind in enumerate(kinds)
    }


def window_config(block_size: int, num_blocks: int, window: int, kinds: str) -> KVCacheConfig:
    """Return a KV cache config that hits at one unit."""
    groups = get_kv_cache_groups(make_vllm_config(), window_specs(block_size, window, kinds))
    blocks, tensors = build_tensors(groups, num_blocks * bytes_per_block(groups))
    assert blocks == num_blocks
    return KVCacheConfig(num_blocks, tensors, groups, hit_unit=block_size)
