"""How much KV-cache memory blocks and requests take, and how many of them fit.

Three layouts exist, chosen by the groups: a packed pool (see packing), tensors of their own
size for a lone group of unequal layers, and else equal tensors that all groups share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from vllm.exceptions import ConfigError
from vllm.utils.math_utils import cdiv
from vllm.v1.core.geometry import CacheGeometry
from vllm.v1.core.layout.grouping import needs_packed_pool
from vllm.v1.core.layout.packing import build_packed_tensors, packed_block_stride
from vllm.v1.core.retention.sizes import max_request_blocks
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig


# -------------------------------------------------------------------- layout of one worker's memory


def _is_packed(groups: Sequence[KVCacheGroupSpec]) -> bool:
    """Whether the groups share rows of one pool, each laid out in its own way."""
    specs = [group.kv_cache_spec for group in groups]
    has_windows = any(spec.window_tokens is not None for spec in specs)
    return needs_packed_pool(specs) or (
        has_windows and len({spec.page_size_bytes for spec in specs}) > 1
    )


def _has_unequal_pages(groups: Sequence[KVCacheGroupSpec]) -> bool:
    """Whether this is a lone group of layers with unequal pages."""
    return len(groups) == 1 and groups[0].kv_cache_spec.is_composite


def _page_size_bytes(groups: Sequence[KVCacheGroupSpec]) -> int:
    pages = {group.kv_cache_spec.page_size_bytes for group in groups}
    assert len(pages) == 1, f"KV cache groups must have one page size, got {sorted(pages)} bytes."
    return pages.pop()


def _num_tensors(groups: Sequence[KVCacheGroupSpec]) -> int:
    """Return how many layers of one group a worker holds at most."""
    return max((len(group.layer_names) for group in groups), default=0)


def bytes_per_block(groups: Sequence[KVCacheGroupSpec]) -> int:
    """Return the bytes one block id costs in a worker; 0 if the worker holds no layer."""
    if _num_tensors(groups) == 0:
        return 0
    if _is_packed(groups):
        return packed_block_stride(groups)
    if _has_unequal_pages(groups):
        return groups[0].kv_cache_spec.page_size_bytes
    return _num_tensors(groups) * _page_size_bytes(groups)


def build_tensors(
    groups: Sequence[KVCacheGroupSpec], available_memory: int
) -> tuple[int | None, list[KVCacheTensor]]:
    """Fill a worker's memory; None blocks: it holds no layer and does not care."""
    block_bytes = bytes_per_block(groups)
    if block_bytes == 0:
        return None, []
    if _is_packed(groups):
        return build_packed_tensors(groups, available_memory, None)
    num_blocks = max(available_memory, 0) // block_bytes
    if _has_unequal_pages(groups):
        return num_blocks, [
            KVCacheTensor(spec.page_size_bytes * num_blocks, [name])
            for name, spec in groups[0].layer_specs().items()
        ]
    # Tensor j serves the j-th layer of every group: a block id belongs to one group at a time.
    size = _page_size_bytes(groups) * num_blocks
    return num_blocks, [
        KVCacheTensor(size, [g.layer_names[j] for g in groups if j < len(g.layer_names)])
        for j in range(_num_tensors(groups))
    ]


# ----------------------------------------------------------------------------- what a request needs


def _unit_geometry(
    vllm_config: VllmConfig, groups: Sequence[KVCacheGroupSpec]
) -> CacheGeometry | None:
    """Return the geometry of unit hits if these groups can have them."""
    config = KVCacheConfig(1, [], list(groups), hit_unit=vllm_config.cache_config.block_size)
    try:
        return CacheGeometry.from_config(config)
    except ConfigError:
        return None


def _blocks_per_request(
    vllm_config: VllmConfig, groups: Sequence[KVCacheGroupSpec], hit_unit: int | None = None
) -> int:
    """Return the blocks that one request of the longest length holds, over all groups."""
    if _is_packed(groups) or hit_unit is not None:
        geometry = _unit_geometry(vllm_config, groups)
        if geometry is not None:
            # The admission gate's own number: window groups hold tails, never a chunk.
            return max_request_blocks(
                geometry, vllm_config.model_config.max_model_len, vllm_config.usual_drafts
            )
    return sum(
        cdiv(
            group.kv_cache_spec.max_memory_usage_bytes(vllm_config),
            group.kv_cache_spec.page_size_bytes,
        )
        for group in groups
    )


def needed_bytes(
    vllm_config: VllmConfig,
    global_groups: Sequence[KVCacheGroupSpec],
    worker_groups: Sequence[KVCacheGroupSpec],
) -> int:
    """Return the bytes a worker must have for one request of the longest length."""
    num_blocks = _blocks_per_request(vllm_config, global_groups)
    if _is_packed(global_groups):
        num_blocks += 1  # the null block is never given out
    return num_blocks * bytes_per_block(worker_groups)


def largest_model_len(vllm_config: VllmConfig, fits: Callable[[], bool]) -> int:
    """Return the largest model length up to the current one for which ``fits()``; 0 if none.

    ``fits`` reads ``vllm_config.model_config.max_model_len``, which is restored afterwards.
    """
    model_config = vllm_config.model_config
    original = model_config.max_model_len
    low, high = 0, original
    try:
        while low < high:
            # The upper middle, so that a fitting `original` is found and the loop ends.
            model_config.max_model_len = middle = (low + high + 1) // 2
            if fits():
                low = middle
            else:
                high = middle - 1
    finally:
        model_config.max_model_len = original
    return low


def estimate_max_model_len(
    vllm_config: VllmConfig, kv_cache_spec: dict[str, KVCacheSpec], available_memory: int
) -> int:
    """Return the largest model length, up to the configured one, whose KV cache fits.

    Args:
        vllm_config: The configuration; unchanged afterwards.
        kv_cache_spec: Spec by layer.
        available_memory: Bytes.

    Returns:
        Tokens; 0 if not even one token fits.
    """
    specs = list(kv_cache_spec.values())
    return largest_model_len(
        vllm_config,
        lambda: sum(spec.max_memory_usage_bytes(vllm_config) for spec in specs) <= available_memory,
    )


def get_max_concurrency_for_kv_cache_config(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
) -> float:
    """Return how many requests of the longest length the pool holds at once."""
    groups, hit_unit = kv_cache_config.kv_cache_groups, kv_cache_config.hit_unit
    needed = _blocks_per_request(vllm_config, groups, hit_unit)
    return kv_cache_config.num_blocks / needed if needed else math.inf
