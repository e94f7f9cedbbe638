"""The experts as torch_npu calls: route, grouped products, clipped SwiGLU, unroute."""

import torch
from torch.nn.functional import linear

_SPLIT_ONE_OUTPUT = 2
_GROUP_ROWS = 0
_LIST_COUNTS = 1


def route(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    num_experts: int,
    row_scales: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort tokens by chosen expert.

    Args:
        x: [T, D].
        expert_ids: int [T, k].
        num_experts: E.
        row_scales: fp32 [T], scales of int8 rows.

    Returns:
        Rows [T * k, D]; int32 [T * k], where each (token, choice) went; int64 [E], rows of each;
        fp32 [T * k], the rows' scales, undefined without ``row_scales``.
    """
    rows, row_index, counts, scales = torch.ops.npu.npu_moe_init_routing_v2(
        x,
        expert_ids.int(),
        scale=row_scales,
        active_num=expert_ids.numel(),
        expert_num=num_experts,
        expert_tokens_num_type=1,
        expert_tokens_num_flag=True,
        active_expert_range=[0, num_experts],
    )
    return rows, row_index, counts, scales


def grouped_product(
    rows: torch.Tensor,
    weights: torch.Tensor,
    counts: torch.Tensor,
    *,
    scales: torch.Tensor | None = None,
    row_scales: torch.Tensor | None = None,
    output_dtype: int | None = None,
) -> torch.Tensor:
    """Multiply each expert's rows by its matrix.

    Args:
        rows: [N, in], sorted by expert.
        weights: [E, in, out].
        counts: int64 [E].
        scales: [E, out] of int8 weights.
        row_scales: fp32 [N] of int8 rows.
        output_dtype: Code of the result's type; None: the rows'.
    """
    product: torch.Tensor = torch.ops.npu.npu_grouped_matmul(
        [rows],
        [weights],
        scale=None if scales is None else [scales],
        per_token_scale=None if row_scales is None else [row_scales],
        group_list=counts,
        split_item=_SPLIT_ONE_OUTPUT,
        group_type=_GROUP_ROWS,
        group_list_type=_LIST_COUNTS,
        output_dtype=output_dtype,
    )[0]
    return product


def clamped_swiglu(gate_up: torch.Tensor, limit: float) -> torch.Tensor:
    """Return silu(min(gate, limit)) * clamp(up, -limit, limit) of [N, gate | up]."""
    activated: torch.Tensor = torch.ops.npu.npu_clipped_swiglu(
        gate_up, alpha=1.0, limit=limit, bias=0.0, interleaved=False
    )
    return activated


def unroute(rows: torch.Tensor, row_index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Sum each token's rows by its weights [T, k]: [T * k, D] to [T, D]."""
    summed: torch.Tensor = torch.ops.npu.npu_moe_token_unpermute(
        rows, row_index, weights.to(rows.dtype)
    )
    return summed


def mix_experts(
    x: torch.Tensor,
    gate_up_weights: torch.Tensor,
    down_weights: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    limit: float,
) -> torch.Tensor:
    """As ``reference.mix_experts``; nothing waits for the device, so a graph can capture it."""
    num_experts = gate_up_weights.shape[0] - 1
    if not x.shape[0]:
        return torch.empty_like(x)
    rows, row_index, counts, _ = route(x, expert_ids, num_experts)
    hidden = grouped_product(rows, gate_up_weights[:num_experts].mT, counts)
    hidden = clamped_swiglu(hidden, limit)
    hidden = grouped_product(hidden, down_weights[:num_experts].mT, counts)
    routed = unroute(hidden, row_index, weights)
    shared = clamped_swiglu(linear(x, gate_up_weights[num_experts]), limit)
    return routed + linear(shared, down_weights[num_experts])
