"""The core's worker with Ascend's pages, memory accounting and decode graphs."""

from typing_extensions import override

from vllm.config import VllmConfig
from vllm.distributed.parallel_state import ALONE, WorkerPlace
from vllm.exceptions import ConfigError
from vllm.logger import init_logger
from vllm.model_executor.models.deepseek_v4.config import DeepseekV4Config
from vllm.v1.attention.ops.registry import OpResolver
from vllm.v1.core.layout.packing import group_for_packing
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.worker.device_memory import MemorySnapshot, available_kv_bytes, read_peak_bytes
from vllm.v1.worker.worker import Worker
from vllm_ascend import envs
from vllm_ascend.core.specs import (
    PageDtypes,
    ascend_kv_cache_specs,
    explain_bytes_per_block,
)
from vllm_ascend.ops.pages import make_a5_pages
from vllm_ascend.ops.row_formats import E4M3
from vllm_ascend.platform import AscendPlatform
from vllm_ascend.worker.decode_graphs import DecodeGraphs
from vllm_ascend.worker.page_dtypes import choose_page_dtypes
from vllm_ascend.worker.profile import run_largest_step

logger = init_logger(__name__)


class NPUWorker(Worker):
    """One NPU; in reference mode the CPU.

    Block tables, slot mappings and block copies are the core's: index tensors are made once per
    step and group, and a copy is one gather and one scatter of pool rows on the device.

    Args:
        vllm_config: The configuration, the platform's defaults filled in.
        platform: An Ascend platform.
        place: Where it stands among the workers that share the model.

    Owns: as ``Worker``; the decode graphs.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        platform: AscendPlatform,
        place: WorkerPlace = ALONE,
    ) -> None:
        super().__init__(vllm_config, platform, place)
        self._ascend = platform
        self._first_snapshot: MemorySnapshot | None = None

    def init_device(self) -> None:
        """Select the device and note its memory before anything is loaded."""
        super().init_device()
        logger.info(
            "Ascend %s%s",
            self._ascend.generation(),
            ": this tree has never been run on a device"
            if self._is_npu
            else " in reference mode: CPU tensors, npu calls in plain torch",
        )
        if self._is_npu:
            self._first_snapshot = MemorySnapshot.take(self._ascend.device_api())

    def get_kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        """Return what each of the model's caches keeps, in Ascend's pages.

        Raises:
            ConfigError: The model, the block size, the cache dtype or the device is not supported.
        """
        if not isinstance(self._model_spec, DeepseekV4Config):
            return super().get_kv_cache_specs()
        return ascend_kv_cache_specs(
            self._model_spec,
            self._config.cache_config.block_size,
            self._page_dtypes(),
            self._ascend.generation(),
        )

    def _page_dtypes(self) -> PageDtypes:
        return choose_page_dtypes(
            self._config.cache_config.cache_dtype,
            self._dtype,
            self._ascend.generation(),
            has_float_pages=self._ascend.has_float_pages,
        )

    def _make_op_resolver(self) -> OpResolver:
        """Return the platform's ops; DeepSeek-V4's fp8 pages, an A5's, have ops of their own.

        Raises:
            ConfigError: The model's rows do not fit those pages.
        """
        resolve = super()._make_op_resolver()
        spec = self._model_spec
        if not isinstance(spec, DeepseekV4Config) or self._page_dtypes().rows != E4M3:
            return resolve
        pages = make_a5_pages(spec.head_dim, spec.qk_rope_head_dim, spec.index_head_dim).by_name()
        return lambda name: pages[name] if name in pages else resolve(name)

    def determine_available_memory(self) -> int:
        """Return the bytes the KV pool may take, after a profile run on an NPU."""
        exact = self._config.cache_config.kv_cache_memory_bytes
        if exact is not None or self._first_snapshot is None:
            return super().determine_available_memory()
        assert self._device is not None, "init_device comes first"
        npu = self._ascend.device_api()
        npu.reset_peak_memory_stats()
        scheduler = self._config.scheduler_config
        run_largest_step(
            self._model,
            self.get_kv_cache_specs(),
            self._platform,
            self._device,
            num_tokens=scheduler.max_num_batched_tokens,
            num_logit_rows=scheduler.max_num_seqs,
        )
        npu.synchronize()
        peak = read_peak_bytes(npu)
        npu.empty_cache()
        return available_kv_bytes(
            self._first_snapshot,
            MemorySnapshot.take(npu),
            peak,
            self._config.cache_config.gpu_memory_utilization,
        )

    @override
    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        self._report_bytes()
        if envs.wants_decode_graphs() and not self._config.model_config.enforce_eager:
            if not self._is_npu:
                raise ConfigError(
                    f"{envs.GRAPH_VARIABLE}=1 needs an NPU, which reference mode is not: unset it."
                )
            self._model = DecodeGraphs(self._model, self._ascend.device_api())
        super().initialize_from_config(kv_cache_config)

    @property
    def _is_npu(self) -> bool:
        return self._platform.device_type == "npu"

    def _report_bytes(self) -> None:
        if not isinstance(self._model_spec, DeepseekV4Config):
            return
        groups = group_for_packing(self.get_kv_cache_specs())
        unit = self._config.cache_config.block_size
        logger.info("KV cache: %s", explain_bytes_per_block(groups, unit))
        dtypes = self._page_dtypes()
        logger.info(
            "KV cache pages: rows %s, index keys %s, state %s",
            dtypes.rows,
            dtypes.rows if dtypes.index is None else dtypes.index,
            dtypes.state,
        )
