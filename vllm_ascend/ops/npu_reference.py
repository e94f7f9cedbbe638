"""What the torch_npu calls of ``schemas`` mean, in plain torch.

Only the uses this tree makes are given; another argument raises ``UnsupportedFeatureError``, so
that a CPU run never silently differs from a device's.
"""

from collections.abc import Sequence
from typing import Any

import torch

from vllm.exceptions import UnsupportedFeatureError
from vllm_ascend.ops.dtype_codes import torch_dtype_of

_INT8_MAX = 127


def _refuse(call: str, **arguments: Any) -> None:
    """Raise unless every argument is None, False or empty."""
    given = [name for name, value in arguments.items() if value not in (None, False, [], ())]
    if given:
        raise UnsupportedFeatureError(
            f"{call}({', '.join(given)}) has no CPU meaning in this tree: leave it out, or add it "
            "to vllm_ascend/ops/npu_reference.py"
        )


def rms_norm(
    input: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the normed input in its own type, and fp32 1 / rms with the normed axes kept as 1."""
    wide = input.float()
    axes = tuple(range(input.dim() - gamma.dim(), input.dim()))
    rstd = torch.rsqrt(wide.square().mean(axes, keepdim=True) + epsilon)
    return (wide * rstd * gamma.float()).to(input.dtype), rstd


def rotary_mul(
    input: torch.Tensor,
    r1: torch.Tensor,
    r2: torch.Tensor,
    rotary_mode: str = "half",
    rotate: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return input * r1 + rotated(input) * r2; pairs are halves or neighbours."""
    _refuse("npu_rotary_mul", rotate=rotate is not None)
    if rotary_mode == "half":
        first, second = input.chunk(2, -1)
        turned = torch.cat([-second, first], -1)
    else:
        turned = torch.stack([-input[..., 1::2], input[..., ::2]], -1).flatten(-2)
    return input * r1 + turned * r2


def clipped_swiglu(
    x: torch.Tensor,
    *,
    group_index: torch.Tensor | None = None,
    dim: int = -1,
    alpha: float = 1.702,
    limit: float = 7.0,
    bias: float = 1.0,
    interleaved: bool = True,
) -> torch.Tensor:
    """Return a * sigmoid(alpha * a) * (b + bias), a = min(gate, limit), b = clamp(up)."""
    _refuse(
        "npu_clipped_swiglu", group_index=group_index is not None, dim=dim not in (-1, x.dim() - 1)
    )
    wide = x.float()
    gate, up = (wide[..., ::2], wide[..., 1::2]) if interleaved else wide.chunk(2, -1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (gate * torch.sigmoid(alpha * gate) * (up + bias)).to(x.dtype)


def mhc_post(
    x: torch.Tensor, h_res: torch.Tensor | None, h_out: torch.Tensor, h_post: torch.Tensor
) -> torch.Tensor:
    """Return h_res^T x + h_out (x) h_post: x [T, n, D], h_out [T, D], h_post [T, n]."""
    kept = x.float() if h_res is None else torch.matmul(h_res.mT, x.float())
    added = h_out.float().unsqueeze(-2) * h_post.unsqueeze(-1)
    return (kept + added).to(x.dtype)


def scatter_nd_update_(
    input: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor
) -> torch.Tensor:
    """Store ``updates[i]`` at ``input[indices[i]]``; the last axis of indices addresses axes.

    Mutates:
        input, which is also returned.

    Raises:
        TypeError: Values are of another type than the input.
    """
    if input.dtype != updates.dtype:
        raise TypeError(f"updates are {updates.dtype}, but the input is {input.dtype}")
    input[tuple(indices.long().unbind(-1))] = updates
    return input


def moe_init_routing_v2(
    x: torch.Tensor,
    expert_idx: torch.Tensor,
    *,
    scale: torch.Tensor | None = None,
    offset: torch.Tensor | None = None,
    active_num: int = -1,
    expert_capacity: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = -1,
    active_expert_range: Sequence[int] = (),
    row_idx_type: int = 0,
    x_dtype: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Repeat each token once per chosen expert and sort by expert.

    Returns:
        The sorted rows [T * k, H]; for each (token, choice) its sorted row, int32 [T * k]; the
        rows of each expert, int64 [E]; the rows' scales, fp32 [T * k] (zeros without ``scale``).
    """
    del expert_capacity
    num_rows, num_chosen = expert_idx.shape
    whole_range = list(active_expert_range) in ([], [0, expert_num])
    _refuse(
        "npu_moe_init_routing_v2",
        offset=offset is not None,
        active_num=active_num not in (-1, 0, num_rows * num_chosen),
        drop_pad_mode=drop_pad_mode != 0,
        expert_tokens_num_type=expert_tokens_num_type != 1,
        quant_mode=quant_mode != -1,
        active_expert_range=not whole_range,
        row_idx_type=row_idx_type != 0,
        x_dtype=x_dtype,
    )
    del expert_tokens_num_flag
    flat = expert_idx.flatten().long()
    order = flat.argsort(stable=True)
    sorted_row = torch.empty_like(order)
    sorted_row[order] = torch.arange(order.shape[0])
    tokens = order // num_chosen
    scales = torch.zeros(order.shape[0]) if scale is None else scale.float()[tokens]
    counts = torch.bincount(flat, minlength=expert_num)
    return x[tokens], sorted_row.int(), counts, scales


def moe_token_unpermute(
    permuted_tokens: torch.Tensor,
    sorted_indices: torch.Tensor,
    probs: torch.Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
) -> torch.Tensor:
    """Return [T, H]: each token's rows at ``sorted_indices`` [T * k], weighted and summed."""
    _refuse("npu_moe_token_unpermute", padded_mode=padded_mode, restore_shape=restore_shape)
    rows = permuted_tokens[sorted_indices.long()].float()
    if probs is None:
        return rows.to(permuted_tokens.dtype)
    rows = rows.view(*probs.shape, -1)
    return torch.einsum("tkh,tk->th", rows, probs.float()).to(permuted_tokens.dtype)


def grouped_matmul(
    x: Sequence[torch.Tensor],
    weight: Sequence[torch.Tensor],
    *,
    bias: Sequence[torch.Tensor] | None = None,
    scale: Sequence[torch.Tensor] | None = None,
    offset: Sequence[torch.Tensor] | None = None,
    antiquant_scale: Sequence[torch.Tensor] | None = None,
    antiquant_offset: Sequence[torch.Tensor] | None = None,
    per_token_scale: Sequence[torch.Tensor] | None = None,
    group_list: torch.Tensor | None = None,
    activation_input: Sequence[torch.Tensor] | None = None,
    activation_quant_scale: Sequence[torch.Tensor] | None = None,
    activation_quant_offset: Sequence[torch.Tensor] | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    act_type: int | None = 0,
    tuning_config: Sequence[int] | None = None,
    output_dtype: int | None = None,
    x_dtype: int | None = None,
    weight_dtype: int | None = None,
    scale_dtype: int | None = None,
    per_token_scale_dtype: int | None = None,
) -> list[torch.Tensor]:
    """Multiply runs of rows by a matrix each: x [N, K], weight [E, K, M], counts int64 [E].

    int8 operands are summed exactly, then scaled per output (``scale`` [E, M]) and per row.
    """
    del tuning_config
    _refuse(
        "npu_grouped_matmul",
        bias=bias,
        offset=offset,
        antiquant_scale=antiquant_scale,
        antiquant_offset=antiquant_offset,
        activation_input=activation_input,
        activation_quant_scale=activation_quant_scale,
        activation_quant_offset=activation_quant_offset,
        split_item=split_item not in (2, 3),
        group_type=group_type != 0,
        group_list_type=group_list_type != 1,
        group_list=group_list is None,
        act_type=act_type not in (None, 0),
        x_dtype=x_dtype,
        weight_dtype=weight_dtype,
        scale_dtype=scale_dtype,
        per_token_scale_dtype=per_token_scale_dtype,
    )
    assert group_list is not None
    dtype = x[0].dtype if output_dtype is None else torch_dtype_of(output_dtype)
    scales = None if scale is None else scale[0]
    row_scales = None if per_token_scale is None else per_token_scale[0]
    return [_multiply_groups(x[0], weight[0], group_list.tolist(), dtype, scales, row_scales)]


def _multiply_groups(
    rows: torch.Tensor,
    matrices: torch.Tensor,
    counts: list[int],
    dtype: torch.dtype,
    scales: torch.Tensor | None,
    row_scales: torch.Tensor | None,
) -> torch.Tensor:
    output = torch.empty((rows.shape[0], matrices.shape[2]), dtype=dtype)
    first = 0
    for expert, count in enumerate(counts):
        part = slice(first, first + count)
        first += count
        if not count:
            continue
        if scales is None:
            output[part] = rows[part] @ matrices[expert]
            continue
        product = _multiply_int8(rows[part], matrices[expert]) * scales[expert].float()
        if row_scales is not None:
            product *= row_scales[part].unsqueeze(1)
        output[part] = product.to(dtype)
    return output


def _multiply_int8(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the exact product of int8 matrices, as fp32.

    fp32 sums are exact below 2^24, too few for wide layers, so they run in fp64.
    """
    return (x.double() @ weight.double()).float()


def dynamic_quant(
    input: torch.Tensor,
    *,
    smooth_scales: torch.Tensor | None = None,
    group_index: torch.Tensor | None = None,
    dst_type: int | None = None,
    quant_mode: str = "pertoken",
    dst_type_max: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 rows and their fp32 scales: max |row| is 127. A zero row has scale zero."""
    _refuse(
        "npu_dynamic_quant",
        smooth_scales=smooth_scales is not None,
        group_index=group_index is not None,
        dst_type=dst_type,
        quant_mode=quant_mode != "pertoken",
        dst_type_max=dst_type_max != 0.0,
    )
    wide = input.float()
    scales = wide.abs().amax(-1) / _INT8_MAX
    divisors = torch.where(scales > 0, scales, 1.0).unsqueeze(-1)
    quantised = (wide / divisors).round().clamp(-_INT8_MAX, _INT8_MAX)
    return quantised.to(torch.int8), scales


def quant_matmul(
    x1: torch.Tensor,
    x2: torch.Tensor,
    scale: torch.Tensor,
    *,
    offset: torch.Tensor | None = None,
    pertoken_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    output_dtype: int | None = None,
    x1_dtype: int | None = None,
    x2_dtype: int | None = None,
    pertoken_scale_dtype: int | None = None,
    scale_dtype: int | None = None,
    group_sizes: Sequence[int] | None = None,
    y_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return (x1 @ x2) * scale [N] * pertoken_scale [M] of int8 [M, K] and [K, N]."""
    _refuse(
        "npu_quant_matmul",
        offset=offset is not None,
        bias=bias is not None,
        output_dtype=output_dtype is None,
        x1_dtype=x1_dtype,
        x2_dtype=x2_dtype,
        pertoken_scale_dtype=pertoken_scale_dtype,
        scale_dtype=scale_dtype,
        group_sizes=group_sizes,
        y_scale=y_scale is not None,
    )
    assert output_dtype is not None
    product = _multiply_int8(x1, x2) * scale.float()
    if pertoken_scale is not None:
        product *= pertoken_scale.unsqueeze(-1)
    return product.to(torch_dtype_of(output_dtype))


def format_cast(
    input: torch.Tensor,
    acl_format: int,
    *,
    customize_dtype: int | None = None,
    input_dtype: int | None = None,
) -> torch.Tensor:
    """Return a copy: a format is how a device lays memory out, and changes no value."""
    del acl_format
    _refuse("npu_format_cast", customize_dtype=customize_dtype, input_dtype=input_dtype)
    return input.clone()
