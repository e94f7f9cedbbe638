"""From the configuration to the parts of a scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.multimodal.registry import MULTIMODAL_REGISTRY
from vllm.v1.core.encoder_cache_manager import (
    EncoderCacheManager,
    EncoderDecoderCacheManager,
    compute_mm_encoder_budget,
)
from vllm.v1.core.kv_cache_manager import KVCacheManager, SharedKVCacheManager
from vllm.v1.core.kv_cache_metrics import KVCacheMetricsCollector
from vllm.v1.core.retention.cache_shares import CacheShares
from vllm.v1.core.sched.encoder_inputs import EncoderPlanner
from vllm.v1.core.sched.fair_requests import FairRequests
from vllm.v1.core.sched.fair_shares import FairShares
from vllm.v1.core.sched.requests import Requests
from vllm.v1.core.sched.step_builder import SchedulerLimits
from vllm.v1.core.sched.tower_orders import TowerOrders
from vllm.v1.core.values.cache_settings import CacheSettings, StaleRow
from vllm.v1.request import Request

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


# Rows of towers that are kept in any case: a few dozen pictures, each of which took seconds.
_LEAST_CACHE_BYTES = 128 << 20
# Steps' worth of tokens by which a tenant that always had something alive may be behind.
_MAX_LAG_STEPS = 8


def make_requests(
    vllm_config: VllmConfig, limits: SchedulerLimits, *, notes_events: bool, tells_clients: bool
) -> Requests:
    """Build the requests' places: fair ones where tenants share the server."""
    tenants = vllm_config.scheduler_config.tenants
    if tenants is None:
        return Requests(
            limits.policy,
            joint_prompt_tokens=limits.joint_prompt_tokens,
            notes_events=notes_events,
            tells_clients=tells_clients,
        )
    shares = FairShares(tenants, max_lag=_MAX_LAG_STEPS * limits.max_num_tokens)
    return FairRequests(
        shares,
        limits.policy,
        joint_prompt_tokens=limits.joint_prompt_tokens,
        notes_events=notes_events,
        tells_clients=tells_clients,
    )


def make_manager(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    limits: SchedulerLimits,
    block_size: int,
    hash_block_size: int,
) -> KVCacheManager:
    """Build the KV cache manager."""
    observability = vllm_config.observability_config
    events_config = vllm_config.kv_events_config
    collector = None
    if observability.kv_cache_metrics:
        collector = KVCacheMetricsCollector(observability.kv_cache_metrics_sample)
    settings = CacheSettings(
        kv_cache_config=kv_cache_config,
        max_model_len=limits.max_model_len,
        scheduler_block_size=block_size,
        hash_block_size=hash_block_size,
        max_num_batched_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
        enable_caching=vllm_config.cache_config.enable_prefix_caching,
        use_eagle=limits.use_eagle,
        enable_kv_cache_events=events_config is not None and events_config.enable_kv_cache_events,
        dcp_world_size=vllm_config.parallel_config.decode_context_parallel_size,
        pcp_world_size=vllm_config.parallel_config.prefill_context_parallel_size,
        metrics_collector=collector,
        num_lookahead_tokens=limits.num_lookahead_tokens,
        stale_row=StaleRow(limits.stale_row),
        shares=_make_shares(vllm_config, kv_cache_config),
        allows_lazy=vllm_config.kv_transfer_config is None,
    )
    # It counts no lookups: a request that finds no room is looked up again every step.
    # AdmissionStats counts admissions.
    shared = KVCacheManager if settings.shares is None else SharedKVCacheManager
    return shared.from_settings(settings)


def _make_shares(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> CacheShares | None:
    tenants = vllm_config.scheduler_config.tenants
    if tenants is None or not vllm_config.cache_config.enable_prefix_caching:
        return None
    return CacheShares.of(tenants, kv_cache_config.num_blocks - 1)


def make_encoder_planner(
    vllm_config: VllmConfig, limits: SchedulerLimits, mm_registry: Any
) -> EncoderPlanner:
    """Build the encoder's side with its cache; text models get one without room.

    Args:
        vllm_config: All configuration.
        limits: What bounds a step.
        mm_registry: Sizes of multimodal items; None: those of ``vllm.multimodal.registry``.
    """
    model_config = vllm_config.model_config
    sizes: dict[str, int] = {}
    if model_config.is_multimodal_model:
        registry = MULTIMODAL_REGISTRY if mm_registry is None else mm_registry
        sizes = registry.get_max_tokens_per_item_by_modality(model_config)
    # Outsiders bring model configs of their own.
    are_whole = bool(sizes) and getattr(model_config, "pictures_are_whole", False) is True
    compute_budget, cache_size = compute_mm_encoder_budget(vllm_config.scheduler_config, sizes)
    row_bytes = getattr(model_config, "picture_row_bytes", 0)
    if sizes and row_bytes:
        cache_size = max(cache_size, _LEAST_CACHE_BYTES // row_bytes)
    return EncoderPlanner(
        cache=(
            EncoderDecoderCacheManager(cache_size)
            if model_config.is_encoder_decoder
            else EncoderCacheManager(cache_size, Request.encoder_key)
        ),
        ec_connector=_make_ec_connector(vllm_config),
        is_encoder_decoder=model_config.is_encoder_decoder,
        disable_chunked_mm_input=limits.disable_chunked_mm_input or are_whole,
        shift=1 if limits.use_eagle else 0,
        compute_budget=compute_budget,
        longest=max(sizes.values(), default=0),
        orders=_make_orders(vllm_config),
    )


def _make_orders(vllm_config: VllmConfig) -> TowerOrders | None:
    """Return what is made beside the steps; None: nothing is."""
    has_tower = getattr(vllm_config.model_config, "image_family", None) is not None
    return TowerOrders() if has_tower else None


def _make_ec_connector(vllm_config: VllmConfig) -> Any:
    transfer = vllm_config.ec_transfer_config
    if transfer is None or transfer.ec_connector is None:
        return None
    return ECConnectorFactory.create_connector(vllm_config, ECConnectorRole.SCHEDULER)


def make_connector(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, manager: KVCacheManager
) -> Any:
    """Build the KV connector's scheduler side; None if none is configured."""
    transfer = vllm_config.kv_transfer_config
    if transfer is None or transfer.kv_connector is None:
        return None
    connector = KVConnectorFactory.create_connector(
        vllm_config, KVConnectorRole.SCHEDULER, kv_cache_config
    )
    connector.bind_gpu_block_pool(manager.block_pool)
    connector.bind_kv_cache_manager(manager)
    return connector
