"""The CPU: fp32 by default, and a KV pool that a laptop can bear."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.config.speculative import SpeculativeConfig
from vllm.exceptions import ConfigError
from vllm.logger import init_logger
from vllm.platforms.host_cpus import bind_to, count_usable_cores, parse_binding
from vllm.platforms.host_memory import read_host_memory
from vllm.platforms.interface import Platform
from vllm.utils.gguf_file import count_least_bytes, is_coded, is_gguf, read_gguf
from vllm.utils.huge_pages import map_huge_pages

if TYPE_CHECKING:
    import torch

    from vllm.config import VllmConfig
    from vllm.model_executor.layers.quantization.gguf_blocks import BlockPacker
    from vllm.v1.attention.metadata import CacheLayout
    from vllm.v1.attention.step_model import StepModel

logger = init_logger(__name__)

GIB = 1 << 30
_MAX_DERIVED_KV_BYTES = 4 * GIB
_FREE_MEMORY_SHARE = 4  # one quarter
# That prompts may have in a step together for each thread: a token among as many takes as long as
# among more.
_JOINT_PROMPT_TOKENS = 64
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


class CpuPlatform(Platform):
    """Plain torch on the host's cores."""

    device_type = "cpu"
    device_name = "cpu"
    ray_device_key = "CPU"
    dist_backend = "gloo"
    reads_panels = True
    keeps_int8_rows = True

    def default_dtype(self, config: VllmConfig) -> str:
        """Return float32: bf16 matmuls are no faster on most hosts, and less exact."""
        return "float32"

    def default_cache_dtype(self, config: VllmConfig) -> str:
        """Return float16 for a GGUF file of coded weights, whose answers show no difference.

        Half of the memory keeps twice the prefixes. docs/native.md has what it costs.
        """
        model = config.model_config
        path = model.path or model.model
        if model.dtype not in ("float32", "float") or config.load_config.load_format == "dummy":
            return "auto"
        return "float16" if is_gguf(path) and is_coded(read_gguf(path)) else "auto"

    def default_joint_prompt_tokens(self, config: VllmConfig) -> int | None:
        """Return a number, or None for experts: each of them gets few of a step's tokens.

        None, too, where long prompts have a limit of their own, so that others go on beside them.
        """
        if config.scheduler_config.long_prefill_token_threshold:
            return None
        hf_config = config.model_config.hf_config
        parts = (hf_config, hf_config.get("text_config") or {})
        if any(part.get(name) for part in parts for name in _EXPERT_COUNTS):
            return None
        # As OpenMP reads it; torch, which knows, is not loaded where requests are scheduled.
        told = (envs.OMP_NUM_THREADS or "").split(",")[0].strip()
        is_told = told.isdecimal() and int(told) > 0
        return _JOINT_PROMPT_TOKENS * (int(told) if is_told else count_usable_cores())

    def default_drafts(self, config: VllmConfig) -> SpeculativeConfig | None:
        """Return lookups that draft as much as pays, one worker's kernels running the model.

        None where this stands in for another device, which drafts nothing unasked.
        """
        runs = self.reads_panels and envs.VLLM_NATIVE and envs.VLLM_UNASKED_DRAFTS
        is_alone = config.parallel_config.world_size == 1
        return SpeculativeConfig.unasked() if runs and is_alone else None

    def check_before_load(self, config: VllmConfig) -> None:
        """See ``Platform``; also refuses a GGUF file whose weights this machine cannot hold.

        Its header says what they take: without, minutes of reading would end in the kernel's kill.
        """
        super().check_before_load(config)
        model = config.model_config
        if model is not None and config.load_config.load_format != "dummy":
            path = model.path or model.model
            if is_gguf(path):
                self._check_weights_fit(path, config.parallel_config.num_local_cores)

    def _check_weights_fit(self, path: str, num_cores: int) -> None:
        least = num_cores * count_least_bytes(read_gguf(path))
        total = self.total_memory_bytes()
        if least > total:
            cores = f" by each of {num_cores} engine cores" if num_cores > 1 else ""
            raise ConfigError(
                f"The weights of {path}{cores} take at least {least / GIB:.1f} GiB, and this "
                f"machine has {total / GIB:.1f} GiB of memory: serve a file of fewer bits a "
                "weight or a smaller model, or take a machine with more memory."
            )

    def make_device(self, local_rank: int) -> torch.device:
        """Return the one CPU device."""
        import torch  # noqa: PLC0415  (start-up: the API process must not load torch)

        return torch.device("cpu")

    def total_memory_bytes(self) -> int:
        """Return the memory this process may use, its cgroup's limit included."""
        return read_host_memory()[0]

    def free_memory_bytes(self) -> int:
        """Return the memory available without swapping."""
        return read_host_memory()[1]

    def fixed_kv_cache_bytes(self, config: VllmConfig) -> int | None:
        """Return ``cache_config.kv_cache_memory_bytes``, else ``VLLM_CPU_KVCACHE_SPACE`` GiB."""
        exact = config.cache_config.kv_cache_memory_bytes
        space_gib = envs.VLLM_CPU_KVCACHE_SPACE
        if exact is None and space_gib is not None:
            return int(space_gib * GIB)
        return exact

    def default_kv_cache_bytes(self, config: VllmConfig) -> int:
        """Return the bytes to give the KV pool.

        ``cache_config.kv_cache_memory_bytes``, else ``VLLM_CPU_KVCACHE_SPACE`` GiB, else a quarter
        of the free memory but at most 4 GiB: the host has other things to do. That is shared by
        the engine cores of this machine; what is set, each of them takes.
        """
        fixed = self.fixed_kv_cache_bytes(config)
        if fixed is not None:
            return fixed
        free = self.free_memory_bytes()
        num_cores = config.parallel_config.num_local_cores
        derived = min(free // _FREE_MEMORY_SHARE, _MAX_DERIVED_KV_BYTES) // num_cores
        logger.info(
            "KV cache: %.2f GiB, a quarter of the %.1f GiB free but at most %d GiB%s; "
            "VLLM_CPU_KVCACHE_SPACE (GiB) or --kv-cache-memory-bytes sets it",
            derived / GIB,
            free / GIB,
            _MAX_DERIVED_KV_BYTES // GIB,
            f", shared by {num_cores} engine cores" if num_cores > 1 else "",
        )
        return derived

    def bind_host_threads(self, local_rank: int) -> None:
        """Keep to the CPUs of ``VLLM_CPU_OMP_THREADS_BIND``."""
        cpus = parse_binding(envs.VLLM_CPU_OMP_THREADS_BIND, local_rank)
        if cpus is not None and bind_to(cpus):
            logger.info("worker %d keeps to the CPUs %s", local_rank, sorted(cpus))

    def default_num_threads(self) -> int | None:
        """Return the cores this process may use; None when the user set OMP_NUM_THREADS."""
        return None if envs.OMP_NUM_THREADS else count_usable_cores()

    def make_step_model(
        self,
        model: Any,
        layout: CacheLayout,
        kv_caches: Mapping[str, torch.Tensor],
        device: torch.device,
    ) -> StepModel:
        """Return the native kernels' model where they have one for it, else torch's."""
        import torch  # noqa: PLC0415  (start-up: the API process must not load torch)

        from vllm.native.models import make_native_model  # noqa: PLC0415  (loads torch)

        native = make_native_model(model, layout, kv_caches, torch.get_num_threads(), releases=True)
        return native or super().make_step_model(model, layout, kv_caches, device)

    def find_block_packer(self) -> BlockPacker | None:
        """Return the native one, which takes all threads; None: there is no library."""
        import torch  # noqa: PLC0415  (start-up: the API process must not load torch)

        from vllm.native.packing import find_block_packer  # noqa: PLC0415  (loads torch)

        return find_block_packer(torch.get_num_threads())

    def allocate_kv_pool(
        self, num_blocks: int, stride_bytes: int, device: torch.device
    ) -> torch.Tensor:
        """Allocate zeroed pool memory whose pages the host commits on first write.

        ``torch.zeros`` would write all of it at start-up. Attention reads it from end to end, so it
        lies in huge pages.
        """
        import torch  # noqa: PLC0415  (start-up: the API process must not load torch)

        num_bytes = num_blocks * stride_bytes
        memory = map_huge_pages(num_bytes)
        return torch.frombuffer(memory, dtype=torch.uint8).view(num_blocks, stride_bytes)
