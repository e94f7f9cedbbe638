"""NVIDIA GPUs through torch.cuda."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.exceptions import ConfigError
from vllm.platforms.interface import Platform

if TYPE_CHECKING:
    import torch


class CudaPlatform(Platform):
    """The current CUDA device of this process."""

    device_type = "cuda"
    device_name = "cuda"
    dispatch_key = "CUDA"
    ray_device_key = "GPU"
    device_control_env_var = "CUDA_VISIBLE_DEVICES"
    dist_backend = "nccl"

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
