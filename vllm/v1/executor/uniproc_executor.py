"""One worker in the engine core's own process."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from vllm import platforms
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import ALONE
from vllm.exceptions import ConfigError
from vllm.platforms.interface import Platform
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor.abstract import SpecsCheck, WeightsCheck
from vllm.v1.executor.worker_setup import make_worker, register_caches
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput, PendingStep


class UniProcExecutor:
    """Builds the platform's worker, initialises its device and loads the model.

    Args:
        vllm_config: The configuration; the platform's defaults are filled in here if they were not.
        platform: The device's kind; None: the current one.
        check_specs: See ``SpecsCheck``.
        check_weights: See ``WeightsCheck``.

    Raises:
        ConfigError: The configuration does not suit the platform or the model.
        CheckpointError: The weights do not fit the model.

    Owns: its worker.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        platform: Platform | None = None,
        check_specs: SpecsCheck | None = None,
        check_weights: WeightsCheck | None = None,
    ) -> None:
        platform = platforms.current_platform if platform is None else platform
        config = platform.check_and_update_config(vllm_config)
        if config.parallel_config.world_size != 1:
            raise ConfigError(
                f"{config.parallel_config.world_size} workers were asked for, but this executor "
                "runs one: use tensor_parallel_size=1 and pipeline_parallel_size=1."
            )
        register_caches(config, platform)
        self._worker: Any = make_worker(
            config, platform, replace(ALONE, local_rank=config.parallel_config.first_device)
        )
        # A wrong block size or cache dtype must show before the minutes that weights can take.
        specs = self.get_kv_cache_specs()
        self._worker.init_device()
        if check_specs is not None:
            # Some devices tell their memory only once they are in use.
            check_specs(config, specs, platform.total_memory_bytes)
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

    def begin_model(self, scheduler_output: SchedulerOutput) -> PendingStep:
        """Begin one step."""
        pending: PendingStep = self._worker.begin_model(scheduler_output)
        return pending

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Return what the last step drafted, once."""
        drafts: DraftTokenIds | None = self._worker.take_draft_token_ids()
        return drafts

    def bind_wake(self, wake: Callable[[], None]) -> bool:
        """Hand on what rouses the engine core."""
        is_called: bool = self._worker.bind_wake(wake)
        return is_called

    def find_fault(self) -> str | None:
        """Return None: a worker in this process cannot be gone without it."""
        return None

    def shutdown(self) -> None:
        """Release the device; idempotent."""
        self._worker.shutdown()
