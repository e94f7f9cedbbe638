"""The worker on a GPU: memory by a profile run, decode steps as graphs."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from vllm.config import VllmConfig
from vllm.distributed.parallel_state import ALONE, WorkerPlace
from vllm.exceptions import EngineError
from vllm.gpu.decode_graphs import GraphDevice, choose_sizes
from vllm.gpu.step_model import (
    can_replay,
    count_draft_bytes,
    count_gathered_bytes,
    count_graphs,
    make_graphed_step_model,
    move_tables,
    stack_experts,
)
from vllm.logger import init_logger
from vllm.platforms.cuda import CudaPlatform
from vllm.v1.attention.layout import CacheLayout
from vllm.v1.attention.step_model import StepModel
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import ModelRunnerOutput, PendingStep
from vllm.v1.worker.device_memory import MemorySnapshot, available_kv_bytes, read_peak_bytes
from vllm.v1.worker.gpu_profile import run_largest_step
from vllm.v1.worker.memory_shortage import Stage, explain_shortage
from vllm.v1.worker.worker import Worker

logger = init_logger(__name__)

# What a captured size may take beside the tensors that all share: a guess, said again in the log
# with what was taken.
_BYTES_PER_GRAPH = 8 << 20


class GPUWorker(Worker):
    """One GPU; in reference mode the CPU.

    Args:
        vllm_config: The configuration, the platform's defaults filled in.
        platform: The CUDA platform.
        place: Where it stands among the workers that share the model.

    Owns: as ``Worker``.
    """

    def __init__(
        self, vllm_config: VllmConfig, platform: CudaPlatform, place: WorkerPlace = ALONE
    ) -> None:
        super().__init__(vllm_config, platform, place)
        self._gpu = platform
        self._first_snapshot: MemorySnapshot | None = None
        self._graphs: GraphDevice | None = None

    def init_device(self) -> None:
        """Select the GPU and note its memory before anything is loaded."""
        super().init_device()
        memory = self._gpu.device_memory()
        if memory is not None:
            self._first_snapshot = MemorySnapshot.take(memory)

    def build_model(self) -> int:
        """As ``Worker``; the weights take their memory here.

        Raises:
            CheckpointError: The files' headers do not fit the model.
            DeviceMemoryError: The weights do not fit in the GPU's memory.
        """
        with self._telling("load the weights"):
            return super().build_model()

    def load_model(self) -> None:
        """As ``Worker``.

        Raises:
            CheckpointError: The files do not fit the model.
            DeviceMemoryError: The weights do not fit in the GPU's memory.
        """
        with self._telling("load the weights"):
            super().load_model()
            move_tables(self._model)
            stack_experts(self._model)

    def determine_available_memory(self) -> int:
        """Return the bytes the KV pool may take, after a profile run of the largest step.

        Raises:
            ConfigError: The step does not fit (``DeviceMemoryError``), or others hold too much.
        """
        memory = self._gpu.device_memory()
        exact = self._config.cache_config.kv_cache_memory_bytes
        if exact is not None or memory is None or self._first_snapshot is None:
            return super().determine_available_memory()
        assert self._device is not None, "init_device comes first"
        scheduler = self._config.scheduler_config
        memory.reset_peak_memory_stats()
        with self._telling("run the largest step"):
            run_largest_step(
                self._model,
                self.get_kv_cache_specs(),
                self._platform,
                self._device,
                self._gpu.make_step_model,
                num_tokens=scheduler.max_num_batched_tokens,
                num_logit_rows=scheduler.max_num_seqs,
                num_drafts=self._num_drafts,
            )
        memory.synchronize()
        peak = read_peak_bytes(memory)
        memory.empty_cache()
        graphs = 0
        drafts = count_draft_bytes(self._model, scheduler.max_num_seqs, self._num_drafts)
        if self._wants_graphs():
            sizes = scheduler.max_num_seqs, self._config.model_config.max_model_len
            count = count_graphs(self._model, *sizes, **self._find_drafts())
            graphs = _BYTES_PER_GRAPH * count
            graphs += count_gathered_bytes(self._model, *sizes, self._num_drafts)
        now = MemorySnapshot.take(memory)
        utilization = self._config.cache_config.gpu_memory_utilization
        available = available_kv_bytes(self._first_snapshot, now, peak, utilization)
        available -= graphs + drafts
        logger.info(
            "GPU memory: %.2f GiB, weights and the largest step %.2f GiB, set aside for decode "
            "graphs %.2f GiB and for drafts %.2f GiB, KV cache %.2f GiB",
            now.total / 2**30,
            peak / 2**30,
            graphs / 2**30,
            drafts / 2**30,
            max(0, available) / 2**30,
        )
        return max(0, available)

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """As ``Worker``; captures the decode graphs.

        Raises:
            ConfigError: The config's layers are not the model's.
            DeviceMemoryError: The graphs do not fit.
            EngineError: They cannot be captured.
        """
        with self._telling("capture decode graphs"):
            super().initialize_from_config(kv_cache_config)

    def _make_step_model(
        self, layout: CacheLayout, kv_caches: Mapping[str, torch.Tensor], device: torch.device
    ) -> StepModel:
        graphs = self._gpu.make_graph_device() if self._wants_graphs() else None
        if graphs is None or self._gpu.find_kernel_obstacle():
            return super()._make_step_model(layout, kv_caches, device)
        if not can_replay(self._model, layout):
            logger.info("decode graphs: none, steps of this model cannot be captured")
            return super()._make_step_model(layout, kv_caches, device)
        self._graphs = graphs
        try:
            return make_graphed_step_model(
                self._model,
                layout,
                kv_caches,
                device,
                graphs,
                sizes=choose_sizes(self._config.scheduler_config.max_num_seqs),
                max_tokens=self._config.model_config.max_model_len,
                **self._find_drafts(),
                shows_progress=self._place.rank == 0 and self._config.load_config.use_tqdm,
            )
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise EngineError(
                f"Decode steps could not be captured as graphs on {device}: {error}. "
                "--enforce-eager serves the model without."
            ) from error

    def shutdown(self) -> None:
        """As ``Worker``; idempotent."""
        if self._graphs is not None:
            # Whoever still refers to them: NCCL does not close while a graph holds its sums.
            self._graphs.release()
            self._graphs = None
        super().shutdown()

    def _wants_graphs(self) -> bool:
        return not self._config.model_config.enforce_eager

    @property
    def _num_drafts(self) -> int:
        config = self._config.speculative_config
        return 0 if config is None else config.num_speculative_tokens

    def _find_drafts(self) -> dict[str, Any]:
        """Returns what graphs must know of drafts."""
        config = self._config.speculative_config
        return {
            "num_drafts": self._num_drafts,
            "has_block": config is not None and config.method == "mtp",
            "max_rows": self._config.scheduler_config.max_num_batched_tokens,
        }

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """As ``Worker``.

        Raises:
            EngineError: The worker is not ready, or was shut down.
            DeviceMemoryError: The step does not fit in what is left of the memory.
        """
        with self._telling("run a step"):
            return super().execute_model(scheduler_output)

    def begin_model(self, scheduler_output: SchedulerOutput) -> PendingStep:
        """As ``Worker``; raises as ``execute_model``."""
        with self._telling("run a step"):
            return super().begin_model(scheduler_output)

    @contextmanager
    def _telling(self, stage: Stage) -> Iterator[None]:
        """Has an allocator's error say what was asked for, what is free and what to change."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            memory = self._gpu.device_memory()
            raise explain_shortage(stage, error, self._config, str(self._device), memory) from error
