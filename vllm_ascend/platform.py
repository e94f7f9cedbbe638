"""The Ascend platforms: the NPU, and reference mode, which puts CPU tensors in its place."""

from __future__ import annotations

import importlib.util
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.exceptions import ConfigError
from vllm.model_executor.model_loader.shards import ShardFinder, find_whole
from vllm.model_executor.models.deepseek_v4.config import DeepseekV4Config
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.cuda import require_interpreter
from vllm.platforms.interface import Platform
from vllm_ascend import envs
from vllm_ascend.core.geometry import (
    Generation,
    get_dsv4_compressed_kv_block_size,
    reference_generation,
)

if TYPE_CHECKING:
    import torch

    from vllm.config import VllmConfig
    from vllm.model_executor.layers.quantization import WeightQuantization
    from vllm.v1.attention.layout import CacheLayout
    from vllm.v1.attention.step_model import StepModel

_A5_NAMES = ("Ascend950", "Ascend910_95")
_MODEL_TYPE = "deepseek_v4"
_V4_COORDINATOR = "vllm_ascend.core.kv_cache_coordinator.AscendHybridKVCacheCoordinator"


class AscendPlatform(Platform):
    """What the NPU and reference mode share: config checks, KV cache registrations, the worker.

    Attributes:
        has_float_pages: Whether pages may hold fp32 rows; devices have no kernels for them.
    """

    worker_class_path = "vllm_ascend.worker.worker.NPUWorker"
    has_float_pages: ClassVar[bool] = False

    def check_and_update_config(self, config: VllmConfig) -> VllmConfig:
        """As the base class; DeepSeek-V4's block size is checked against the variable too.

        Both processes resolve their config here, so they see the same value or the same error.

        Raises:
            ConfigError: Another device was asked for, or the block size is refused.
        """
        if config.model_config is not None and _is_deepseek_v4(config.model_config.hf_config):
            get_dsv4_compressed_kv_block_size(
                _longest_ratio(config.model_config.hf_config), config.cache_config.block_size
            )
        return super().check_and_update_config(config)

    def make_step_model(
        self,
        model: Any,
        layout: CacheLayout,
        kv_caches: Mapping[str, torch.Tensor],
        device: torch.device,
    ) -> StepModel:
        """Return torch's: reference mode exists to run this tree's ops, not a CPU's kernels."""
        return Platform.make_step_model(self, model, layout, kv_caches, device)

    def default_block_size(self, hf_config: Mapping[str, Any]) -> int | None:
        """Return 32 for DeepSeek-V4, or what the variable says where it has C128 layers.

        Raises:
            ConfigError: The variable is not 32, 64 or 128.
        """
        if not _is_deepseek_v4(hf_config):
            return None
        return get_dsv4_compressed_kv_block_size(_longest_ratio(hf_config))

    @abstractmethod
    def generation(self) -> Generation:
        """Return the device's generation: page formats and op sets differ."""

    def device_api(self) -> Any:
        """Return ``torch.npu``, which torch_npu has added to torch by now."""
        import torch  # noqa: PLC0415  (start-up: the API process must not load torch)

        return torch.npu  # type: ignore[attr-defined]  # torch_npu adds it

    def find_quantization(
        self, checkpoint: str, find_shard: ShardFinder = find_whole
    ) -> WeightQuantization | None:
        """Return ModelSlim's w8a8 where the checkpoint folder describes it.

        Raises:
            CheckpointError: The description is broken.
            UnsupportedFeatureError: It uses a scheme that is not supported.
        """
        from vllm_ascend.quantization import modelslim  # noqa: PLC0415  (loads torch)

        # A format is how the device lays memory out: host tensors have none.
        use_nz = self.device_type == "npu" and envs.wants_nz_weights()
        return modelslim.find_quantization(checkpoint, find_shard, use_nz=use_nz)

    def kv_cache_coordinator_path(self, vllm_config: VllmConfig) -> str | None:
        """Return Ascend's own class for DeepSeek-V4; other models have the core's."""
        if _is_deepseek_v4(vllm_config.model_config.hf_config):
            return _V4_COORDINATOR
        return None

    def register_custom_kv_cache_specs(self, vllm_config: VllmConfig | None) -> None:
        """Give Ascend's compressed caches their manager."""
        from vllm.v1.kv_cache_interface import FullAttentionSpec  # noqa: PLC0415  (start-up)
        from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry  # noqa: PLC0415  (start-up)
        from vllm_ascend.core.managers import CompressAttentionManager  # noqa: PLC0415
        from vllm_ascend.core.specs import CompressAttentionSpec  # noqa: PLC0415

        KVCacheSpecRegistry.register(
            CompressAttentionSpec, CompressAttentionManager, FullAttentionSpec
        )


class NPUPlatform(AscendPlatform):
    """One Ascend NPU through torch_npu. Has never been run on a device."""

    device_type = "npu"
    device_name = "npu"
    ray_device_key = "NPU"
    device_control_env_var = "ASCEND_RT_VISIBLE_DEVICES"
    dist_backend = "hccl"

    def generation(self) -> Generation:
        """Return the generation by the name the driver gives the first visible device.

        Raises:
            ConfigError: No NPU is visible.
        """
        self._check_visible(0)
        name = str(self.device_api().get_device_name(0))
        return Generation.A5 if name.startswith(_A5_NAMES) else Generation.A2_A3

    def get_op(self, name: str) -> Callable[..., Any]:
        """Return the op called ``name`` for NPU tensors.

        Raises:
            ConfigError: There is no such op.
        """
        from vllm_ascend.ops.registry import get_ascend_op  # noqa: PLC0415  (loads torch)

        if envs.wants_triton() and importlib.util.find_spec("triton") is None:
            raise ConfigError(
                f"{envs.TRITON_VARIABLE}=1 needs the package triton-ascend: pip install "
                "triton-ascend, or unset it."
            )
        return get_ascend_op(
            name, is_a5=self.generation() is Generation.A5, uses_triton=envs.wants_triton()
        )

    def make_device(self, local_rank: int) -> torch.device:
        """Make NPU ``local_rank`` current and return it.

        Raises:
            ConfigError: There is no such NPU.
        """
        import torch  # noqa: PLC0415  (start-up: the API process must not load torch)

        self._check_visible(local_rank)
        npu = self.device_api()
        device = torch.device("npu", local_rank)
        npu.set_device(device)
        npu.empty_cache()
        return device

    def _check_visible(self, local_rank: int) -> None:
        """Refuse a worker without an NPU; the driver is asked, no device is touched."""
        count = self.device_api().device_count()
        if not 0 <= local_rank < count:
            raise ConfigError(
                f"worker {local_rank} needs its own NPU, but {count} are visible "
                f"({self.device_control_env_var} selects them)."
            )

    def total_memory_bytes(self) -> int:
        """Return the memory of the worker's NPU.

        The driver tells it of a device that is in use only: this is asked after ``make_device``,
        never while a configuration is resolved.
        """
        return int(self.device_api().mem_get_info()[1])

    def free_memory_bytes(self) -> int:
        """Return what the driver reports free, plus what torch's allocator holds unused."""
        npu = self.device_api()
        unused = npu.memory_reserved() - npu.memory_allocated()
        return int(npu.mem_get_info()[0]) + int(unused)

    def allocate_kv_pool(
        self, num_blocks: int, stride_bytes: int, device: torch.device
    ) -> torch.Tensor:
        """Allocate zeroed pages as raw int8 ``[num_blocks, stride_bytes]``: aclnn's byte type."""
        import torch  # noqa: PLC0415  (start-up: the API process must not load torch)

        return torch.zeros((num_blocks, stride_bytes), dtype=torch.int8, device=device)


class ReferencePlatform(AscendPlatform, CpuPlatform):
    """Reference mode: the Ascend tree on CPU tensors, npu ops in plain torch."""

    device_name = "ascend-reference"
    reads_panels = False
    has_float_pages = True

    def generation(self) -> Generation:
        """Return the generation that VLLM_ASCEND_REFERENCE_GENERATION names; A2/A3 by default.

        Raises:
            ConfigError: It names none.
        """
        return reference_generation()

    def get_op(self, name: str) -> Callable[..., Any]:
        """Return the op called ``name``; npu calls are registered on first use.

        Raises:
            ConfigError: There is no such op, or torch_npu is loaded as well.
        """
        from vllm_ascend.ops.registry import get_ascend_op  # noqa: PLC0415  (loads torch)
        from vllm_ascend.ops.schemas import register_npu_ops  # noqa: PLC0415  (loads torch)

        register_npu_ops()
        if envs.wants_triton():
            require_interpreter()
        return get_ascend_op(
            name, is_a5=self.generation() is Generation.A5, uses_triton=envs.wants_triton()
        )

    def allocate_kv_pool(
        self, num_blocks: int, stride_bytes: int, device: torch.device
    ) -> torch.Tensor:
        """Allocate as the CPU does, seen as int8 as on the device."""
        import torch  # noqa: PLC0415  (start-up: the API process must not load torch)

        return super().allocate_kv_pool(num_blocks, stride_bytes, device).view(torch.int8)


def _is_deepseek_v4(hf_config: Mapping[str, Any]) -> bool:
    return hf_config.get("model_type") == _MODEL_TYPE


def _longest_ratio(hf_config: Mapping[str, Any]) -> int:
    """Return the most tokens per entry of any layer: 128 where there are C128 layers."""
    return max(plan.ratio for plan in DeepseekV4Config.from_dict(hf_config).layers)
