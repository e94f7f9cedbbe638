"""Which scheduler an engine has; what only one that records needs is loaded with it."""

from importlib import import_module
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.kv_cache_setup import KVCachePlan

# With what tiers of the cache keep: some 85 modules, which other engines start without.
_RECORDED = "vllm.v1.engine.cache_trace"


def make_scheduler(vllm_config: VllmConfig, plan: KVCachePlan, **parts: Any) -> Scheduler:
    """Return the scheduler, one that records if that was asked for.

    Args:
        vllm_config: All configuration.
        plan: Of the KV cache.
        **parts: As for ``Scheduler``.

    Raises:
        ConfigError: A trace cannot be written, or does not go with a KV connector or tenants.
    """
    parts["block_size"] = plan.unit
    if vllm_config.observability_config.cache_trace is None:
        is_ahead = vllm_config.scheduler_config.async_scheduling
        make: type[Scheduler] = AsyncScheduler if is_ahead else Scheduler
        return make(vllm_config, plan.scheduler_config, **parts)
    scheduler: Scheduler = import_module(_RECORDED).make_recorded_scheduler(
        vllm_config, plan, **parts
    )
    return scheduler
