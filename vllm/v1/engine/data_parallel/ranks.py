"""The configuration of each of several engine cores."""

import os
from copy import copy
from dataclasses import replace
from typing import Any
from uuid import uuid4

from vllm.config import VllmConfig
from vllm.config.kv_events import KVEventsConfig
from vllm.config.kv_transfer import (
    OFFLOADING_CONNECTOR,
    KVTransferConfig,
    child_configs,
    join_configs,
)
from vllm.config.parallel import ParallelConfig
from vllm.distributed.kv_transfer.handover.sockets import find_port_range
from vllm.utils.hashing import get_hash_fn_by_name

_LEASE_MARGIN_S = 5.0


def agree_on_hashes(config: VllmConfig) -> VllmConfig:
    """Return the configuration with what all processes must share to name prefixes alike."""
    cache = config.cache_config
    if cache.prefix_hash_seed is not None:
        return config
    known = os.environ.get("PYTHONHASHSEED")
    hash_fn = get_hash_fn_by_name(cache.prefix_caching_hash_algo)
    seed = os.urandom(32) if known is None else hash_fn(known)
    return replace(config, cache_config=replace(cache, prefix_hash_seed=seed))


def make_rank_config(config: VllmConfig, rank: int, host: str = "127.0.0.1") -> VllmConfig:
    """Return what the core of a rank runs: its number, events for routing, what is its own.

    Args:
        config: Of all cores.
        rank: Its number.
        host: Where it answers other cores, if they fill each other's caches.
    """
    events = config.kv_events_config
    if events is None or not events.enable_kv_cache_events:
        # Made for the front end alone.
        events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    observability = config.observability_config
    if observability.cache_trace is not None:
        path = trace_path(observability.cache_trace, rank)
        observability = replace(observability, cache_trace=path)
    transfer = config.kv_transfer_config
    if config.parallel_config.warm_pull_bytes:
        transfer = _share_caches(config.parallel_config, rank, host, transfer)
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


def _share_caches(
    parallel: ParallelConfig, rank: int, host: str, asked: KVTransferConfig | None
) -> KVTransferConfig:
    """Return what lets a core give others what it uses most, and pull what they do.

    Args:
        parallel: How long it may take, and where the ports of this rank begin.
        rank: Of the core.
        host: Where it answers.
        asked: What the core transfers besides; None: nothing.
    """
    seconds = parallel.warm_pull_seconds
    parts = [] if asked is None else child_configs(asked) or [asked]
    tiers = [part for part in parts if part.kv_connector == OFFLOADING_CONNECTOR]
    others = [part for part in parts if part.kv_connector != OFFLOADING_CONNECTOR]
    # The connector adds what lies before the ports of this rank.
    num_workers = parallel.world_size
    extra: dict[str, Any] = {
        "load_timeout_s": seconds,
        # Until the last of them is pulled, or given back.
        "lease_timeout_s": seconds + _LEASE_MARGIN_S,
    }
    if others:
        extra["leaves_requests"] = True
    sharing = KVTransferConfig.from_dict(
        {
            "kv_connector": "NeighbourConnector",
            "kv_role": "kv_both",
            "kv_ip": host,
            "kv_port": find_port_range(host, rank * num_workers, num_workers),
            "kv_connector_extra_config": extra,
        }
    )
    # What it loaded for nobody it takes out of a report, before those that load for requests.
    return join_configs(*tiers, sharing, *others, named=asked) if parts else sharing


def trace_path(path: str, rank: int) -> str:
    """Return the file that a core records in: the first one's has the name that was given."""
    return f"{path}.dp{rank}" if rank else path
