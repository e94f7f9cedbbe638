"""What the engine asks of a device: ops by name, a worker, memory, config defaults, KV-cache hooks.

A platform is found once (``vllm.platforms.current_platform``); the rest of the tree asks it instead
of testing device names. This module loads torch only inside the methods that need a tensor, because
the API process asks for config defaults too.
"""

from __future__ import annotations

import copy
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from vllm import envs
from vllm.exceptions import ConfigError
from vllm.model_executor.model_loader.shards import ShardFinder, find_whole
from vllm.utils.gguf_file import is_gguf

if TYPE_CHECKING:
    import torch

    from vllm.config import SpeculativeConfig, VllmConfig
    from vllm.model_executor.layers.quantization import WeightQuantization
    from vllm.model_executor.layers.quantization.gguf_blocks import BlockPacker
    from vllm.model_executor.towers.kernels import KernelMaker
    from vllm.v1.attention.metadata import CacheLayout
    from vllm.v1.attention.step_model import StepModel


class Platform(ABC):
    """A device type with the defaults that suit any of them; concrete platforms override.

    Attributes:
        device_type: torch's name of the device ("cpu", "cuda", "npu").
        device_name: For people.
        ray_device_key: Resource name in a Ray cluster; "" where Ray knows none.
        device_control_env_var: Variable that selects visible devices; "" where there is none.
        dist_backend: Collective backend of torch.distributed.
        worker_class_path: Dotted path of the worker class.
        reads_panels: Whether its kernels read FP8 and FP4 matrices from panels, not as files hold
            them.
        keeps_int8_rows: Whether keys and values may be cached in int8.
    """

    device_type: ClassVar[str]
    device_name: ClassVar[str]
    ray_device_key: ClassVar[str] = ""
    device_control_env_var: ClassVar[str] = ""
    dist_backend: ClassVar[str] = "gloo"
    worker_class_path: ClassVar[str] = "vllm.v1.worker.worker.Worker"
    reads_panels: ClassVar[bool] = False
    keeps_int8_rows: ClassVar[bool] = False

    # --- ops ---------------------------------------------------------------------------------

    def get_op(self, name: str) -> Callable[..., Any]:
        """Return the op called ``name``: the plain-torch reference unless a platform has its own.

        Raises:
            ConfigError: There is no such op.
        """
        from vllm.v1.attention.ops.registry import get_reference_op  # noqa: PLC0415  (loads torch)

        return get_reference_op(name)

    def bind_host_threads(self, local_rank: int) -> None:
        """Keep the worker's threads to the host's CPUs that it was given, before any starts.

        Raises:
            ConfigError: What the operator gave it makes no sense here.
        """
        del local_rank

    def find_quantization(
        self, checkpoint: str, find_shard: ShardFinder = find_whole
    ) -> WeightQuantization | None:
        """Return how the matrices of a checkpoint folder are stored; None: the plain way.

        Args:
            checkpoint: The folder.
            find_shard: Tells which part of a tensor this rank holds.

        Raises:
            CheckpointError: The folder's description of them is broken.
        """
        del checkpoint, find_shard
        return None

    def find_block_packer(self) -> BlockPacker | None:
        """Return what packs blocks of GGUF files for this device's kernels; None: torch does."""
        return None

    # --- config ------------------------------------------------------------------------------

    def default_dtype(self, config: VllmConfig) -> str:
        """Return the name of the dtype that "auto" stands for."""
        hf_config = config.model_config.hf_config
        declared = hf_config.get("torch_dtype") or hf_config.get("dtype")
        return declared if declared in ("float16", "bfloat16", "float32") else "bfloat16"

    def default_cache_dtype(self, config: VllmConfig) -> str:
        """Return the name of the type of cached rows that "auto" stands for; "auto": the model's.

        Args:
            config: With the model's dtype.
        """
        del config
        return "auto"

    def default_joint_prompt_tokens(self, config: VllmConfig) -> int | None:
        """Return the tokens that several prompts may have in a step together; None: any number."""
        del config
        return None

    def default_drafts(self, config: VllmConfig) -> SpeculativeConfig | None:
        """Return what drafts where nobody asked for drafts, or for none; None: nothing does."""
        del config
        return None

    def _resolve_options(self, config: VllmConfig) -> dict[str, str]:
        """Return the model's options that stand for something else here, as "auto" does."""
        found = {}
        # Asked only where it counts: a GPU looks at the card, and may warn.
        if config.model_config.dtype == "auto":
            found["dtype"] = self.default_dtype(config)
        if config.model_config.quantized_inputs == "auto":
            found["quantized_inputs"] = "int8" if envs.VLLM_CPU_INT4_W4A8 else "exact"
        return found

    def default_block_size(self, hf_config: Mapping[str, Any]) -> int | None:
        """Return what an unset ``--block-size`` means for a model; None: the model's own default.

        Asked of a plug-in's platform, once, where flags become a config: every process then works
        with the same number. Must not load torch.

        Args:
            hf_config: The model's config.json.

        Raises:
            ConfigError: What the operator said elsewhere is not a block size.
        """
        del hf_config
        return None

    def check_and_update_config(self, config: VllmConfig) -> VllmConfig:
        """Return ``config`` with this platform's defaults filled in; the argument is not changed.

        Raises:
            ConfigError: The configuration cannot run on this platform.
        """
        device = config.device_config.device
        if device not in ("auto", self.device_type):
            raise ConfigError(
                f"device {device!r} was asked for, but the active platform is "
                f"{self.device_type!r}: use --device auto or --device {self.device_type}."
            )
        self.check_before_load(config)
        changes: dict[str, Any] = {
            "device_config": dataclasses.replace(config.device_config, device=self.device_type)
        }
        if config.model_config is not None and (found := self._resolve_options(config)):
            # A plain copy: replace() would rerun the constructor, which records its own
            # max_model_len argument as what the user passed.
            model_config = copy.copy(config.model_config)
            for name, value in found.items():
                setattr(model_config, name, value)
            changes["model_config"] = model_config
        filled = dataclasses.replace(config, **changes)
        if config.model_config is not None and config.cache_config.cache_dtype == "auto":
            chosen = self.default_cache_dtype(filled)
            if chosen != "auto":
                # A copy, for the same reason; what it is given later is given to the copy.
                filled.cache_config = copy.copy(config.cache_config)
                filled.cache_config.cache_dtype = chosen
        if config.model_config is not None and config.scheduler_config.joint_prompt_tokens is None:
            most = self.default_joint_prompt_tokens(filled)
            if most is not None:
                filled.scheduler_config = copy.copy(config.scheduler_config)
                filled.scheduler_config.joint_prompt_tokens = most
        return filled

    def check_before_load(self, config: VllmConfig) -> None:
        """Refuse what cannot start, by the checkpoint's header alone; must not load torch.

        Asked where flags become a config, and again before weights load.

        Raises:
            ConfigError: A folder for packed weights was given where nothing would be packed, or
                rows of a type that this device does not keep.
        """
        if config.cache_config.cache_dtype == "int8" and not self.keeps_int8_rows:
            raise ConfigError(
                f"--kv-cache-dtype int8 is for CPUs, and this engine runs on {self.device_name}: "
                "use auto, bfloat16 or float16."
            )
        folder, model = config.load_config.weights_cache_dir, config.model_config
        if folder is None or model is None:
            return
        is_packed = self.reads_panels and config.load_config.load_format != "dummy"
        if not is_packed or not is_gguf(model.path or model.model):
            raise ConfigError(
                f"weights_cache_dir={folder!r} keeps the packed weights of a GGUF file that is "
                f"served by a processor, and {model.model} on {self.device_type} is none: leave it "
                "out."
            )

    # --- device and memory -------------------------------------------------------------------

    @abstractmethod
    def make_device(self, local_rank: int) -> torch.device:
        """Select the device of a worker and return it."""

    @abstractmethod
    def total_memory_bytes(self) -> int:
        """Return the device's memory, without initialising the device."""

    @abstractmethod
    def free_memory_bytes(self) -> int:
        """Return the memory that is free on the device now."""

    def fixed_kv_cache_bytes(self, config: VllmConfig) -> int | None:
        """Return the KV pool's bytes if the user fixed them; None: they depend on free memory."""
        return config.cache_config.kv_cache_memory_bytes

    def default_kv_cache_bytes(self, config: VllmConfig) -> int:
        """Return the bytes to give the KV pool, weights being loaded.

        Those of ``fixed_kv_cache_bytes``; otherwise the share
        ``gpu_memory_utilization`` of the device's memory, less what is in use.
        """
        fixed = self.fixed_kv_cache_bytes(config)
        if fixed is not None:
            return fixed
        total = self.total_memory_bytes()
        in_use = total - self.free_memory_bytes()
        return max(0, int(total * config.cache_config.gpu_memory_utilization) - in_use)

    def default_num_threads(self) -> int | None:
        """Return the host threads torch should use, or None to leave its own choice."""
        return None

    def make_step_model(
        self,
        model: Any,
        layout: CacheLayout,
        kv_caches: Mapping[str, torch.Tensor],
        device: torch.device,
    ) -> StepModel:
        """Return what runs a loaded model's steps on this device: torch, unless a platform knows.

        Args:
            model: The loaded model.
            layout: Its KV groups.
            kv_caches: Cache name -> view; the same in every step.
            device: Where they are.
        """
        from vllm.v1.attention.step_model import make_torch_step_model  # noqa: PLC0415  (loads torch)

        return make_torch_step_model(model, device, layout, kv_caches)

    def find_tower_kernels(self) -> KernelMaker | None:
        """Return what makes kernels of an fp32 tower, which runs on the host whatever the device.

        None: torch runs it.
        """
        import torch  # noqa: PLC0415  (start-up: the API process must not load torch)

        from vllm.native.towers import find_tower_kernels  # noqa: PLC0415  (loads torch)

        return find_tower_kernels(torch.get_num_threads())

    # --- KV cache ----------------------------------------------------------------------------

    def register_custom_kv_cache_specs(  # noqa: B027  (a hook: most platforms add nothing)
        self, vllm_config: VllmConfig | None
    ) -> None:
        """Add this platform's specs and their managers to ``KVCacheSpecRegistry``."""

    def kv_cache_coordinator_path(self, vllm_config: VllmConfig) -> str | None:
        """Return the dotted path of the class that coordinates a model's KV cache groups.

        Asked once, where the KV cache is planned. The class is built with the ``CacheSettings`` of
        an engine and is a ``Coordinator``; both are in ``vllm.v1.core``.

        Args:
            vllm_config: All configuration: a platform may have one for some models only.

        Returns:
            None: the core's own class, which serves all models.
        """
        del vllm_config
        return None

    def allocate_kv_pool(
        self, num_blocks: int, stride_bytes: int, device: torch.device
    ) -> torch.Tensor:
        """Allocate zeroed pool memory, uint8 ``[num_blocks, stride_bytes]``, 64-byte aligned.

        Zeroed because a masked read of a row that was never written must not meet a NaN.
        """
        import torch  # noqa: PLC0415  (start-up: the API process must not load torch)

        return torch.zeros((num_blocks, stride_bytes), dtype=torch.uint8, device=device)

    def copy_blocks(self, pools: Sequence[torch.Tensor], pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole pool rows (source, destination), all pairs at once; see ``block_ops``.

        Mutates: the destination rows of every pool.
        """
        from vllm.platforms import block_ops  # noqa: PLC0415  (loads torch)

        block_ops.copy_blocks(pools, pairs)

    def zero_blocks(self, pools: Sequence[torch.Tensor], block_ids: Sequence[int]) -> None:
        """Fill whole pool rows with zeros.

        Mutates: the named rows of every pool.
        """
        from vllm.platforms import block_ops  # noqa: PLC0415  (loads torch)

        block_ops.zero_blocks(pools, block_ids)
