"""From specs and memory to every worker's KV cache config: how many blocks, which tensors.

All workers share one block id space, so grouping is global (over the layers of all workers), each
worker keeps its part of every group, and the smallest pool decides the number of blocks.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.exceptions import ConfigError, PoolTooSmallError
from vllm.logger import init_logger
from vllm.utils.mem_constants import format_size
from vllm.v1.core.layout.grouping import get_kv_cache_groups
from vllm.v1.core.layout.sizing import (
    build_tensors,
    bytes_per_block,
    get_max_concurrency_for_kv_cache_config,
    largest_model_len,
    needed_bytes,
)
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    member_spec,
)
from vllm.v1.kv_cache_specs.records import check_managed

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)


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
        spec = group.kv_cache_spec.narrowed(names)
        projected.append(KVCacheGroupSpec(names, spec, bool(names) and group.is_eagle_group))
    return projected


def _fit_model_len(
    vllm_config: VllmConfig,
    groups: Sequence[KVCacheGroupSpec],
    workers: Sequence[tuple[list[KVCacheGroupSpec], int]],
) -> None:
    """Shrink ``model_config.max_model_len`` to what every worker can hold."""

    def fits() -> bool:
        return all(needed_bytes(vllm_config, groups, own) <= memory for own, memory in workers)

    model_config = vllm_config.model_config
    longest = largest_model_len(vllm_config, fits)
    if longest == 0:
        raise ConfigError(
            "max_model_len cannot be fitted: the KV cache memory "
            f"({format_size(min(memory for _, memory in workers))}) does not hold one token. Raise "
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
        needed = needed_bytes(vllm_config, groups, own)
        if needed <= memory:
            continue
        longest = largest_model_len(
            vllm_config,
            lambda own=own, memory=memory: (  # type: ignore[misc]
                needed_bytes(vllm_config, groups, own) <= memory
            ),
        )
        fact = (
            f"To serve at least one request with the model's max seq len ({max_model_len}), "
            f"{format_size(needed)} ({needed:,} bytes) of KV cache are needed, but only "
            f"{format_size(memory)} ({memory:,} bytes) are available."
        )
        # A pool may be too small for a single token.
        lower = f" The longest length that fits is {longest}: lower max_model_len, or raise"
        raise PoolTooSmallError(
            f"{fact}{lower if longest else ' Raise'} gpu_memory_utilization, "
            "kv_cache_memory_bytes or num_gpu_blocks_override.",
            fact,
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
        block_bytes = bytes_per_block(own)
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
    *,
    hits_at_units: bool = False,
) -> list[KVCacheConfig]:
    """Lay out the KV cache of every worker.

    Args:
        vllm_config: The configuration.
        kv_cache_specs: Per worker, spec by layer.
        available_memory: Per worker, bytes for the KV cache.
        hits_at_units: See ``get_kv_cache_groups``.

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
    check_managed(merged)
    groups = get_kv_cache_groups(vllm_config, merged, hits_at_units=hits_at_units)
    if not groups:
        return [KVCacheConfig(1, [], []) for _ in kv_cache_specs]
    projected = [_project_kv_cache_groups_to_worker(groups, specs) for specs in kv_cache_specs]
    workers = _plan_memory(vllm_config, projected, available_memory)
    if vllm_config.model_config.original_max_model_len == -1:
        _fit_model_len(vllm_config, groups, workers)
    _check_memory(vllm_config, groups, workers)
    planned = iter(workers)
    layouts = [
        build_tensors(*next(planned)) if bytes_per_block(own) else (None, []) for own in projected
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
    logger.debug(
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
        group.kv_cache_spec = member_spec(group.kv_cache_spec)
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
