"""The configuration of each of several engine cores."""

import os
from copy import copy
from dataclasses import replace
from uuid import uuid4

from vllm.config import VllmConfig
from vllm.config.kv_events import KVEventsConfig
from vllm.utils.hashing import get_hash_fn_by_name


def agree_on_hashes(config: VllmConfig) -> VllmConfig:
    """Return the configuration with what all processes must share to name prefixes alike."""
    cache = config.cache_config
    if cache.prefix_hash_seed is not None:
        return config
    known = os.environ.get("PYTHONHASHSEED")
    hash_fn = get_hash_fn_by_name(cache.prefix_caching_hash_algo)
    seed = os.urandom(32) if known is None else hash_fn(known)
    return replace(config, cache_config=replace(cache, prefix_hash_seed=seed))


def make_rank_config(config: VllmConfig, rank: int) -> VllmConfig:
    """Return what the core of a rank runs: its number, events for routing, what is its own."""
    events = config.kv_events_config
    if events is None or not events.enable_kv_cache_events:
        # Made for the front end alone.
        events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    observability = config.observability_config
    if observability.cache_trace is not None:
        path = trace_path(observability.cache_trace, rank)
        observability = replace(observability, cache_trace=path)
    transfer = config.kv_transfer_config
    if transfer is not None:
        # Each core, and each start of one, holds prompts of its own.
        transfer = replace(
            transfer, engine_id=f"{transfer.engine_id}-dp{rank}", instance_id=uuid4().hex
        )
    return replace(
        config,
        model_config=copy(config.model_config),
        cache_config=copy(config.cache_config),
        parallel_config=replace(
            config.parallel_config, data_parallel_rank=rank, data_parallel_index=rank
        ),
        kv_events_config=events,
        kv_transfer_config=transfer,
        observability_config=observability,
    )


def trace_path(path: str, rank: int) -> str:
    """Return the file that a core records in: the first one's has the name that was given."""
    return f"{path}.dp{rank}" if rank else path
