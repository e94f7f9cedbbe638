"""One worker in the engine core's own process."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from vllm import platforms
from vllm.config import VllmConfig
from vllm.exceptions import ConfigError
from vllm.platforms.interface import Platform
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput


class UniProcExecutor:
    """Builds the platform's worker, initialises its device and loads the model.

    Args:
        vllm_config: The configuration; the platform's defaults are filled in here if they were not.
        platform: The device's kind; None: the current one.
        check_specs: Called with the configuration and each worker's cache specs, the devices in
            use, before weights load.
        check_weights: Called with both, the bytes the weights will take, and the bytes that were
            free, before a value is read.

    Raises:
        ConfigError: The configuration does not suit the platform or the model.
        CheckpointError: The weights do not fit the model.

    Owns: its worker.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        platform: Platform | None = None,
        check_specs: Callable[[VllmConfig, list[dict[str, KVCacheSpec]]], None] | None = None,
        check_weights: Callable[[VllmConfig, list[dict[str, KVCacheSpec]], int, int], None]
        | None = None,
    ) -> None:
        platform = platforms.current_platform if platform is None else platform
        config = platform.check_and_update_config(vllm_config)
        if config.parallel_config.world_size != 1:
            raise ConfigError(
                f"{config.parallel_config.world_size} workers were asked for, but this executor "
                "runs one: use tensor_parallel_size=1 and pipeline_parallel_size=1."
            )
        # Before specs are grouped and the scheduler asks for managers, both in this process.
        register_all_kvcache_specs(None)
        platform.register_custom_kv_cache_specs(config)
        self._worker: Any = _load_class(platform.worker_class_path)(
            config, platform, config.parallel_config.first_device
        )
        # A wrong block size or cache dtype must show before the minutes that weights can take.
        specs = self.get_kv_cache_specs()
        self._worker.init_device()
        if check_specs is not None:
            # Some devices tell their memory only once they are in use.
            check_specs(config, specs)
        if check_weights is not None:
            free_bytes = platform.free_memory_bytes()
            check_weights(config, specs, self._worker.build_model(), free_bytes)
        self._worker.load_model()

    def get_kv_cache_specs(self) -> list[dict[str, KVCacheSpec]]:
        """Return the worker's cache specs by cache name."""
        return [self._worker.get_kv_cache_specs()]

    def determine_available_memory(self) -> list[int]:
        """Return the bytes the worker's KV pool may take."""
        return [self._worker.determine_available_memory()]

    def initialize_from_config(self, kv_cache_configs: list[KVCacheConfig]) -> None:
        """Allocate the KV cache; steps may follow."""
        (kv_cache_config,) = kv_cache_configs
        self._worker.initialize_from_config(kv_cache_config)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step."""
        output: ModelRunnerOutput = self._worker.execute_model(scheduler_output)
        return output

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Return what the last step drafted, once."""
        drafts: DraftTokenIds | None = self._worker.take_draft_token_ids()
        return drafts

    def shutdown(self) -> None:
        """Release the device; idempotent."""
        self._worker.shutdown()


def _load_class(path: str) -> Any:
    module_name, _, class_name = path.rpartition(".")
    return getattr(import_module(module_name), class_name)
