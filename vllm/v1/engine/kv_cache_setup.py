"""From the workers' specs and memory to the KV cache of an engine, and its description."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import gcd

from vllm import platforms
from vllm.config import VllmConfig
from vllm.exceptions import ConfigError, VllmError
from vllm.utils.mem_constants import GiB_bytes
from vllm.v1.core.geometry import CacheGeometry, GroupGeometry
from vllm.v1.core.kv_cache_coordinator import find_coordinator_class
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_kv_cache_configs,
    get_max_concurrency_for_kv_cache_config,
)
from vllm.v1.core.layout.grouping import get_kv_cache_groups
from vllm.v1.core.layout.sizing import bytes_per_block, largest_model_len
from vllm.v1.core.retention.registry import make_policy
from vllm.v1.core.retention.sizes import (
    check_room_for_one,
    max_checkpoint_blocks,
    max_request_blocks,
)
from vllm.v1.core.sched.step_builder import SchedulerLimits
from vllm.v1.engine.wire import GroupInfo, KVCacheInfo
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    get_kv_cache_spec_sliding_window,
)


@dataclass(frozen=True, slots=True)
class KVCachePlan:
    """How the KV cache is laid out.

    Attributes:
        worker_configs: One per worker.
        scheduler_config: What the scheduler works with.
    """

    worker_configs: list[KVCacheConfig]
    scheduler_config: KVCacheConfig

    @property
    def unit(self) -> int:
        """Tokens under one prefix hash, of which every hit is a multiple."""
        unit = self.scheduler_config.hit_unit
        assert unit is not None, "an engine's models hit at one unit"
        return unit


def plan_kv_cache(
    vllm_config: VllmConfig, specs: list[dict[str, KVCacheSpec]], available_bytes: list[int]
) -> KVCachePlan:
    """Lay out the KV cache of all workers.

    Args:
        specs: Per worker, the spec of each cache by name.
        available_bytes: Per worker, the memory for its pool.

    Raises:
        ConfigError: The memory does not hold one request, block sizes do not fit, or a KV connector
            is given to a hybrid.

    Mutates:
        ``cache_config.num_gpu_blocks``, and ``model_config.max_model_len`` when it was -1.
    """
    try:
        configs = get_kv_cache_configs(vllm_config, specs, available_bytes, hits_at_units=True)
    except VllmError:
        raise
    except (ValueError, NotImplementedError) as error:
        raise ConfigError(f"The KV cache cannot be set up: {error}") from error
    vllm_config.cache_config.num_gpu_blocks = configs[0].num_blocks
    groups = configs[0].kv_cache_groups
    retention = vllm_config.cache_config.prefix_cache_retention_interval
    if not has_windows(groups):
        # Every block is kept: 0 and "auto", which suit all models, leave nothing to choose.
        retention = "none"
    configs = [
        replace(
            config,
            prefix_cache_retention_interval=retention,
            prefix_cache_pinned_share=vllm_config.cache_config.prefix_cache_pinned_share,
        )
        for config in configs
    ]
    if has_windows(groups):
        vllm_config.check_unit_hits()
    unit = _find_unit(vllm_config, groups)
    coordinator_path = platforms.current_platform.kv_cache_coordinator_path(vllm_config)
    configs = [
        replace(
            config,
            kv_cache_groups=_mark_drafter(config.kv_cache_groups, own, vllm_config),
            hit_unit=unit,
            coordinator_path=coordinator_path,
        )
        for config, own in zip(configs, specs, strict=True)
    ]
    coordinator = find_coordinator_class(coordinator_path)
    configs = [coordinator.arrange(config) for config in configs]
    scheduler_config = generate_scheduler_kv_cache_config(configs)
    if vllm_config.model_config.original_max_model_len == -1:
        _fit_model_len(vllm_config, scheduler_config)
    return KVCachePlan(configs, scheduler_config)


def _find_unit(vllm_config: VllmConfig, groups: list[KVCacheGroupSpec]) -> int:
    """Return the tokens of the smallest reusable prefix.

    That is ``--block-size`` for hybrids, else a block; what all are multiples of, of several sizes.
    """
    if is_hybrid(groups) or not groups:
        return vllm_config.cache_config.block_size
    return gcd(*(group.kv_cache_spec.block_size for group in groups))


def _fit_model_len(vllm_config: VllmConfig, config: KVCacheConfig) -> None:
    """Lower the fitted length to what the pool holds beside its null block.

    Mutates:
        ``model_config.max_model_len``.
    """
    geometry = CacheGeometry.from_config(config)
    lookahead = SchedulerLimits.from_config(vllm_config).num_lookahead_tokens
    model_config, num_usable = vllm_config.model_config, config.num_blocks - 1
    model_config.max_model_len = largest_model_len(
        vllm_config,
        lambda: max_request_blocks(geometry, model_config.max_model_len, lookahead) <= num_usable,
    )


def _mark_drafter(
    groups: list[KVCacheGroupSpec], specs: Mapping[str, KVCacheSpec], vllm_config: VllmConfig
) -> list[KVCacheGroupSpec]:
    """Return the groups, that of the running drafter flagged.

    Args:
        groups: Of the model.
        specs: Of each cache by name: a group's own spec says no roles.
        vllm_config: Says whether a drafter with rows of its own runs.
    """
    speculative = vllm_config.speculative_config
    if speculative is None or not speculative.use_eagle():
        return groups
    drafters = {name for name, spec in specs.items() if spec.serves_drafter}
    return [
        replace(group, is_eagle_group=not drafters.isdisjoint(group.layer_names))
        for group in groups
    ]


def check_fixed_pool(
    vllm_config: VllmConfig,
    specs: list[dict[str, KVCacheSpec]],
    fixed_bytes: int | None,
    get_total_bytes: Callable[[], int],
) -> None:
    """Refuse a KV pool whose size is known and cannot work, before the time that weights take.

    Args:
        vllm_config: The configuration; not changed.
        specs: Per worker, the spec of each cache by name.
        fixed_bytes: What the user gave each worker's pool; None: it will be known after loading.
        get_total_bytes: Tells the memory of a worker's device; asked only if the size is known.

    Raises:
        ConfigError: The pool cannot hold one request, or is larger than the device's memory.
    """
    if fixed_bytes is None and vllm_config.cache_config.num_gpu_blocks_override is None:
        return
    total_bytes = get_total_bytes()
    trial = replace(
        vllm_config,
        model_config=copy.copy(vllm_config.model_config),
        cache_config=copy.copy(vllm_config.cache_config),
    )
    if trial.model_config.original_max_model_len == -1:
        # It will be fitted to the pool: only what fits nothing is wrong.
        trial.model_config.original_max_model_len = trial.model_config.max_model_len = 1
    available = total_bytes if fixed_bytes is None else fixed_bytes
    plan = plan_kv_cache(trial, specs, [available] * len(specs))
    pool_bytes = max(sum(t.size for t in c.kv_cache_tensors) for c in plan.worker_configs)
    if pool_bytes > total_bytes:
        raise ConfigError(
            f"A KV pool of {pool_bytes / GiB_bytes:.2f} GiB does not fit in the device's memory of "
            f"{total_bytes / GiB_bytes:.2f} GiB: lower --num-gpu-blocks-override, "
            "--kv-cache-memory-bytes or VLLM_CPU_KVCACHE_SPACE."
        )
    config = plan.scheduler_config
    check_room_for_one(
        CacheGeometry.from_config(config),
        config.num_blocks,
        trial.model_config.max_model_len,
        SchedulerLimits.from_config(vllm_config).num_lookahead_tokens,
    )


def smallest_pool_bytes(vllm_config: VllmConfig, specs: list[dict[str, KVCacheSpec]]) -> int:
    """Return the bytes of a pool that holds one request of the longest length.

    Where that length is to be fitted to the memory (-1), of one token.

    Args:
        vllm_config: The configuration; not changed.
        specs: Per worker, the spec of each cache by name; all alike.

    Raises:
        ConfigError: The specs cannot be laid out.
    """
    trial = replace(vllm_config, model_config=copy.copy(vllm_config.model_config))
    if trial.model_config.original_max_model_len == -1:
        trial.model_config.max_model_len = 1
    own = specs[0]
    try:
        groups = get_kv_cache_groups(trial, own, hits_at_units=True)
    except VllmError:
        raise
    except (ValueError, NotImplementedError) as error:
        raise ConfigError(f"The KV cache cannot be set up: {error}") from error
    unit = _find_unit(trial, groups)
    geometry = CacheGeometry.from_config(KVCacheConfig(1, [], groups, hit_unit=unit))
    num_blocks = max_request_blocks(
        geometry,
        trial.model_config.max_model_len,
        SchedulerLimits.from_config(trial).num_lookahead_tokens,
    )
    # The null block is never given out.
    return (num_blocks + 1) * bytes_per_block(groups)


def is_hybrid(groups: list[KVCacheGroupSpec]) -> bool:
    """Whether a model mixes caches that keep everything with caches that keep a window."""
    return len(groups) > 1 and has_windows(groups)


def has_windows(groups: list[KVCacheGroupSpec]) -> bool:
    """Whether a request resumes from checkpoints of any cache: of its last rows, or its state."""
    return any(
        member.has_checkpoints for group in groups for member in group.kv_cache_spec.members()
    )


def describe_kv_cache(vllm_config: VllmConfig, plan: KVCachePlan) -> KVCacheInfo:
    """Return the numbers that people and routers ask for."""
    config = plan.worker_configs[0]
    max_model_len = vllm_config.model_config.max_model_len
    concurrency = get_max_concurrency_for_kv_cache_config(vllm_config, config)
    if not config.kv_cache_groups:
        concurrency = 0.0  # nothing is kept, so nothing bounds it; infinity does not print
    caching = vllm_config.cache_config.enable_prefix_caching
    retention, retention_interval = _describe_retention(vllm_config, config)
    whole, partial = _find_checkpoint_sizes(vllm_config, config) if caching else (None, None)
    return KVCacheInfo(
        num_blocks=config.num_blocks,
        capacity_tokens=int(concurrency * max_model_len),
        capacity_bytes=sum(t.size for c in plan.worker_configs for t in c.kv_cache_tensors),
        max_concurrency=concurrency,
        max_model_len=max_model_len,
        block_size=vllm_config.cache_config.block_size,
        unit=plan.unit,
        smallest_reusable_prefix=plan.unit if caching else None,
        retention=retention,
        retention_interval=retention_interval,
        groups=tuple(map(_describe_group, config.kv_cache_groups, find_event_steps(config))),
        checkpoint_tokens=None if whole is None else whole.num_tokens,
        rebuild_tokens=_find_rebuild_tokens(config) if caching else None,
        dense_token_bytes=_find_dense_token_bytes(config),
        checkpoint_bytes=None if whole is None else whole.num_bytes,
        partial_checkpoint_tokens=None if partial is None else partial.num_tokens,
        partial_checkpoint_bytes=None if partial is None else partial.num_bytes,
        cache_dtype=vllm_config.cache_config.cache_dtype,
    )


def _find_rebuild_tokens(config: KVCacheConfig) -> int | None:
    """Return the tokens to compute for window rows above a hit on dense rows alone."""
    geometry = CacheGeometry.from_config(config)
    interval = config.prefix_cache_retention_interval
    return make_policy(interval, geometry, config.num_blocks - 1).rebuild_tokens


@dataclass(frozen=True, slots=True)
class _CheckpointSize:
    """What resuming at one place needs beside dense rows.

    Attributes:
        num_tokens: For so many tokens' dense rows its blocks would do.
        num_bytes: Of its rows and states alone.
    """

    num_tokens: int
    num_bytes: int


def _find_checkpoint_sizes(
    vllm_config: VllmConfig, config: KVCacheConfig
) -> tuple[_CheckpointSize | None, _CheckpointSize | None]:
    """Return the size of a checkpoint, and of one that lacks layers which leave rows out."""
    geometry = CacheGeometry.from_config(config)
    blocks_per_token = sum(1 / group.block_size for group in geometry.dense)
    if not blocks_per_token or not geometry.windows:
        return None, None
    whole = _CheckpointSize(
        round(max_checkpoint_blocks(geometry) / blocks_per_token),
        sum(_count_checkpoint_bytes(config, geometry, group) for group in geometry.windows),
    )
    are_lazy = vllm_config.kv_transfer_config is None and _find_rebuild_tokens(config) is not None
    if not are_lazy or not geometry.lazy_reach:
        return whole, None
    kept = [group for group in geometry.windows if not group.lazy_reach]
    return whole, _CheckpointSize(
        round(sum(geometry.partial_blocks) / blocks_per_token),
        sum(_count_checkpoint_bytes(config, geometry, group) for group in kept),
    )


def _count_checkpoint_bytes(
    config: KVCacheConfig, geometry: CacheGeometry, group: GroupGeometry
) -> int:
    """Return the bytes of a group's rows, or states, that one checkpoint needs."""
    specs = config.kv_cache_groups[group.group_id].layer_specs().values()
    position = (group.keep // geometry.coarse + 2) * geometry.coarse
    if group.is_recurrent:
        return len(group.rows_below(position)) * sum(spec.page_size_bytes for spec in specs)
    num_rows = position - group.first_needed(position)
    return sum(num_rows * spec.page_size_bytes // spec.block_size for spec in specs)


def _find_dense_token_bytes(config: KVCacheConfig) -> int | None:
    """Return the bytes of the rows of one token that are kept for ever; None: there are none."""
    specs = [
        spec
        for group in CacheGeometry.from_config(config).dense
        for spec in config.kv_cache_groups[group.group_id].layer_specs().values()
    ]
    if not specs:
        return None
    return round(sum(spec.page_size_bytes / spec.block_size for spec in specs))


def find_event_steps(config: KVCacheConfig) -> list[int]:
    """Return, per group, tokens between two hashes in KV events; 0: places to resume at."""
    geometry = CacheGeometry.from_config(config)
    return [0 if group.is_window else max(geometry.unit, group.ratio) for group in geometry.groups]


def _describe_group(group: KVCacheGroupSpec, event_step: int) -> GroupInfo:
    spec = group.kv_cache_spec
    return GroupInfo(
        kind=spec.label,
        block_size=spec.block_size,
        num_layers=len(group.layer_names),
        page_size_bytes=spec.page_size_bytes,
        sliding_window=get_kv_cache_spec_sliding_window(spec),
        event_step=event_step,
    )


def _describe_retention(vllm_config: VllmConfig, config: KVCacheConfig) -> tuple[str, str | None]:
    """Return what is kept for later requests, in words and as the flag spells it."""
    if not vllm_config.cache_config.enable_prefix_caching:
        return "prefix caching is off", None
    if not has_windows(config.kv_cache_groups):
        return "every block, until its memory is needed", "none"
    geometry = CacheGeometry.from_config(config)
    interval = config.prefix_cache_retention_interval
    policy = make_policy(interval, geometry, config.num_blocks - 1)
    return f"{policy.describe()} (policy {policy.name})", policy.name
