"""Result shapes and types of the torch_npu calls of ``schemas``, for Meta tensors.

Arguments that do not sway the result's shape are swallowed by ``**_``: the dispatcher has checked
them against the schema already.
"""

from collections.abc import Sequence
from typing import Any

import torch

from vllm_ascend.ops.dtype_codes import torch_dtype_of


def rms_norm(
    input: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return like the input, and fp32 with the normed axes of size 1."""
    del epsilon
    kept = input.dim() - gamma.dim()
    shape = [*input.shape[:kept], *([1] * gamma.dim())]
    return torch.empty_like(input), input.new_empty(shape, dtype=torch.float32)


def rotary_mul(
    input: torch.Tensor,
    r1: torch.Tensor,
    r2: torch.Tensor,
    rotary_mode: str = "half",
    rotate: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return like the input."""
    del r1, r2, rotary_mode, rotate
    return input.new_empty(input.shape)


def clipped_swiglu(x: torch.Tensor, *, dim: int = -1, **_: Any) -> torch.Tensor:
    """Return half as wide along ``dim``."""
    shape = list(x.shape)
    shape[dim] //= 2
    return x.new_empty(shape)


def mhc_post(
    x: torch.Tensor, h_res: torch.Tensor | None, h_out: torch.Tensor, h_post: torch.Tensor
) -> torch.Tensor:
    """Return like the streams."""
    del h_res, h_out, h_post
    return x.new_empty(x.shape)


def scatter_nd_update_(
    input: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor
) -> torch.Tensor:
    """Return the input itself."""
    del indices, updates
    return input


def moe_init_routing_v2(
    x: torch.Tensor,
    expert_idx: torch.Tensor,
    *,
    expert_num: int = -1,
    active_expert_range: Sequence[int] = (),
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return [T * k, H], int32 [T * k], int64 [E] and fp32 [T * k]."""
    num_pairs = expert_idx.numel()
    if active_expert_range:
        expert_num = active_expert_range[1] - active_expert_range[0]
    return (
        x.new_empty((num_pairs, x.shape[1])),
        x.new_empty((num_pairs,), dtype=torch.int32),
        x.new_empty((expert_num,), dtype=torch.int64),
        x.new_empty((num_pairs,), dtype=torch.float32),
    )


def moe_token_unpermute(
    permuted_tokens: torch.Tensor,
    sorted_indices: torch.Tensor,
    probs: torch.Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
) -> torch.Tensor:
    """Return [T, H]."""
    del padded_mode, restore_shape
    num_chosen = 1 if probs is None else probs.shape[1]
    return permuted_tokens.new_empty(
        (sorted_indices.shape[0] // num_chosen, permuted_tokens.shape[-1])
    )


def grouped_matmul(
    x: Sequence[torch.Tensor],
    weight: Sequence[torch.Tensor],
    *,
    output_dtype: int | None = None,
    **_: Any,
) -> list[torch.Tensor]:
    """Return one tensor of all rows."""
    dtype = x[0].dtype if output_dtype is None else torch_dtype_of(output_dtype)
    return [x[0].new_empty((x[0].shape[0], weight[0].shape[-1]), dtype=dtype)]


def dynamic_quant(input: torch.Tensor, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 of the same shape, and fp32 without the last axis."""
    return (
        input.new_empty(input.shape, dtype=torch.int8),
        input.new_empty(input.shape[:-1], dtype=torch.float32),
    )


def quant_matmul(
    x1: torch.Tensor,
    x2: torch.Tensor,
    scale: torch.Tensor,
    *,
    output_dtype: int | None = None,
    **_: Any,
) -> torch.Tensor:
    """Return [..., M, N]; int8 unless a type is given."""
    del scale
    dtype = torch.int8 if output_dtype is None else torch_dtype_of(output_dtype)
    return x1.new_empty((*x1.shape[:-1], x2.shape[-1]), dtype=dtype)


def format_cast(input: torch.Tensor, acl_format: int, **_: Any) -> torch.Tensor:
    """Return like the input."""
    del acl_format
    return torch.empty_like(input)
