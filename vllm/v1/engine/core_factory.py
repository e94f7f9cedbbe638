"""The production engine core; the one module of the engine that imports an executor and torch."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from vllm import platforms
from vllm.config import VllmConfig
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.kv_cache_setup import check_fixed_pool, smallest_pool_bytes
from vllm.v1.engine.memory_check import MemoryNeeds, check_memory, estimate_activation_bytes
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.process_ranks import start_process_ranks
from vllm.v1.executor.ranked_executor import RankedExecutor
from vllm.v1.executor.ray_ranks import start_ray_ranks
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.kv_cache_interface import KVCacheSpec


def build_engine_core(vllm_config: VllmConfig) -> EngineCore:
    """Make the engine core of this process, the platform's defaults filled in."""
    config = platforms.current_platform.check_and_update_config(vllm_config)
    drafts = platforms.current_platform.default_drafts(config) if config.may_draft else None
    if drafts is not None:
        config = replace(config, speculative_config=drafts)
    return EngineCore(config, _choose_executor(config))


def _choose_executor(config: VllmConfig) -> Callable[[VllmConfig], Executor]:
    parallel = config.parallel_config
    backend = parallel.distributed_executor_backend or ("mp" if parallel.world_size > 1 else "uni")
    if backend == "uni":
        return partial(UniProcExecutor, check_specs=_check_specs, check_weights=_check_weights)
    start_ranks = start_process_ranks if backend == "mp" else start_ray_ranks
    return partial(
        RankedExecutor,
        start_ranks=start_ranks,
        check_specs=_check_specs,
        check_weights=_check_weights,
    )


def _check_specs(
    config: VllmConfig, specs: list[dict[str, KVCacheSpec]], get_total_bytes: Callable[[], int]
) -> None:
    fixed_bytes = platforms.current_platform.fixed_kv_cache_bytes(config)
    check_fixed_pool(config, specs, fixed_bytes, get_total_bytes)


def _check_weights(
    config: VllmConfig, specs: list[dict[str, KVCacheSpec]], weight_bytes: int, free_bytes: int
) -> None:
    fixed = platforms.current_platform.fixed_kv_cache_bytes(config)
    pool_bytes = smallest_pool_bytes(config, specs) if fixed is None else fixed
    needs = MemoryNeeds(
        weight_bytes, pool_bytes, estimate_activation_bytes(config), asks_for_pool=fixed is not None
    )
    # Cores on one host start together: each finds all of it free.
    num_sharing = config.parallel_config.num_local_cores if _shares_memory() else 1
    check_memory(config, needs, free_bytes // num_sharing)


def _shares_memory() -> bool:
    return platforms.current_platform.device_type == "cpu"
