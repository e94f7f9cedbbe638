"""One rank: a worker that carries out orders, wherever they come from."""

from collections import deque
from collections.abc import Callable
from typing import Any

from vllm import platforms
from vllm.exceptions import EngineError, VllmError
from vllm.logger import init_logger
from vllm.v1.executor.messages import (
    Answer,
    BeginStep,
    BindWake,
    BuildModel,
    Failure,
    LoadModel,
    MakeKVCache,
    MakeWorker,
    MeasureMemory,
    Order,
    RunStep,
    StepResult,
    Stop,
    TakeStep,
    WeightNeeds,
    WorkerInfo,
)
from vllm.v1.executor.worker_setup import make_worker, register_caches
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput, PendingStep

logger = init_logger(__name__)


class RankHost:
    """Owns: its worker, the steps that were begun and not taken.

    Args:
        wake: Rouses the engine core, from any thread; None: nothing here can.
    """

    def __init__(self, wake: Callable[[], None] | None = None) -> None:
        self._wake = wake
        self._platform = platforms.current_platform
        self._worker: Any = None
        self._begun: deque[PendingStep] = deque()
        self._rank = -1
        self._handlers: dict[type, Callable[[Any], Any]] = {
            MakeWorker: self._make,
            BuildModel: self._build,
            LoadModel: self._load,
            MeasureMemory: self._measure,
            MakeKVCache: self._make_kv_cache,
            RunStep: self._run,
            BeginStep: self._begin,
            TakeStep: self._take,
            BindWake: self._bind_wake,
            Stop: self._stop,
        }

    def carry_out(self, order: Order) -> Answer | Failure:
        """Do what is asked; an error becomes a ``Failure``, after which the rank is of no use."""
        try:
            return Answer(self._handlers[type(order)](order))
        except VllmError as error:
            return Failure(type(error).__name__, str(error))
        except Exception as error:  # a process edge: the engine core raises it again
            logger.exception("rank %d failed", self._rank)
            return Failure(EngineError.__name__, f"{type(error).__name__}: {error}")

    def _make(self, order: MakeWorker) -> WorkerInfo:
        self._stop(Stop())
        self._rank = order.place.rank
        register_caches(order.vllm_config, self._platform)
        self._worker = make_worker(order.vllm_config, self._platform, order.place)
        # A wrong block size or cache dtype must show before the minutes that weights can take.
        specs = self._worker.get_kv_cache_specs()
        self._worker.init_device()
        return WorkerInfo(specs, self._platform.total_memory_bytes())

    def _build(self, _: BuildModel) -> WeightNeeds:
        free_bytes = self._platform.free_memory_bytes()
        return WeightNeeds(self._worker.build_model(), free_bytes)

    def _load(self, _: LoadModel) -> dict[str, KVCacheSpec]:
        self._worker.load_model()
        specs: dict[str, KVCacheSpec] = self._worker.get_kv_cache_specs()
        return specs

    def _measure(self, _: MeasureMemory) -> int:
        num_bytes: int = self._worker.determine_available_memory()
        return num_bytes

    def _make_kv_cache(self, order: MakeKVCache) -> None:
        self._worker.initialize_from_config(order.kv_cache_config)

    def _run(self, order: RunStep) -> StepResult | KVConnectorOutput | None:
        output: ModelRunnerOutput = self._worker.execute_model(order.scheduler_output)
        return self._report(output, self._worker.take_draft_token_ids())

    def _begin(self, order: BeginStep) -> None:
        self._begun.append(self._worker.begin_model(order.scheduler_output))

    def _take(self, _: TakeStep) -> StepResult | KVConnectorOutput | None:
        return self._report(self._begun.popleft().wait(), None)

    def _report(
        self, output: ModelRunnerOutput, drafts: DraftTokenIds | None
    ) -> StepResult | KVConnectorOutput | None:
        # All ranks sampled the same tokens from the same gathered logits.
        return StepResult(output, drafts) if self._rank == 0 else output.kv_connector_output

    def _bind_wake(self, _: BindWake) -> bool:
        if self._wake is None:
            return False
        does: bool = self._worker.bind_wake(self._wake)
        return does

    def _stop(self, _: Stop) -> None:
        self._begun.clear()
        if self._worker is not None:
            self._worker.shutdown()
