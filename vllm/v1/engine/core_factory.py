"""The production engine core; the one module of the engine that imports an executor and torch."""

from functools import partial

from vllm import platforms
from vllm.config import VllmConfig
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.kv_cache_setup import check_fixed_pool, smallest_pool_bytes
from vllm.v1.engine.memory_check import MemoryNeeds, check_memory, estimate_activation_bytes
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.kv_cache_interface import KVCacheSpec


def build_engine_core(vllm_config: VllmConfig) -> EngineCore:
    """Make the engine core of this process, the platform's defaults filled in."""
    config = platforms.current_platform.check_and_update_config(vllm_config)
    executor = partial(UniProcExecutor, check_specs=_check_specs, check_weights=_check_weights)
    return EngineCore(config, executor)


def _check_specs(config: VllmConfig, specs: list[dict[str, KVCacheSpec]]) -> None:
    platform = platforms.current_platform
    check_fixed_pool(
        config, specs, platform.fixed_kv_cache_bytes(config), platform.total_memory_bytes
    )


def _check_weights(
    config: VllmConfig, specs: list[dict[str, KVCacheSpec]], weight_bytes: int, free_bytes: int
) -> None:
    fixed = platforms.current_platform.fixed_kv_cache_bytes(config)
    pool_bytes = smallest_pool_bytes(config, specs) if fixed is None else fixed
    needs = MemoryNeeds(weight_bytes, pool_bytes, estimate_activation_bytes(config))
    # Cores on one host start together: each finds all of it free.
    num_sharing = config.parallel_config.num_local_cores if _shares_memory() else 1
    check_memory(config, needs, free_bytes // num_sharing)


def _shares_memory() -> bool:
    return platforms.current_platform.device_type == "cpu"
