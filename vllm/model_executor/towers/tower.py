"""A tower ready to read pictures."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from vllm.model_executor.model_loader.safetensors_header import StoredTensor
from vllm.model_executor.towers import gemma4, qwen3_5, siglip
from vllm.model_executor.towers.files import pick_tensors
from vllm.model_executor.towers.kernels import KernelMaker, TorchKernels
from vllm.model_executor.towers.parts import KeepGoing, go_on
from vllm.model_executor.towers.plans import TowerPlan
from vllm.model_executor.towers.weights import TowerWeights

_ENCODERS: Mapping[str, Callable[..., torch.Tensor]] = MappingProxyType(
    {
        "siglip": siglip.encode,
        "gemma4": gemma4.encode,
        "gemma4_embedder": gemma4.embed,
        "qwen3_5": qwen3_5.encode,
    }
)


class Tower:
    """Makes the rows of one picture at a time.

    Owns: its weights, read with the first picture.

    Args:
        plan: What it looks like.
        stored: The checkpoint's tensors; None: weights are drawn.
        dtype: Of its weights.
        seed: Of drawn weights.
        make_kernels: Of what multiplies.
    """

    def __init__(
        self,
        plan: TowerPlan,
        stored: Sequence[StoredTensor] | None,
        dtype: torch.dtype,
        seed: int = 0,
        make_kernels: KernelMaker = TorchKernels,
    ) -> None:
        by_name = None
        if stored is not None:
            by_name = pick_tensors(plan, stored)
        self._plan: Any = plan
        self._weights = TowerWeights(by_name, plan.tensors(), dtype, seed)
        self._kernels = make_kernels(self._weights, plan.encoder())
        self._encode = _ENCODERS[plan.kind]

    @property
    def files(self) -> tuple[Path, ...]:
        """Those that hold its weights; none: they are drawn."""
        return self._weights.files

    @property
    def numerics(self) -> str:
        """What multiplies, in which type: what decides about the last bits of rows."""
        return f"{type(self._kernels).__name__}, {self._weights.dtype}"

    @property
    def num_bytes(self) -> int:
        """Bytes of its weights once they are read, about."""
        return int(self._weights.num_values * self._kernels.value_bytes)

    @torch.inference_mode()
    def encode(self, pixels: torch.Tensor, keep_going: KeepGoing = go_on) -> torch.Tensor:
        """Return the rows fp32 ``[N, D]`` of a picture's pixels, uint8 ``[H, W, 3]``.

        Args:
            pixels: Of the size that the family's rule gives.
            keep_going: Called between layers; raises to end the work.
        """
        rows = self._encode(self._plan, self._weights, self._kernels, pixels, keep_going)
        return rows.float().contiguous()
