"""Norm, rotary embedding and hyper-connection write as torch_npu calls."""

import torch

from vllm.v1.attention.ops import reference

# Sizes that the wheel documents for npu_mhc_post.
_MHC_STREAMS = (4, 6, 8)
_MHC_DTYPES = (torch.bfloat16, torch.float16)


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """As ``reference.rms_norm``, by npu_rms_norm.

    The call norms over as many axes as gamma has: a weight per head is multiplied in afterwards.
    """
    if not x.numel():
        return torch.empty_like(x)
    if weight is not None and weight.dim() > 1:
        wide = x.float()
        scaled: torch.Tensor = torch.ops.npu.npu_rms_norm(wide, wide.new_ones(x.shape[-1]), eps)[0]
        return (scaled * weight).to(x.dtype)
    gamma = x.new_ones(x.shape[-1]) if weight is None else weight.to(x.dtype)
    normed: torch.Tensor = torch.ops.npu.npu_rms_norm(x, gamma, eps)[0]
    return normed


def rotate_(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """As ``reference.rotate_``, by npu_rotary_mul on neighbouring pairs.

    In fp32 whatever the type of x, as the reference. The call wants four axes and cosines that are
    1 on two of them: tokens are its sequence, heads its heads ([S, 1, N, D] with [S, 1, 1, D]).

    Mutates:
        x, which is also returned.
    """
    width = 2 * turns.shape[-1]
    tail = x[..., x.shape[-1] - width :]
    if not x.shape[0]:
        return x
    parts = torch.view_as_real(turns).view(x.shape[0], 1, 1, -1, 2)
    cosines = parts[..., 0].repeat_interleave(2, -1)
    sines = parts[..., 1].repeat_interleave(2, -1)
    rows = tail.reshape(x.shape[0], 1, -1, width).float()
    turned = torch.ops.npu.npu_rotary_mul(rows, cosines, sines, "interleave")
    tail.copy_(turned.view(tail.shape))
    return x


def hc_expand(
    output: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, mix: torch.Tensor
) -> torch.Tensor:
    """As ``reference.hc_expand``, by npu_mhc_post where its documented limits hold."""
    if streams.dtype not in _MHC_DTYPES or streams.shape[1] not in _MHC_STREAMS:
        return reference.hc_expand(output, streams, post, mix)
    expanded: torch.Tensor = torch.ops.npu.npu_mhc_post(streams, mix, output, post)
    return expanded
