"""Ops of decoders with grouped-query attention, in plain torch; names are listed in ``registry``.

Maths is fp32 in norms, softmax and router weights, whatever the type of the activations. Attention
comes with its log-sum-exp, so that parts of a softmax can be joined and sinks folded in afterwards.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import gelu, silu, softmax
from torch.nn.functional import linear as torch_linear

from vllm.v1.attention.ops.narrow_linear import is_native, widened_linear
from vllm.v1.attention.ops.reference import (
    find_segments,
    inverse_rms,
    linear,
    strided_linear,
)
from vllm.v1.attention.ops.stored import GatedExperts

# Scores of one block of queries in ``attend_explicitly``: 8 MiB of fp32.
_MAX_SCORE_VALUES = 1 << 21
_flash_attention: Callable[..., Any] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


# -- norms, rotary embedding, activations -----------------------------------------------------


def rms_norm_offset(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Scales the last axis to unit root mean square, then by 1 + ``weight``."""
    wide = x.float()
    normed = wide * inverse_rms(wide, eps)
    return torch.addcmul(normed, normed, weight.float()).to(x.dtype)


def rotate_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turns pairs (i, i + d / 2) of the last axis.

    Args:
        x: [T, H, d].
        cos: [T, 1, d], both halves alike.
        sin: [T, 1, d], the first half negated.

    Returns:
        [T, H, d], contiguous.
    """
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Returns silu(gate) * up of [N, gate | up]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate).mul_(up)


def limited_silu_and_mul(gate_up: torch.Tensor, limit: float) -> torch.Tensor:
    """Returns silu(gate) * up of [N, gate | up]; gate is at most ``limit``, up within it."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate.clamp(max=limit)).mul_(up.clamp(-limit, limit))


def gelu_tanh_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Returns gelu(gate) * up of [N, gate | up], gelu by its tanh formula."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gelu(gate, approximate="tanh").mul_(up)


def clamped_glu_and_mul(gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """Returns (up + 1) * gate * sigmoid(alpha * gate) of [N, gate, up, gate, up, ...].

    Gate is at most ``limit``, up within it on both sides; the two alternate.
    """
    gate, up = gate_up[..., ::2].clamp(max=limit), gate_up[..., 1::2].clamp(-limit, limit)
    return torch.sigmoid(gate * alpha).mul_(gate).mul_(up.add_(1))


def soft_cap_(x: torch.Tensor, cap: float) -> torch.Tensor:
    """Returns cap * tanh(x / cap).

    Mutates:
        x, which is also returned.
    """
    return x.div_(cap).tanh_().mul_(cap)


def project_to_logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Maps [M, D] by an output matrix [V, D] of any type to fp32 logits [M, V].

    Rounded logits tie, so the product is fp32; a narrower matrix is widened tile by tile, each of
    which is still in the cache when it is used.
    """
    if weight.dtype == torch.float32:
        return linear(x.float(), weight)
    return widened_linear(x, weight)


# -- attention --------------------------------------------------------------------------------


def attend_keys(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float,
    soft_cap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of grouped queries, with what is needed to join it with other keys.

    Args:
        queries: [B, G, Q, d]: B independent sets of keys, G heads over each.
        keys, values: [B, 1 or G, L, d].
        mask: fp32, broadcastable to [B, G, Q, L], 0 or -inf; None: all keys are seen.
        is_causal: Query i sees keys 0..i; Q = L then, and there is no mask.
        scale: Of the products.
        soft_cap: Scores are capped by tanh; 0: they are not.

    Returns:
        [B, G, Q, d], and the scores' log-sum-exp, fp32 [B, G, Q].
    """
    if not is_native(queries.dtype, queries.shape[2]):
        # As products: with many queries fp32 is faster where bf16 has no unit of its own.
        output, log_sums = attend_keys(
            queries.float(), keys.float(), values.float(), mask, is_causal, scale, soft_cap
        )
        return output.to(queries.dtype), log_sums
    is_fast = soft_cap == 0 and queries.device.type == "cpu" and keys.shape[2] > 0
    if not is_fast:
        return attend_explicitly(queries, keys, values, mask, is_causal, scale, soft_cap)
    expand = (-1, queries.shape[1], -1, -1)
    if mask is not None and mask.dtype != queries.dtype:
        mask = mask.to(queries.dtype)
    output, log_sums = _flash_attention(
        queries,
        keys.expand(expand),
        values.expand(expand),
        0.0,
        is_causal,
        attn_mask=mask,
        scale=scale,
    )
    return output, log_sums


def attend_explicitly(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float,
    soft_cap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``attend_keys`` written out: the oracle of the fast way, and the way of soft caps."""
    num_batches, num_heads, num_queries, _ = queries.shape
    num_keys = keys.shape[2]
    if is_causal:
        ahead = torch.full((num_queries, num_keys), -torch.inf, device=queries.device).triu_(1)
        mask = ahead[None, None]
    output = torch.empty_like(queries)
    log_sums = queries.new_empty(queries.shape[:3], dtype=torch.float32)
    step = max(1, _MAX_SCORE_VALUES // max(1, num_batches * num_heads * num_keys))
    for first in range(0, num_queries, step):
        part = slice(first, first + step)
        scores = torch.matmul(queries[:, :, part], keys.mT).float().mul_(scale)
        if soft_cap:
            scores = soft_cap_(scores, soft_cap)
        if mask is not None:
            scores += mask if mask.shape[2] == 1 else mask[:, :, part]
        sums = torch.logsumexp(scores, -1, keepdim=True)
        weights = scores.sub_(sums).exp_().to(values.dtype)
        output[:, :, part] = torch.matmul(weights, values)
        log_sums[:, :, part] = sums[..., 0]
    return output, log_sums


def join_attention(
    first: tuple[torch.Tensor, torch.Tensor], second: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the attention over both sets of keys, of two results of ``attend_keys``."""
    total = torch.logaddexp(first[1], second[1])
    share = (second[1] - total).exp_().unsqueeze(-1)
    joined = torch.lerp(first[0].float(), second[0].float(), share)
    return joined.to(first[0].dtype), total


def weigh_sinks(output: torch.Tensor, log_sums: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Adds each head's sink to the softmax denominator, afterwards.

    Args:
        output: [..., d] over the other keys.
        log_sums: fp32 [...], their log-sum-exp.
        sinks: fp32, broadcastable to [...]: a score without a value.
    """
    return output * torch.sigmoid(log_sums - sinks).unsqueeze(-1).to(output.dtype)


# -- experts ----------------------------------------------------------------------------------


def router_logits(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Maps rows [T, D] by a router [E, D] to fp32 logits [T, E]."""
    return torch_linear(x.float(), weight, bias)


def choose_by_softmax(
    logits: torch.Tensor, num_chosen: int, normalises: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses the most probable experts of router logits [T, E].

    Args:
        logits: Of the router.
        num_chosen: Experts per token, k.
        normalises: Whether the chosen probabilities are scaled to a sum of one.

    Returns:
        int64 ids [T, k] and fp32 weights [T, k].
    """
    weights, ids = softmax(logits, -1, dtype=torch.float32).topk(num_chosen, dim=-1)
    if normalises:
        weights = weights / weights.sum(-1, keepdim=True)
    return ids, weights


def choose_by_sigmoid(
    logits: torch.Tensor,
    bias: torch.Tensor,
    num_chosen: int,
    num_groups: int,
    num_chosen_groups: int,
    normalises: bool,
    factor: float,
    is_softmax: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses among router logits [T, E] the experts of the highest sigmoid + bias.

    They come from the groups whose best two such sums add up to most; by a softmax, whose best one
    is highest.

    Args:
        logits: Of the router.
        bias: fp32 [E]; no part of the weights.
        num_chosen: Experts per token, k.
        num_groups: Groups of E / num_groups neighbours, at least two each where groups are chosen.
        num_chosen_groups: Groups per token.
        normalises: Whether the chosen sigmoids are scaled to a sum of one.
        factor: Of all weights.
        is_softmax: Whether a softmax over all experts stands for the sigmoids.

    Returns:
        int64 ids [T, k] and fp32 weights [T, k].
    """
    scores = softmax(logits, -1, dtype=torch.float32) if is_softmax else logits.float().sigmoid()
    ranked = scores + bias
    if num_chosen_groups < num_groups:
        by_group = ranked.view(len(ranked), num_groups, -1)
        num_best = 1 if is_softmax else 2
        best = (
            by_group.topk(num_best, dim=-1).values.sum(-1).topk(num_chosen_groups, dim=-1).indices
        )
        is_left = torch.ones_like(by_group[..., 0], dtype=torch.bool).scatter_(1, best, False)
        ranked = by_group.masked_fill(is_left.unsqueeze(-1), -torch.inf).flatten(1)
    ids = ranked.topk(num_chosen, dim=-1).indices
    weights = scores.gather(1, ids)
    if normalises:
        weights = weights / weights.sum(-1, keepdim=True).add_(1e-20)
    return ids, weights * factor


def run_experts(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    run_expert: Callable[[torch.Tensor, int], torch.Tensor],
    experts: GatedExperts | None = None,
) -> torch.Tensor:
    """Sums each token's chosen experts; tokens are grouped by expert.

    Args:
        x: [T, D].
        expert_ids: int64 [T, k].
        weights: fp32 [T, k].
        run_expert: Maps rows [N, D] by the expert of an id to [N, D].
        experts: The same as data, for kernels that run all at once; not used here.

    Returns:
        [T, D].
    """
    del experts
    flat_ids = expert_ids.flatten()
    order = flat_ids.argsort(stable=True)
    tokens = order // expert_ids.shape[1]
    rows = x[tokens]
    segments = find_segments(flat_ids[order].tolist())
    parts = torch.cat([run_expert(rows[first:last], expert) for expert, first, last in segments])
    parts *= weights.flatten()[order].unsqueeze(1).to(x.dtype)
    return torch.zeros_like(x).index_add_(0, tokens, parts)


def gated_mlp(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    activate: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Returns down(activate(gate_up(x))) of rows [N, D]; weights are [2 * M, D] and [D, M]."""
    return strided_linear(activate(strided_linear(x, gate_up)), down)
