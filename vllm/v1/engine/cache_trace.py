"""``--cache-trace``: the scheduler that records, and the header of its file."""

import time
from dataclasses import fields
from pathlib import Path
from typing import Any

from vllm import envs
from vllm.cachelab.trace.events import FORMAT, VERSION, Header
from vllm.cachelab.trace.recorder import (
    CacheRecorder,
    RecordedAsyncScheduler,
    RecordedScheduler,
)
from vllm.cachelab.trace.writer import TraceWriter
from vllm.config import ModelConfig, VllmConfig
from vllm.config.kv_transfer import OFFLOADING_CONNECTOR
from vllm.exceptions import ConfigError
from vllm.logger import init_logger
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.sched.step_builder import SchedulerLimits
from vllm.v1.engine.kv_cache_setup import KVCachePlan
from vllm.version import __version__

logger = init_logger(__name__)

_ENVIRONMENT = ("VLLM_PIN_SWA_TOKENS", "VLLM_PIN_MIN_DROP_SIZE", "VLLM_PIN_MAX_SHARE")
# Workers share the pages of a block, cores the limits of the tiers.
_PARALLEL = ("tensor_parallel_size", "data_parallel_size")
_SPECULATIVE = ("model", "num_speculative_tokens", "method", "stale_row", "weighs_drafts")
# Of config.json; what else is there may be long, and says nothing about the cache.
_MAX_VALUE_CHARS = 4096


def make_recorded_scheduler(vllm_config: VllmConfig, plan: KVCachePlan, **parts: Any) -> Scheduler:
    """Return a scheduler that records.

    Args:
        vllm_config: All configuration.
        plan: Of the KV cache.
        **parts: As for ``Scheduler``.

    Raises:
        ConfigError: The trace cannot be written, or does not go with a KV connector or tenants.
    """
    observability = vllm_config.observability_config
    _check_connector(vllm_config)
    if vllm_config.scheduler_config.tenants is not None:
        raise ConfigError(
            "cache_trace does not record whose requests they are, which decides about the cache "
            "with tenants: leave one of them out."
        )
    assert observability.cache_trace is not None
    path = Path(observability.cache_trace)
    limits, speculative = SchedulerLimits.from_config(vllm_config), vllm_config.speculative_config
    recorder = CacheRecorder(
        TraceWriter(path, observability.cache_trace_max_bytes),
        make_header(vllm_config, plan),
        keeps_tokens=limits.use_eagle,
        num_drafts=None if speculative is None else speculative.usual_drafts,
    )
    logger.info("What the prefix cache sees is recorded in %s (hashes only, no text).", path)
    is_ahead = vllm_config.scheduler_config.async_scheduling
    make_recorded = RecordedAsyncScheduler if is_ahead else RecordedScheduler
    return make_recorded(recorder, vllm_config, plan.scheduler_config, **parts)


def _check_connector(vllm_config: VllmConfig) -> None:
    """Refuse what decides about the cache and is not recorded.

    Raises:
        ConfigError: There is such.
    """
    transfer = vllm_config.kv_transfer_config
    if transfer is None:
        return
    if transfer.kv_connector != OFFLOADING_CONNECTOR:
        raise ConfigError(
            f"cache_trace does not record what {transfer.kv_connector} loads from other engines: "
            "leave one of them out."
        )


def _tier_fields(vllm_config: VllmConfig) -> dict[str, Any] | None:
    """Return what rebuilds the tiers, without the folder's name."""
    transfer = vllm_config.kv_transfer_config
    if transfer is None:
        return None
    extra = dict(transfer.kv_connector_extra_config)
    tiers = extra.get("secondary_tiers") or ()
    extra["secondary_tiers"] = [
        {**{k: v for k, v in tier.items() if k != "disk_path"}, "root_dir": "-"} for tier in tiers
    ]
    events = vllm_config.kv_events_config
    if events is not None and events.publisher not in (None, "null"):
        # Nothing is brought back then before a request asks for it.
        extra["warm"] = 0
    return {"extra": extra, "unix_s": time.time()}


def make_header(vllm_config: VllmConfig, plan: KVCachePlan) -> Header:
    """Return what rebuilds the cache."""
    cache, config = vllm_config.cache_config, plan.worker_configs[0]
    interval = config.prefix_cache_retention_interval
    pool_bytes = sum(tensor.size for tensor in config.kv_cache_tensors)
    speculative = vllm_config.speculative_config
    hf_config = vllm_config.model_config.hf_config
    return Header(
        format=FORMAT,
        version=VERSION,
        server=__version__,
        hf_config={k: v for k, v in hf_config.items() if len(str(v)) <= _MAX_VALUE_CHARS},
        cache={
            "block_size": cache.block_size,
            "num_blocks": config.num_blocks,
            "block_bytes": pool_bytes // config.num_blocks,
            "interval": "auto" if interval is None else interval,
            "pinned_share": cache.prefix_cache_pinned_share,
            "dtype": _row_dtype(plan),
            "enable_prefix_caching": cache.enable_prefix_caching,
        },
        scheduler=_scheduler_fields(vllm_config),
        speculative=(
            None
            if speculative is None
            else {name: getattr(speculative, name) for name in _SPECULATIVE}
        ),
        environment={n: _written(getattr(envs, n)) for n in _ENVIRONMENT if envs.is_set(n)},
        groups=describe_groups(plan),
        hash_unit=plan.unit,
        max_model_len=vllm_config.model_config.max_model_len,
        tier=_tier_fields(vllm_config),
        parallel={name: getattr(vllm_config.parallel_config, name) for name in _PARALLEL},
        images=_image_fields(vllm_config.model_config),
    )


def _image_fields(model: ModelConfig) -> dict[str, int] | None:
    if model.image_family is None:
        return None
    return {
        "tokens": model.max_picture_tokens,
        "are_whole": int(model.pictures_are_whole),
        "row_bytes": model.picture_row_bytes,
    }


def describe_groups(plan: KVCachePlan) -> list[tuple[int, int]]:
    """Return block size and page bytes by group."""
    specs = [group.kv_cache_spec for group in plan.scheduler_config.kv_cache_groups]
    return [(spec.block_size, spec.page_size_bytes) for spec in specs]


def _scheduler_fields(vllm_config: VllmConfig) -> dict[str, Any]:
    config = vllm_config.scheduler_config
    made = {f.name: getattr(config, f.name) for f in fields(config) if f.init}
    return {
        name: value for name, value in made.items() if isinstance(value, bool | int | float | str)
    }


def _written(value: Any) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def _row_dtype(plan: KVCachePlan) -> str:
    """Return the type of cached rows; sums inside compressors have one of their own."""
    for group in plan.worker_configs[0].kv_cache_groups:
        for spec in group.kv_cache_spec.members():
            if spec.row_dtype is not None:
                return str(spec.row_dtype).removeprefix("torch.")
    return "float32"
