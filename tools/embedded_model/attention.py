"""Banded attention with a sink, and its gradient: keys of chunk i - 1, chunk i, then entries."""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def window_chunks(kv: Tensor, window: int) -> Tensor:
    """Map rows [B, L, d] to each chunk's keys [B, ceil(L / W), 2W, d]: the one before, then own."""
    length = kv.shape[1]
    padded = torch.unflatten(F.pad(kv, (0, 0, window, -length % window)), 1, (-1, window))
    return torch.cat([padded[:, :-1], padded[:, 1:]], 2)


@functools.lru_cache(maxsize=64)
def window_mask(length: int, window: int) -> Tensor:
    """0 where a query sees a key of its two chunks, else -inf: [1, chunks, 1, W, 2W]."""
    chunks = -(-length // window)
    query = torch.arange(chunks * window).view(chunks, window, 1)
    key = query[:, :1] - window + torch.arange(2 * window)
    seen = (key >= 0) & (key <= query) & (key > query - window)
    return torch.where(seen, 0.0, -torch.inf)[None, :, None]


@functools.lru_cache(maxsize=64)
def entry_keys_mask(length: int, window: int, ratio: int, count: int) -> Tensor:
    """0 where a query sees an entry, else -inf: [1, chunks, 1, W, count]."""
    chunks = -(-length // window)
    visible = (torch.arange(chunks * window) + 1) // ratio
    seen = torch.arange(count) < visible[:, None]
    return torch.where(seen, 0.0, -torch.inf).view(1, chunks, 1, window, count)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, keys: Tensor, mask: Tensor, sink: Tensor) -> Any:
        """q [N, H, W, d] pre-scaled, keys [N, K + 1, d] with a last row of zeros for the sink."""
        n, heads, window, width = q.shape
        flat = q.reshape(n, heads * window, width)
        scores = flat @ keys.transpose(1, 2)
        by_mask = scores.view(-1, mask.shape[1], heads, window, scores.shape[-1])
        by_mask[..., :-1].add_(mask)
        scores.view(n, heads, window, -1)[..., -1] = sink[:, None].to(scores.dtype)
        p = scores.softmax(-1)
        out = p @ keys
        ctx.save_for_backward(flat, keys, p)
        ctx.heads = heads
        p_view = p.view(n, heads, window, -1)
        ctx.mark_non_differentiable(p_view)
        return out.view(n, heads, window, width), p_view

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, _d_p: Tensor) -> Any:
        """Gradients of q, keys and sink."""
        flat, keys, p = ctx.saved_tensors
        n, heads = flat.shape[0], ctx.heads
        d_out = d_out.reshape(flat.shape).to(flat.dtype)
        d_p = d_out @ keys.transpose(1, 2)
        d_s = torch._softmax_backward_data(d_p, p, -1, p.dtype)
        d_sink = d_s[..., -1].float().view(n, heads, -1).sum((0, 2))
        d_keys = d_s.transpose(1, 2) @ flat + p.transpose(1, 2) @ d_out
        return (d_s @ keys).view(n, heads, -1, flat.shape[-1]), d_keys, None, d_sink


def attend(
    q: Tensor, keys: Tensor, mask: Tensor, sink: Tensor, window: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Attend from q [B, L, H, d] to each chunk's keys [B, chunks, K, d].

    Args:
        q: Queries, not scaled.
        keys: Both keys and values.
        mask: Additive, [1 or B, chunks, 1, W, K].
        sink: Logit per head, in the denominator only.
        window: Queries per chunk.
        dtype: Of the products.

    Returns:
        [B, L, H, d] and the probabilities [B, chunks, H, W, K + 1], without gradient.
    """
    batch, length, heads, width = q.shape
    chunks = keys.shape[1]
    q = F.pad(q * width**-0.5, (0, 0, 0, 0, 0, -length % window)).to(dtype)
    q = q.view(batch * chunks, window, heads, width).transpose(1, 2)
    keys = F.pad(keys, (0, 0, 0, 1)).to(dtype).flatten(0, 1)
    out, p = _Attend.apply(q, keys, mask.to(dtype), sink)  # type: ignore[no-untyped-call]
    out = out.transpose(1, 2).reshape(batch, chunks * window, heads, width)[:, :length]
    return out, p.view(batch, chunks, heads, window, -1)
