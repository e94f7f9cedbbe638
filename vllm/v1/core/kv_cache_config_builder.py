"""From specs and memory to every worker's KV cache config: how many blocks, which tensors.

All workers share one block id space, so grouping is global (over the layers of all workers), each
worker keeps its part of every group, and the smallest pool decides the number of blocks.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from vllm.exceptions import ConfigError
from vllm.logger import init_logger
from vllm.utils.mem_constants import GiB_bytes
from vllm.v1.core.hybrid_layout import build_packed_tensors, packed_block_stride
from vllm.v1.core.kv_cache_grouping import get_kv_cache_groups, holds_window_mla
from vllm.v1.core.retention import CacheGeometry, max_request_blocks
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


# -------------------------------------------------------------------- layout of one worker's memory


def _is_packed(groups: Sequence[KVCacheGroupSpec]) -> bool:
    return any(holds_window_mla(group.kv_cache_spec) for group in groups)


def _uniform_spec(groups: Sequence[KVCacheGroupSpec]) -> UniformTypeKVCacheSpecs | None:
    """Return the spec of a lone group of layers with unequal pages."""
    if len(groups) == 1 and isinstance(groups[0].kv_cache_spec, UniformTypeKVCacheSpecs):
        return groups[0].kv_cache_spec
    return None


def _page_size_bytes(groups: Sequence[KVCacheGroupSpec]) -> int:
    pages = {group.kv_cache_spec.page_size_bytes for group in groups}
    assert len(pages) == 1, f"KV cache groups must have one page size, got {sorted(pages)} bytes."
    return pages.pop()


def _num_tensors(groups: Sequence[KVCacheGroupSpec]) -> int:
    """Return how many layers of one group a worker holds at most."""
    return max((len(group.layer_names) for group in groups), default=0)


def _bytes_per_block(groups: Sequence[KVCacheGroupSpec]) -> int:
    """Return the bytes one block id costs in a worker; 0 if the worker holds no layer."""
    if _num_tensors(groups) == 0:
        return 0
    if _is_packed(groups):
        return packed_block_stride(groups)
    uniform = _uniform_spec(groups)
    if uniform is not None:
        return uniform.page_size_bytes
    return _num_tensors(groups) * _page_size_bytes(groups)


def _build_tensors(
    groups: Sequence[KVCacheGroupSpec], available_memory: int
) -> tuple[int | None, list[KVCacheTensor]]:
    """Fill a worker's memory; None blocks: it holds no layer and does not care."""
    block_bytes = _bytes_per_block(groups)
    if block_bytes == 0:
        return None, []
    if _is_packed(groups):
        return build_packed_tensors(groups, available_memory, None)
    num_blocks = max(available_memory, 0) // block_bytes
    uniform = _uniform_spec(groups)
    if uniform is not None:
        return num_blocks, [
            KVCacheTensor(uniform.kv_cache_specs[name].page_size_bytes * num_blocks, [name])
            for name in groups[0].layer_names
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


def _blocks_per_request(vllm_config: VllmConfig, groups: Sequence[KVCacheGroupSpec]) -> int:
    """Return the blocks that one request of the longest length holds, over all groups."""
    if _is_packed(groups):
        geometry = _unit_geometry(vllm_config, groups)
        if geometry is not None:
            # The admission gate's own number: window groups hold tails, never a chunk.
            return max_request_blocks(
                geometry, vllm_config.model_config.max_model_len, vllm_config.num_speculative_tokens
            )
    return sum(
        _cdiv(
            group.kv_cache_spec.max_memory_usage_bytes(vllm_config),
            group.kv_cache_spec.page_size_bytes,
        )
        for group in groups
    )


def _needed_bytes(
    vllm_config: VllmConfig,
    global_groups: Sequence[KVCacheGroupSpec],
    worker_groups: Sequence[KVCacheGroupSpec],
) -> int:
    """Return the bytes a worker must have for one request of the longest length."""
    num_blocks = _blocks_per_request(vllm_config, global_groups)
    if _is_packed(global_groups):
        num_blocks += 1  # the null block is never given out
    return num_blocks * _bytes_per_block(worker_groups)


def _largest_model_len(vllm_config: VllmConfig, fits: Callable[[], bool]) -> int:
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
    return _largest_model_len(
        vllm_config,
        lambda: sum(spec.max_memory_usage_bytes(vllm_config) for spec in specs) <= available_memory,
    )


def get_max_concurrency_for_kv_cache_config(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
) -> float:
    """Return how many requests of the longest length the pool holds at once."""
    needed = _blocks_per_request(vllm_config, kv_cache_config.kv_cache_groups)
    return kv_cache_config.num_blocks / needed if needed else math.inf


# ------------------------------------------------------------------------------------------ workers


def _merge_worker_specs(kv_cache_specs: Sequence[dict[str, KVCacheSpec]]) -> dict[str, KVCacheSpec]:
    merged: dict[str, KVCacheSpec] = {}
    for worker_specs in kv_cache_specs:
        for name, spec in worker_specs.items():
            assert merged.setdefault(name, spec) == spec, (
                f"Workers disagree on the KV cache spec of layer {name}: {merged[name]} and {spec}."
            )
    return merged


def _project_kv_cache_groups_to_worker(
    global_kv_cache_groups: list[KVCacheGroupSpec], worker_spec: dict[str, KVCacheSpec]
) -> list[KVCacheGroupSpec]:
    """Return the groups as one worker holds them: as many, with its layers only."""
    projected = []
    for group in global_kv_cache_groups:
        names = [name for name in group.layer_names if name in worker_spec]
        spec = group.kv_cache_spec
        # A worker without a layer of the group still needs a spec to speak of its block size.
        if names and isinstance(spec, UniformTypeKVCacheSpecs):
            spec = UniformTypeKVCacheSpecs(
                block_size=spec.block_size,
                kv_cache_specs={name: spec.kv_cache_specs[name] for name in names},
            )
        projected.append(KVCacheGroupSpec(names, spec, bool(names) and group.is_eagle_group))
    return projected


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GiB_bytes:.2f} GiB"


def _fit_model_len(
    vllm_config: VllmConfig,
    groups: Sequence[KVCacheGroupSpec],
    workers: Sequence[tuple[list[KVCacheGroupSpec], int]],
) -> None:
    """Shrink ``model_config.max_model_len`` to what every worker can hold."""

    def fits() -> bool:
        return all(_needed_bytes(vllm_config, groups, own) <= memory for own, memory in workers)

    model_config = vllm_config.model_config
    longest = _largest_model_len(vllm_config, fits)
    if longest == 0:
        raise ConfigError(
            "max_model_len cannot be fitted: the KV cache memory "
            f"({_gib(min(memory for _, memory in workers))}) does not hold one token. Raise "
            "gpu_memory_utilization or kv_cache_memory_bytes."
        )
    if longest < model_config.max_model_len:
        logger.info(
            "max_model_len is reduced from %d to %d to fit the KV cache memory.",
            model_config.max_model_len,
            longest,
        )
        model_config.max_model_len = longest


def _check_memory(
    vllm_config: VllmConfig,
    groups: Sequence[KVCacheGroupSpec],
    workers: Sequence[tuple[list[KVCacheGroupSpec], int]],
) -> None:
    """Refuse a pool that cannot hold one request of the longest length."""
    max_model_len = vllm_config.model_config.max_model_len
    for own, memory in workers:
        needed = _needed_bytes(vllm_config, groups, own)
        if needed <= memory:
            continue
        longest = _largest_model_len(
            vllm_config,
            lambda own=own, memory=memory: (  # type: ignore[misc]
                _needed_bytes(vllm_config, groups, own) <= memory
            ),
        )
        raise ConfigError(
            f"To serve at least one request with the model's max seq len ({max_model_len}), "
            f"{_gib(needed)} of KV cache are needed, but only {_gib(memory)} are available. The "
            f"longest length that fits is {longest}: lower max_model_len, or raise "
            "gpu_memory_utilization, kv_cache_memory_bytes or num_gpu_blocks_override."
        )


def _plan_memory(
    vllm_config: VllmConfig,
    projected: Sequence[list[KVCacheGroupSpec]],
    available_memory: Sequence[int],
) -> list[tuple[list[KVCacheGroupSpec], int]]:
    """Pair each worker that holds layers with the bytes it plans with."""
    override = vllm_config.cache_config.num_gpu_blocks_override
    workers = []
    for own, memory in zip(projected, available_memory, strict=True):
        block_bytes = _bytes_per_block(own)
        if block_bytes == 0:
            continue
        if override is not None:
            memory = override * block_bytes
        if memory <= 0:
            raise ConfigError(
                f"There is no memory for KV cache blocks ({memory} bytes): raise "
                "gpu_memory_utilization or kv_cache_memory_bytes."
            )
        workers.append((own, memory))
    return workers


def get_kv_cache_configs(
    vllm_config: VllmConfig,
    kv_cache_specs: list[dict[str, KVCacheSpec]],
    available_memory: list[int],
) -> list[KVCacheConfig]:
    """Lay out the KV cache of every worker.

    Args:
        vllm_config: The configuration.
        kv_cache_specs: Per worker, spec by layer.
        available_memory: Per worker, bytes for the KV cache.

    Mutates:
        ``vllm_config.model_config.max_model_len``, only if it was asked to be fitted (-1).

    Returns:
        Per worker a config; all have the same number of groups and of blocks.

    Raises:
        AssertionError: Workers disagree on a layer.
        ConfigError: (a ValueError) A spec nothing manages, or too little memory.
        NotImplementedError: Page sizes that cannot be made equal.
    """
    merged = _merge_worker_specs(kv_cache_specs)
    KVCacheSpecRegistry.check_kv_cache_spec_registry(merged)
    groups = get_kv_cache_groups(vllm_config, merged)
    if not groups:
        return [KVCacheConfig(1, [], []) for _ in kv_cache_specs]
    projected = [_project_kv_cache_groups_to_worker(groups, specs) for specs in kv_cache_specs]
    workers = _plan_memory(vllm_config, projected, available_memory)
    if vllm_config.model_config.original_max_model_len == -1:
        _fit_model_len(vllm_config, groups, workers)
    _check_memory(vllm_config, groups, workers)
    planned = iter(workers)
    layouts = [
        _build_tensors(*next(planned)) if _bytes_per_block(own) else (None, []) for own in projected
    ]
    num_blocks = min(n for n, _ in layouts if n is not None)
    configs = []
    for own, (own_blocks, tensors) in zip(projected, layouts, strict=True):
        for tensor in tensors:
            # The smallest worker's blocks are all that anyone addresses.
            tensor.size = tensor.size // own_blocks * num_blocks if own_blocks else 0
        configs.append(KVCacheConfig(num_blocks, tensors, own))
    _report(vllm_config, KVCacheConfig(num_blocks, [], groups))
    return configs


def _report(vllm_config: VllmConfig, config: KVCacheConfig) -> None:
    max_model_len = vllm_config.model_config.max_model_len
    concurrency = get_max_concurrency_for_kv_cache_config(vllm_config, config)
    if math.isinf(concurrency):
        return
    logger.info(
        "KV cache: %d blocks, %d tokens; %.2f requests of %d tokens fit at once.",
        config.num_blocks,
        int(concurrency * max_model_len),
        concurrency,
        max_model_len,
    )


# ---------------------------------------------------------------------------------- the scheduler's


def generate_scheduler_kv_cache_config(kv_cache_configs: list[KVCacheConfig]) -> KVCacheConfig:
    """Return the config the scheduler works with.

    It only needs block sizes and kinds, so a group of unequal layers is represented by one.

    Raises:
        AssertionError: Workers have different numbers of blocks.
    """
    assert all(c.num_blocks == kv_cache_configs[0].num_blocks for c in kv_cache_configs), (
        f"Workers have different pools: {[c.num_blocks for c in kv_cache_configs]} blocks."
    )
    config = copy.deepcopy(kv_cache_configs[0])
    for group in config.kv_cache_groups:
        if isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs):
            group.kv_cache_spec = next(iter(group.kv_cache_spec.kv_cache_specs.values()))
    return config


def resolve_kv_cache_block_sizes(
    kv_cache_config: KVCacheConfig, vllm_config: VllmConfig
) -> tuple[int, int]:
    """Return (scheduler block size, hash block size) in tokens.

    A hit is a multiple of the first unless ``hit_unit`` is set; one hash covers the second.

    Raises:
        ConfigError: Context parallelism with several groups, or a ``hash_block_size`` that does
            not divide every group's block.
    """
    cache_config = vllm_config.cache_config
    parallel = vllm_config.parallel_config
    ranks = parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size
    sizes = [group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups]
    if not sizes:
        sizes = [cache_config.block_size]
    if kv_cache_config.hit_unit is not None:
        return math.lcm(*sizes, kv_cache_config.hit_unit), kv_cache_config.hit_unit
    if len(sizes) == 1:
        return sizes[0] * ranks, sizes[0] * ranks
    if ranks != 1:
        raise ConfigError(
            f"Context parallelism over {ranks} ranks needs a single KV cache group, this model has "
            f"{len(sizes)}: set the context parallel sizes to 1."
        )
    scheduler_block_size = math.lcm(*sizes)
    if not cache_config.enable_prefix_caching and vllm_config.kv_transfer_config is None:
        return scheduler_block_size, scheduler_block_size
    hash_block_size = cache_config.hash_block_size
    if hash_block_size is None:
        return scheduler_block_size, math.gcd(*sizes)
    if any(size % hash_block_size for size in sizes):
        raise ConfigError(
            f"hash_block_size={hash_block_size} must divide every KV cache group's block size "
            f"({sizes}): use {math.gcd(*sizes)} or one of its divisors."
        )
    return scheduler_block_size, hash_block_size
