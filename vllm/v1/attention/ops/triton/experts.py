"""Routers and experts without a word from the host: what was chosen stays on the device."""

import torch
import triton
import triton.language as tl

from vllm.v1.attention.ops.stored import GatedExperts, StoredStack
from vllm.v1.attention.ops.triton.elementwise import clamped_silu_and_mul
from vllm.v1.attention.ops.triton.launch import divide_up, launch, power_of_two, rows_per_program
from vllm.v1.attention.ops.triton.routing import choose_rows_per_block, route
from vllm.v1.attention.ops.triton.stored_products import map_pairs

# -- routers ----------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["num_rows"])
def _choose_kernel(
    scores,
    bias,
    ids,
    weights,
    num_rows,
    CHOSEN: tl.constexpr,
    BLOCK_CHOSEN: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_SOFTMAX: tl.constexpr,
    IS_NORMALISED: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, BLOCK)
    is_row = row < num_rows
    is_expert = expert < EXPERTS
    mask = is_row[:, None] & is_expert[None, :]
    cell = row[:, None] * EXPERTS + expert[None, :]
    values = tl.load(scores + cell, mask=mask, other=float("-inf")).to(tl.float32)
    if IS_SOFTMAX:
        peak = tl.max(values, axis=1)
        peak = tl.where(is_row, peak, 0.0)
        values = tl.exp(values - peak[:, None])
        total = tl.sum(values, axis=1)
        values = values / tl.where(is_row, total, 1.0)[:, None]
    ranks = values
    if HAS_BIAS:
        ranks = ranks + tl.load(bias + expert, mask=is_expert, other=0.0)[None, :]
    ranks = tl.where(is_expert[None, :], ranks, float("-inf"))
    place = tl.arange(0, BLOCK_CHOSEN)
    kept = tl.zeros((ROWS, BLOCK_CHOSEN), tl.float32)
    kept_ids = tl.zeros((ROWS, BLOCK_CHOSEN), tl.int64)
    for index in range(CHOSEN):
        # Of equal ones the first.
        best = tl.argmax(ranks, axis=1, tie_break_left=True)
        # Scores that are no numbers must not choose what does not exist.
        best = tl.minimum(best, EXPERTS - 1)
        is_best = expert[None, :] == best[:, None]
        value = tl.sum(tl.where(is_best, values, 0.0), axis=1)
        kept = tl.where((place == index)[None, :], value[:, None], kept)
        kept_ids = tl.where((place == index)[None, :], best.to(tl.int64)[:, None], kept_ids)
        ranks = tl.where(is_best, float("-inf"), ranks)
    if IS_NORMALISED:
        total = tl.sum(kept, axis=1)
        kept = kept / tl.where(is_row, total, 1.0)[:, None]
    target = row[:, None] * CHOSEN + place[None, :]
    target_mask = is_row[:, None] & (place < CHOSEN)[None, :]
    tl.store(ids + target, kept_ids, mask=target_mask)
    tl.store(weights + target, kept, mask=target_mask)


def _choose(
    scores: torch.Tensor,
    bias: torch.Tensor | None,
    num_chosen: int,
    *,
    is_softmax: bool,
    is_normalised: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows, num_experts = scores.shape
    scores = scores.contiguous()
    ids = torch.empty((num_rows, num_chosen), dtype=torch.int64, device=scores.device)
    weights = torch.empty((num_rows, num_chosen), dtype=torch.float32, device=scores.device)
    block = power_of_two(num_experts)
    rows = min(64, rows_per_program(block))
    launch(
        _choose_kernel,
        (divide_up(num_rows, rows),),
        scores,
        scores if bias is None else bias,
        ids,
        weights,
        num_rows,
        CHOSEN=num_chosen,
        BLOCK_CHOSEN=power_of_two(num_chosen),
        EXPERTS=num_experts,
        BLOCK=block,
        ROWS=rows,
        HAS_BIAS=bias is not None,
        IS_SOFTMAX=is_softmax,
        IS_NORMALISED=is_normalised,
    )
    return ids, weights


def choose_by_softmax(
    logits: torch.Tensor, num_chosen: int, normalises: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``decoder.choose_by_softmax``; of equally probable experts the first is chosen."""
    return _choose(logits, None, num_chosen, is_softmax=True, is_normalised=normalises)


def choose_experts(scores: torch.Tensor, bias: torch.Tensor, num_chosen: int) -> torch.Tensor:
    """See ``reference.choose_experts``; of equal ones the first is chosen."""
    return _choose(scores, bias, num_chosen, is_softmax=False, is_normalised=False)[0]


@triton.jit
def _router_scores_kernel(logits, out, size, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < size
    x = tl.load(logits + index, mask=mask, other=0.0).to(tl.float32)
    # log1p by its series where 1 + y would round y away.
    y = tl.exp(-tl.abs(x))
    tail = tl.where(y < 1e-3, y * (1.0 - y * (0.5 - y * 0.3333333333333333)), tl.log(1.0 + y))
    soft = tl.maximum(x, 0.0) + tail
    tl.store(out + index, tl.sqrt(soft), mask=mask)


def router_scores(logits: torch.Tensor) -> torch.Tensor:
    """See ``reference.router_scores``."""
    logits = logits.contiguous()
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    block = rows_per_program(1)
    launch(
        _router_scores_kernel,
        (divide_up(logits.numel(), block),),
        logits,
        out,
        logits.numel(),
        BLOCK=block,
    )
    return out


# -- experts ----------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["num_rows"])
def _weigh_kernel(
    parts,
    weights,
    out,
    num_rows,
    CHOSEN: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_row = row < num_rows
    mask = is_row[:, None] & (column < WIDTH)[None, :]
    sums = tl.zeros((ROWS, BLOCK), tl.float32)
    for index in range(CHOSEN):
        pair = (row * CHOSEN + index).to(tl.int64)
        weight = tl.load(weights + pair, mask=is_row, other=0.0)
        part = tl.load(parts + pair[:, None] * WIDTH + column[None, :], mask=mask, other=0.0)
        sums += weight[:, None] * part.to(tl.float32)
    target = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    tl.store(out + target, sums.to(out.dtype.element_ty), mask=mask)


def mix_gated_experts(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    experts: GatedExperts,
    *,
    is_invariant: bool = True,
) -> torch.Tensor:
    """Sums each token's chosen experts in the order they were chosen in.

    Args:
        x: [T, D].
        expert_ids: [T, k], below E.
        weights: fp32 [T, k].
        experts: The layer's.
        is_invariant: Whether a row's bits must not depend on the batch.

    Returns:
        [T, D].
    """
    num_rows, width = x.shape
    num_experts, num_chosen = experts.gate_up.num_matrices, expert_ids.shape[1]
    rows = choose_rows_per_block(num_rows * num_chosen, num_experts, is_invariant=is_invariant)
    routing = route(expert_ids, num_experts, rows)
    hidden = map_pairs(x, experts.gate_up, routing, experts.gate_up_bias, is_gather=True)
    parts = map_pairs(
        experts.activate(hidden), experts.down, routing, experts.down_bias, is_gather=False
    )
    out = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    block = min(1024, power_of_two(width))
    per_program = rows_per_program(block)
    launch(
        _weigh_kernel,
        (divide_up(num_rows, per_program), divide_up(width, block)),
        parts,
        weights.contiguous(),
        out,
        num_rows,
        CHOSEN=num_chosen,
        WIDTH=width,
        BLOCK=block,
        ROWS=per_program,
    )
    return out


def mix_experts(
    x: torch.Tensor,
    gate_up_weights: torch.Tensor,
    down_weights: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    limit: float,
    *,
    is_invariant: bool = True,
) -> torch.Tensor:
    """See ``reference.mix_experts``: the shared expert is one more choice of every token."""
    shared = gate_up_weights.shape[0] - 1
    ids = torch.nn.functional.pad(expert_ids, (0, 1), value=shared)
    factors = torch.nn.functional.pad(weights, (0, 1), value=1.0)
    experts = GatedExperts(
        StoredStack.plain(gate_up_weights),
        StoredStack.plain(down_weights),
        lambda hidden: clamped_silu_and_mul(hidden, limit),
    )
    return mix_gated_experts(x, ids, factors, experts, is_invariant=is_invariant)
