"""NVIDIA GPUs through torch.cuda and Triton; reference mode puts CPU tensors in their place."""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm.exceptions import ConfigError
from vllm.logger import init_logger
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import Platform

if TYPE_CHECKING:
    import torch

    from vllm.config import VllmConfig
    from vllm.gpu.decode_graphs import GraphDevice
    from vllm.v1.attention.metadata import CacheLayout
    from vllm.v1.attention.step_model import StepModel

logger = init_logger(__name__)

_INTERPRET = "TRITON_INTERPRET"
_CACHE = "TRITON_CACHE_DIR"
# Triton compiles for Volta and later; bfloat16 came with Ampere.
_LEAST_CAPABILITY = (7, 0)
_BF16_CAPABILITY = (8, 0)


class CudaPlatform(Platform):
    """The current CUDA device of this process."""

    device_type = "cuda"
    device_name = "cuda"
    ray_device_key = "GPU"
    device_control_env_var = "CUDA_VISIBLE_DEVICES"
    dist_backend = "nccl"
    worker_class_path = "vllm.v1.worker.gpu_worker.GPUWorker"

    def get_op(self, name: str) -> Callable[..., Any]:
        """Return the op called ``name``: Triton's, or plain torch where Triton cannot run.

        Raises:
            ConfigError: There is no such op.
        """
        if self.find_kernel_obstacle():
            return super().get_op(name)
        _use_own_compile_cache()
        from vllm.v1.attention.ops.triton.registry import (  # noqa: PLC0415  (loads triton)
            get_triton_op,
        )

        return get_triton_op(name)

    @functools.cache  # noqa: B019  (one platform a process)
    def find_kernel_obstacle(self) -> str:
        """Return why Triton's kernels cannot run here, said once in the log; "" where they can."""
        reason = self._look_for_obstacle()
        if reason:
            logger.warning("Triton kernels: off (%s); plain torch runs the model", reason)
        return reason

    def _look_for_obstacle(self) -> str:
        import torch  # noqa: PLC0415  (start-up: the API process must not load torch)

        if importlib.util.find_spec("triton") is None:
            return "the package triton is not installed"
        capability = torch.cuda.get_device_capability()
        if capability < _LEAST_CAPABILITY:
            return (
                f"compute capability {_spell(capability)} of {torch.cuda.get_device_name()}; they "
                f"need {_spell(_LEAST_CAPABILITY)}"
            )
        _use_own_compile_cache()
        return _find_launcher_obstacle()

    def default_dtype(self, config: VllmConfig) -> str:
        """Return the checkpoint's type; float16 for bfloat16 where the GPU does not know it."""
        import torch  # noqa: PLC0415  (start-up: the API process must not load torch)

        dtype = super().default_dtype(config)
        if dtype != "bfloat16" or torch.cuda.get_device_capability() >= _BF16_CAPABILITY:
            return dtype
        logger.warning(
            "%s (compute capability %s) computes no bfloat16: --dtype auto means float16",
            torch.cuda.get_device_name(),
            _spell(torch.cuda.get_device_capability()),
        )
        return "float16"

    def _resolve_options(self, config: VllmConfig) -> dict[str, str]:
        found = super()._resolve_options(config)
        if config.model_config.quantized_inputs == "int16":
            logger.warning("--quantized-inputs int16 is for CPUs: on a GPU inputs stay exact")
            found["quantized_inputs"] = "exact"
        return found

    def make_device(self, local_rank: int) -> torch.device:
        """Make GPU ``local_rank`` current and return it.

        Raises:
            ConfigError: There is no such GPU.
        """
        import torch  # noqa: PLC0415  (start-up: the API process must not load torch)

        count = torch.cuda.device_count()
        if not 0 <= local_rank < count:
            raise ConfigError(
                f"worker {local_rank} needs its own GPU, but {count} are visible "
                f"({self.device_control_env_var} selects them)."
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        torch.cuda.empty_cache()
        return device

    def total_memory_bytes(self) -> int:
        """Return the memory of this process's GPU; initialises CUDA."""
        import torch  # noqa: PLC0415  (start-up: the API process must not load torch)

        return int(torch.cuda.mem_get_info()[1])

    def free_memory_bytes(self) -> int:
        """Return what the driver reports free, plus what torch's allocator holds unused."""
        import torch  # noqa: PLC0415  (start-up: the API process must not load torch)

        unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return int(torch.cuda.mem_get_info()[0]) + unused

    def make_step_model(
        self,
        model: Any,
        layout: CacheLayout,
        kv_caches: Mapping[str, torch.Tensor],
        device: torch.device,
    ) -> StepModel:
        """Return the model on kernels that read pages, where they have some for it."""
        if self.find_kernel_obstacle():
            return super().make_step_model(model, layout, kv_caches, device)
        from vllm.gpu.step_model import make_gpu_step_model  # noqa: PLC0415  (loads triton)

        return make_gpu_step_model(model, layout, kv_caches, device)

    def device_memory(self) -> Any:
        """Return ``torch.cuda``, which tells about the current GPU's memory."""
        import torch  # noqa: PLC0415  (start-up: the API process must not load torch)

        return torch.cuda

    def make_graph_device(self) -> GraphDevice | None:
        """Return what captures decode steps."""
        from vllm.gpu.decode_graphs import CudaGraphDevice  # noqa: PLC0415  (loads triton)

        return CudaGraphDevice()

    def copy_blocks(self, pools: Sequence[torch.Tensor], pairs: Sequence[tuple[int, int]]) -> None:
        """As the base class, by kernels that move eight bytes a thread.

        Mutates: the destination rows of every pool.
        """
        if self.find_kernel_obstacle():
            super().copy_blocks(pools, pairs)
            return
        from vllm.v1.attention.ops.triton import pages  # noqa: PLC0415  (loads triton)

        pages.copy_blocks(pools, pairs)


class CudaReferencePlatform(CudaPlatform, CpuPlatform):
    """The CUDA platform on CPU tensors: kernels run in Triton's interpreter, for tests."""

    device_type = "cpu"
    reads_panels = False
    device_name = "cuda-reference"
    ray_device_key = "CPU"
    device_control_env_var = ""
    dist_backend = "gloo"

    def get_op(self, name: str) -> Callable[..., Any]:
        """Return the op called ``name``, interpreted.

        Raises:
            ConfigError: There is no such op, or kernels were loaded to be compiled.
        """
        require_interpreter()
        return super().get_op(name)

    def _look_for_obstacle(self) -> str:
        return ""

    def device_memory(self) -> Any:
        """Return None: the host's memory is not looked into."""
        return None

    def make_graph_device(self) -> GraphDevice | None:
        """Return None: nothing captures on a CPU."""
        return None

    def default_dtype(self, config: VllmConfig) -> str:
        """Return float32, as on a CPU: what is compared is compared in it."""
        return CpuPlatform.default_dtype(self, config)

    def make_device(self, local_rank: int) -> torch.device:
        """Return the CPU."""
        return CpuPlatform.make_device(self, local_rank)

    def total_memory_bytes(self) -> int:
        """Return the host's memory."""
        return CpuPlatform.total_memory_bytes(self)

    def free_memory_bytes(self) -> int:
        """Return the host's free memory."""
        return CpuPlatform.free_memory_bytes(self)

    def make_step_model(
        self,
        model: Any,
        layout: CacheLayout,
        kv_caches: Mapping[str, torch.Tensor],
        device: torch.device,
    ) -> StepModel:
        """Return the GPU's: a CPU's own kernels are not what is looked at."""
        return CudaPlatform.make_step_model(self, model, layout, kv_caches, device)


def require_interpreter() -> None:
    """Have Triton interpret its kernels from now on, in this process and those it starts.

    Raises:
        ConfigError: triton is not installed, or kernels were loaded to be compiled.
    """
    if importlib.util.find_spec("triton") is None:
        raise ConfigError(
            "Triton's interpreter was asked for (VLLM_CUDA_REFERENCE or VLLM_ASCEND_TRITON), but "
            "the package triton is not installed: pip install -r requirements/dev.txt."
        )
    os.environ[_INTERPRET] = "1"
    from vllm.v1.attention.ops.triton import launch  # noqa: PLC0415  (loads triton)

    if not launch.IS_INTERPRETED:
        raise ConfigError(
            "Triton's interpreter was asked for (VLLM_CUDA_REFERENCE or VLLM_ASCEND_TRITON) too "
            "late: this process has loaded kernels to compile them."
        )


def _find_launcher_obstacle() -> str:
    """Return why Triton cannot launch what it compiles; "" where it can.

    What launches kernels is C, which Triton builds on the machine at the first use: images made to
    run programs, not to build them, often lack what that takes.
    """
    from triton.runtime import driver  # noqa: PLC0415  (loads triton)

    try:
        driver.active.utils  # noqa: B018  (builds it)
    except (RuntimeError, OSError, ImportError, subprocess.CalledProcessError) as error:
        return (
            f"Triton cannot build what launches kernels: {str(error).strip()}; it takes a C "
            "compiler (or CC, its path) and Python's headers, e.g. the packages gcc and python3-dev"
        )
    return ""


def _use_own_compile_cache() -> None:
    """Keep compiled kernels apart from other programs', unless the user chose a folder."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    os.environ.setdefault(_CACHE, os.path.join(root, "vllm", "triton"))


def _spell(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
