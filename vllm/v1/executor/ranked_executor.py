"""An executor of several workers that share one model, each in a process of its own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from vllm import platforms
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import WorkerPlace
from vllm.platforms.interface import Platform
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor.abstract import SpecsCheck, WeightsCheck
from vllm.v1.executor.messages import (
    BeginStep,
    BuildModel,
    LoadModel,
    MakeKVCache,
    MakeWorker,
    MeasureMemory,
    Order,
    RunStep,
    StepResult,
    TakeStep,
    WeightNeeds,
    WorkerInfo,
)
from vllm.v1.executor.transfer_reports import TransferReports
from vllm.v1.executor.worker_setup import register_caches
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput, PendingStep


class Ranks(Protocol):
    """The processes of the workers, and the way to them."""

    @property
    def places(self) -> Sequence[WorkerPlace]:
        """Where each stands."""

    def order(self, orders: Sequence[Order]) -> list[Any]:
        """Have each rank carry out its order, all at a time; return their results in rank order.

        Raises:
            VllmError: What the first of them raised.
            EngineDeadError: One died or hangs. None of them lives any more then.
        """

    def bind_wake(self, wake: Callable[[], None]) -> bool:
        """Have ranks call ``wake``, in a thread of this process, when waiting requests may go on.

        Returns:
            Whether all of them do; else they speak when they are asked.
        """

    def find_fault(self) -> str | None:
        """Return which rank is dead; None: all live. Any thread may ask."""

    def close(self) -> None:
        """End the processes; idempotent."""


class RankedExecutor:
    """Drives the ranks through start-up and steps, in lockstep.

    Args:
        vllm_config: The configuration; the platform's defaults are filled in here if they were not.
        start_ranks: Starts the processes.
        platform: The device's kind; None: the current one.
        check_specs: See ``SpecsCheck``.
        check_weights: See ``WeightsCheck``.

    Raises:
        ConfigError: The configuration does not suit the platform or the model.
        CheckpointError: The weights do not fit the model.
        EngineError: A rank could not start.

    Owns: the ranks, the transfers that not all of them have ended.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        start_ranks: Callable[[VllmConfig], Ranks],
        platform: Platform | None = None,
        check_specs: SpecsCheck | None = None,
        check_weights: WeightsCheck | None = None,
    ) -> None:
        self._platform = platforms.current_platform if platform is None else platform
        config = self._platform.check_and_update_config(vllm_config)
        register_caches(config, self._platform)
        self._drafts: DraftTokenIds | None = None
        self._transfers = TransferReports(config.parallel_config.world_size)
        self._ranks = start_ranks(config)
        try:
            self._specs = self._start(config, check_specs, check_weights)
        except BaseException:
            self._ranks.close()
            raise

    def _start(
        self,
        config: VllmConfig,
        check_specs: SpecsCheck | None,
        check_weights: WeightsCheck | None,
    ) -> list[dict[str, KVCacheSpec]]:
        places = self._ranks.places
        facts: list[WorkerInfo] = self._ranks.order([MakeWorker(config, p) for p in places])
        specs = [own.specs for own in facts]
        if check_specs is not None:
            check_specs(config, specs, lambda: min(own.total_bytes for own in facts))
        needs: list[WeightNeeds] = self._order_all(BuildModel())
        if check_weights is not None:
            # Ranks on one host's memory share what is free.
            sharing = places[0].local_size if self._platform.device_type == "cpu" else 1
            free_bytes = min(own.free_bytes for own in needs) // sharing
            check_weights(config, specs, max(own.weight_bytes for own in needs), free_bytes)
        loaded: list[dict[str, KVCacheSpec]] = self._order_all(LoadModel())
        return loaded

    def get_kv_cache_specs(self) -> list[dict[str, KVCacheSpec]]:
        """Return each worker's cache specs by cache name."""
        return self._specs

    def determine_available_memory(self) -> list[int]:
        """Return the bytes each worker's KV pool may take."""
        return self._order_all(MeasureMemory())

    def initialize_from_config(self, kv_cache_configs: list[KVCacheConfig]) -> None:
        """Allocate the KV caches; steps may follow."""
        self._ranks.order([MakeKVCache(config) for config in kv_cache_configs])

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step on every worker and return what the first sampled.

        Raises:
            EngineDeadError: A worker died or hangs.
            EngineError: A worker failed.
        """
        return self._join(self._order_all(RunStep(scheduler_output)))

    def _join(self, answers: list[Any]) -> ModelRunnerOutput:
        result: StepResult = answers[0]
        self._drafts = result.drafts
        output = result.output
        output.kv_connector_output = self._transfers.join(
            [output.kv_connector_output, *answers[1:]]
        )
        return output

    def begin_model(self, scheduler_output: SchedulerOutput) -> PendingStep:
        """Begin one step on every worker; raises as ``execute_model``, as does waiting for it."""
        self._order_all(BeginStep(scheduler_output))
        return _BegunStep(self._take_step)

    def _take_step(self) -> ModelRunnerOutput:
        return self._join(self._order_all(TakeStep()))

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Return what the last step drafted, once."""
        drafts, self._drafts = self._drafts, None
        return drafts

    def bind_wake(self, wake: Callable[[], None]) -> bool:
        """Hand on what rouses the engine core; returns whether it is called when need be."""
        return self._ranks.bind_wake(wake)

    def find_fault(self) -> str | None:
        """Return what is wrong with the workers; None: nothing. Any thread may ask."""
        return self._ranks.find_fault()

    def shutdown(self) -> None:
        """Release the devices and end the processes; idempotent."""
        self._ranks.close()

    def _order_all(self, order: Order) -> list[Any]:
        return self._ranks.order([order] * len(self._ranks.places))


@dataclass(frozen=True, slots=True)
class _BegunStep:
    """A ``PendingStep`` of all ranks; steps are waited for in the order in which they began."""

    take: Callable[[], ModelRunnerOutput]

    def wait(self) -> ModelRunnerOutput:
        """See ``PendingStep``."""
        return self.take()
