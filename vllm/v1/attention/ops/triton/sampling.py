"""Drawing tokens: temperature, min-p, top-k, top-p and one draw, a row of logits a program.

    scaled logits  ->  highest  ->  least kept by min-p and top-k  ->  mass  ->  least kept by top-p
                   ->  mass of what is kept  ->  the token at that share of it

Each filter is a threshold, found bit by bit in the order of the values, as ``select_entries`` finds
its own: nothing is sorted and the host waits for nothing. A row without a filter skips the search.
"""

import torch
import triton
import triton.language as tl

from vllm.v1.attention.ops.triton.indexer import order_of
from vllm.v1.attention.ops.triton.launch import IS_INTERPRETED, launch, power_of_two

_BLOCK = 1 << 16 if IS_INTERPRETED else 4096
_LOWEST = -2147483648
# A draw is put strictly below the total mass, where rounding could put it on it.
_BELOW_ONE = 1.0 - 2.0**-23


@triton.jit
def _load_scaled(logits, first, temperature, vocab_size, BLOCK: tl.constexpr):
    """Returns a block of a row's scaled logits, those behind its end at minus infinity."""
    at = first + tl.arange(0, BLOCK)
    values = tl.load(logits + at, mask=at < vocab_size, other=float("-inf"))
    return values / temperature, at


@triton.jit(do_not_specialize=["num_drawn"])
def _draw_kernel(
    logits,
    rows,
    settings,
    out,
    num_drawn,
    vocab_size,
    row_stride,
    HAS_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    LOWEST: tl.constexpr,
    BELOW_ONE: tl.constexpr,
):
    number = tl.program_id(0)
    row = number
    if HAS_ROWS:
        row = tl.load(rows + number).to(tl.int32)
    own = logits + row.to(tl.int64) * row_stride
    uniform = tl.load(settings + number)
    temperature = tl.load(settings + num_drawn + number)
    min_p = tl.load(settings + 2 * num_drawn + number)
    top_k = tl.load(settings + 3 * num_drawn + number).to(tl.int32)
    top_p = tl.load(settings + 4 * num_drawn + number)

    peaks = tl.full((BLOCK,), float("-inf"), tl.float32)
    for first in range(0, vocab_size, BLOCK):
        scaled, at = _load_scaled(own, first, temperature, vocab_size, BLOCK)
        peaks = tl.maximum(peaks, scaled)
    peak = tl.max(peaks, axis=0)

    # The least value that is kept, and its place in the order of all values.
    floor = float("-inf")
    if min_p > 0.0:
        floor = peak + tl.log(min_p)
    lowest = tl.full((1,), LOWEST, tl.int64)
    if top_k < vocab_size:
        bit = tl.full((1,), -LOWEST, tl.int64)
        for _step in range(32):
            candidate = lowest + bit
            reached = tl.zeros((BLOCK,), tl.int32)
            for first in range(0, vocab_size, BLOCK):
                scaled, at = _load_scaled(own, first, temperature, vocab_size, BLOCK)
                is_reached = (order_of(scaled).to(tl.int64) >= candidate) & (at < vocab_size)
                reached += is_reached.to(tl.int32)
            lowest = tl.where(tl.sum(reached, axis=0) >= top_k, candidate, lowest)
            bit = bit // 2

    if top_p < 1.0:
        masses = tl.zeros((BLOCK,), tl.float32)
        for first in range(0, vocab_size, BLOCK):
            scaled, at = _load_scaled(own, first, temperature, vocab_size, BLOCK)
            is_kept = (scaled >= floor) & (order_of(scaled).to(tl.int64) >= lowest)
            masses += tl.where(is_kept, tl.exp(scaled - peak), 0.0)
        wanted = tl.sum(masses, axis=0) * top_p
        # The highest threshold whose values have the wanted mass, not above what is kept already.
        nucleus = tl.full((1,), LOWEST, tl.int64)
        bit = tl.full((1,), -LOWEST, tl.int64)
        for _step in range(32):
            candidate = nucleus + bit
            masses = tl.zeros((BLOCK,), tl.float32)
            for first in range(0, vocab_size, BLOCK):
                scaled, at = _load_scaled(own, first, temperature, vocab_size, BLOCK)
                order = order_of(scaled).to(tl.int64)
                is_kept = (scaled >= floor) & (order >= lowest) & (order >= candidate)
                masses += tl.where(is_kept, tl.exp(scaled - peak), 0.0)
            nucleus = tl.where(tl.sum(masses, axis=0) >= wanted, candidate, nucleus)
            bit = bit // 2
        lowest = tl.maximum(lowest, nucleus)

    masses = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, vocab_size, BLOCK):
        scaled, at = _load_scaled(own, first, temperature, vocab_size, BLOCK)
        is_kept = (scaled >= floor) & (order_of(scaled).to(tl.int64) >= lowest)
        masses += tl.where(is_kept, tl.exp(scaled - peak), 0.0)
    total = tl.sum(masses, axis=0)
    target = tl.minimum(uniform * total, total * BELOW_ONE)

    # The first token with mass whose cumulative mass exceeds the target. The sum of a block may be
    # rounded below the target although the total is not: then the last token with mass.
    before = 0.0
    token = vocab_size
    last = 0
    for first in range(0, vocab_size, BLOCK):
        scaled, at = _load_scaled(own, first, temperature, vocab_size, BLOCK)
        is_kept = (scaled >= floor) & (order_of(scaled).to(tl.int64) >= lowest)
        mass = tl.where(is_kept, tl.exp(scaled - peak), 0.0)
        cumulative = before + tl.cumsum(mass, 0)
        has_mass = mass > 0.0
        is_past = has_mass & (cumulative > target)
        token = tl.minimum(token, tl.min(tl.where(is_past, at, vocab_size), axis=0))
        last = tl.maximum(last, tl.max(tl.where(has_mass, at, 0), axis=0))
        before += tl.sum(mass, axis=0)
    tl.store(out + number, tl.where(token < vocab_size, token, last).to(tl.int64))


def draw_rows(
    logits: torch.Tensor, rows: torch.Tensor | None, settings: torch.Tensor
) -> torch.Tensor:
    """Draws a token for each of some rows.

    A row without a number gives token 0.

    Args:
        logits: fp32 [R, V].
        rows: int64 [N], or None: all of them in order.
        settings: fp32 [5, N]: uniforms in [0, 1), temperatures, min-p, top-k, top-p; a filter that
            a row does not use keeps all (0, V, 1).

    Returns:
        int64 [N].
    """
    vocab_size, num_drawn = logits.shape[1], settings.shape[1]
    out = torch.empty(num_drawn, dtype=torch.int64, device=logits.device)
    assert logits.stride(1) == 1, "a row's values stand side by side"
    launch(
        _draw_kernel,
        (num_drawn,),
        logits,
        out if rows is None else rows,
        settings,
        out,
        num_drawn,
        vocab_size,
        logits.stride(0),
        HAS_ROWS=rows is not None,
        BLOCK=min(_BLOCK, power_of_two(vocab_size)),
        LOWEST=_LOWEST,
        BELOW_ONE=_BELOW_ONE,
    )
    return out
