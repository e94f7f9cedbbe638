"""The spec of recurrent layers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.utils.math_utils import cdiv
from vllm.v1.kv_cache_specs.base import KVCacheSpec, KVCacheSpecKind, padded_page_bytes

if TYPE_CHECKING:
    import torch

    from vllm.config import VllmConfig


@dataclass(frozen=True)
class MambaSpec(KVCacheSpec):
    """A recurrent state; a block holds one state, whatever its tokens.

    Attributes:
        shapes: Shape of each state tensor.
        dtypes: Their dtypes.
        page_size_padded: Bytes to give a page instead of its real size; at least that.
        mamba_type: The attention backend's name.
        mamba_cache_mode: "none", "align" or "all".
        num_speculative_blocks: Extra states for draft tokens.
    """

    kind: ClassVar[KVCacheSpecKind] = KVCacheSpecKind.MAMBA
    is_zeroed: ClassVar[bool] = True

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    page_size_padded: int | None = None
    mamba_type: str = "mamba2"
    mamba_cache_mode: str = "none"
    num_speculative_blocks: int = 0

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one state."""
        # Not at construction: the control plane is also built with placeholder shapes.
        real = sum(
            math.prod(shape) * dtype.itemsize
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )
        return padded_page_bytes(real, self.page_size_padded)

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Return the bytes of a request's states in the configured cache mode."""
        mode = vllm_config.cache_config.mamba_cache_mode
        if mode == "all":
            num_states = cdiv(vllm_config.model_config.max_model_len, self.block_size)
        else:
            # "align" keeps the state of the last boundary beside the running one.
            num_states = 2 if mode == "align" else 1
        return (num_states + self.num_speculative_blocks) * self.page_size_bytes

    def with_larger_page(self, factor: int) -> KVCacheSpec:
        """Return it padded: a state does not grow with the block."""
        return replace(self, page_size_padded=self.page_size_bytes * factor)

    def uniform_key(self) -> tuple[Any, ...]:
        """Return the number of speculative blocks."""
        return ("state", self.num_speculative_blocks)
