"""What the engine core asks of its workers, however many and wherever they are."""

from collections.abc import Callable
from typing import Protocol

from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput, PendingStep

SpecsCheck = Callable[[VllmConfig, list[dict[str, KVCacheSpec]], Callable[[], int]], None]
"""Called with the configuration, each worker's cache specs and what tells a device's memory, the
devices in use, before weights load."""

WeightsCheck = Callable[[VllmConfig, list[dict[str, KVCacheSpec]], int, int], None]
"""Called with the configuration, the specs, the bytes the weights will take, and the bytes that
were free, before a value is read."""


class Executor(Protocol):
    """Workers with a loaded model. Lists have one entry per worker."""

    def get_kv_cache_specs(self) -> list[dict[str, KVCacheSpec]]:
        """Return each worker's cache specs by cache name."""

    def determine_available_memory(self) -> list[int]:
        """Return the bytes each worker's KV pool may take."""

    def initialize_from_config(self, kv_cache_configs: list[KVCacheConfig]) -> None:
        """Allocate the KV caches; steps may follow."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step on every worker and return what the driver sampled."""

    def begin_model(self, scheduler_output: SchedulerOutput) -> PendingStep:
        """Begin one step, before the one begun last has been waited for."""

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Return what the last step drafted for the next one, once; None without a drafter."""

    def bind_wake(self, wake: Callable[[], None]) -> bool:
        """Have ``wake`` called, from any thread, when workers have news beside the steps.

        Returns:
            Whether that is so: workers of other processes tell theirs only when they are asked.
        """

    def find_fault(self) -> str | None:
        """Return what is wrong with the workers; None: nothing. Any thread may ask."""

    def shutdown(self) -> None:
        """Release the devices; idempotent."""
