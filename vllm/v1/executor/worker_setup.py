"""What every process with a worker does first."""

from importlib import import_module
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.parallel_state import WorkerPlace
from vllm.platforms.interface import Platform
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs


def register_caches(config: VllmConfig, platform: Platform) -> None:
    """Make the kinds of caches known, before specs are grouped or managers asked for."""
    register_all_kvcache_specs(None)
    platform.register_custom_kv_cache_specs(config)


def make_worker(config: VllmConfig, platform: Platform, place: WorkerPlace) -> Any:
    """Return the platform's worker; its device is not taken yet."""
    module_name, _, class_name = platform.worker_class_path.rpartition(".")
    return getattr(import_module(module_name), class_name)(config, platform, place)
