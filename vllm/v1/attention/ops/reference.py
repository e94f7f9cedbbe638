"""Every op of the forward pass in plain torch: the CPU path, and the oracle of faster kernels.

Maths is fp32 wherever the architecture's references use fp32 (hyper-connections, router,
compressor, softmax), whatever the type of the activations. Names are listed in ``registry``.
"""

from collections.abc import Callable

import torch
from torch.nn.functional import linear as torch_linear
from torch.nn.functional import silu, softplus

from vllm.utils.cpu_vendor import find_cpu_vendor
from vllm.v1.attention.ops.narrow_linear import is_native, widened_linear

# Scores of one block of queries stay below this many values (2 MiB of fp32): they stay in the
# cache (up to twice as fast as 64 MiB), and a long chunk costs time but not memory.
_MAX_SCORE_VALUES = 1 << 19


# With few rows, weight @ x^T beats x @ weight^T on a CPU that MKL was not tuned for (AMD EPYC,
# AVX-512, cold weights of 4096 x 384: 0.32 against 0.71 ms at one row, 0.88 against 1.15 at eight);
# narrow outputs do not gain. On an Intel one it loses (Xeon, AVX-512, same weights: 1.30 against
# 0.45 ms at one row, 1.37 against 1.36 at eight).
_HAS_TUNED_PRODUCTS = find_cpu_vendor() == "GenuineIntel"
_MAX_FEW_ROWS = 8
# With 4 to 16 fp32 rows it wins there too (cold weights, 1024 -> 6144, one thread: 3.24 against
# 3.51 ms at four rows, 3.27 against 8.17 at eight, 3.41 against 8.33 at sixteen).
_TUNED_COLUMN_ROWS = range(4, 17)
_MIN_WIDE_OUTPUT = 64


# Maps rows by one matrix of an expert.
ExpertProduct = Callable[[torch.Tensor, int], torch.Tensor]


_LARGEST_HALF = torch.finfo(torch.float16).max

# -- products, norms and rotary embedding -----------------------------------------------------


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Maps [T, in] to contiguous [T, out] by ``weight`` [out, in]."""
    return strided_linear(x, weight).contiguous()


def strided_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``linear``, its result strided."""
    if x.device.type == "cpu" and not is_native(weight.dtype, x.shape[0]):
        return widened_linear(x, weight).to(x.dtype)
    if _HAS_TUNED_PRODUCTS:
        is_few = x.shape[0] in _TUNED_COLUMN_ROWS and weight.dtype == torch.float32
    else:
        is_few = 0 < x.shape[0] <= _MAX_FEW_ROWS
    if not is_few or weight.shape[0] < _MIN_WIDE_OUTPUT or x.device.type != "cpu":
        return torch_linear(x, weight)
    return linear_by_columns(x, weight)


def linear_by_columns(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``linear`` as weight @ x^T, its result strided."""
    num_rows = x.shape[0]
    # One row is doubled: a matrix-vector product is slower than a product with two columns.
    columns = x.expand(2, -1).contiguous() if num_rows == 1 else x
    return torch.mm(weight, columns.t()).t()[:num_rows]


def grouped_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Maps slices of the input by a matrix each: [T, g, in] by [g, out, in] to [T, g, out]."""
    if x.shape[0] == 1 and x.device.type == "cpu" and not _HAS_TUNED_PRODUCTS:
        return grouped_linear_by_columns(x, weight)
    return torch.bmm(x.transpose(0, 1), weight.mT).transpose(0, 1)


def grouped_linear_by_columns(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``grouped_linear`` of one row as weight @ x^T."""
    columns = x.transpose(0, 1).expand(-1, 2, -1).contiguous()
    return torch.bmm(weight, columns.mT)[:, :, 0].unsqueeze(0)


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Scales the last axis to unit root mean square, then by ``weight`` if given."""
    wide = x.float()
    normed = wide * inverse_rms(wide, eps)
    if weight is not None:
        normed *= weight
    return normed.to(x.dtype)


def inverse_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Returns 1 / root mean square of the last axis, [..., 1].

    The norm kernel reads the input once, ``square().mean()`` thrice.
    """
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    inverse: torch.Tensor = norm.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
    return inverse


def rotate_(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Turns the interleaved pairs at the end of the last axis.

    Args:
        x: [..., d]; its last 2 * P values are pairs.
        turns: Unit complex numbers, broadcastable to [..., P]; their conjugates undo them.

    Mutates:
        x, which is also returned.
    """
    tail = x[..., x.shape[-1] - 2 * turns.shape[-1] :]
    pairs = tail.view(*tail.shape[:-1], turns.shape[-1], 2)
    if x.dtype == torch.float32:
        torch.view_as_complex(pairs).mul_(turns)
    else:
        turned = torch.view_as_complex(pairs.float().contiguous()) * turns
        tail.copy_(torch.view_as_real(turned).flatten(-2))
    return x


# -- hyper-connections ------------------------------------------------------------------------


def hc_project(
    streams: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, eps: float
) -> torch.Tensor:
    """Projects the normed, flattened streams.

    Args:
        streams: [T, n, D].
        fn: fp32 [m, n * D].
        scale, base: fp32 [m].
        eps: Of the weight-less norm over n * D.

    Returns:
        fp32 [T, m].
    """
    flat = streams.flatten(1).float()
    # The norm is one factor per token, so it may come after the product.
    projected = torch_linear(flat, fn).mul_(inverse_rms(flat, eps))
    return torch.addcmul(base, projected, scale)


def sinkhorn(
    logits: torch.Tensor,
    num_iterations: int,
    eps: float,
    row_sums: torch.Tensor,
    column_sums: torch.Tensor,
) -> torch.Tensor:
    """Makes positive matrices nearly doubly stochastic; the last pass is over columns.

    Each sum is one small product with a constant matrix, much faster than a reduction over axes
    of four; the product adds eps too, through a column of ones.

    Args:
        logits: fp32 [T, n, n].
        num_iterations: Column passes; row passes are one fewer.
        eps: Added to the row softmax and to every sum.
        row_sums, column_sums: fp32 [n * n + 1, n * n], see ``sinkhorn_sums``.

    Returns:
        fp32 [T, n, n].
    """
    num_tokens, size = logits.shape[0], column_sums.shape[1]
    padded = logits.new_ones((num_tokens, size + 1))
    matrix = padded[:, :size]
    torch.add(torch.softmax(logits, -1).flatten(1), eps, out=matrix)
    sums = torch.mm(padded, column_sums)
    matrix.div_(sums)
    for _ in range(num_iterations - 1):
        matrix.div_(torch.mm(padded, row_sums, out=sums))
        matrix.div_(torch.mm(padded, column_sums, out=sums))
    return matrix.view(logits.shape)


def sinkhorn_sums(size: int, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the constant matrices of ``sinkhorn`` for n = ``size``.

    Times a flattened matrix with a one appended, they replace each value by the sum of its row
    (or column) plus eps: 0/1 matrices over a last row of eps.
    """
    ones, eye = torch.ones(size, size), torch.eye(size)
    eps_row = torch.full((1, size * size), eps)
    rows, columns = torch.kron(eye, ones), torch.kron(ones, eye)
    return torch.cat([rows, eps_row]), torch.cat([columns, eps_row])


def hc_collapse(streams: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weighted sum of the streams: [T, n, D] with fp32 [T, n] gives [T, D]."""
    mixed = torch.bmm(weights.unsqueeze(1), streams.float())
    return mixed.squeeze(1).to(streams.dtype)


def hc_expand(
    output: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, mix: torch.Tensor
) -> torch.Tensor:
    """Adds a sublayer's output to the mixed streams: X'_j = post_j o + sum_i mix_ij X_i.

    Args:
        output: [T, D].
        streams: [T, n, D].
        post: fp32 [T, n].
        mix: fp32 [T, n, n]; the sum is over its first stream axis.

    Returns:
        [T, n, D] in the streams' type.
    """
    added = output.float().unsqueeze(1) * post.unsqueeze(2)
    return torch.baddbmm(added, mix.mT, streams.float()).to(streams.dtype)


# -- paged caches -----------------------------------------------------------------------------


def write_rows(
    cache: torch.Tensor, blocks: torch.Tensor, rows: torch.Tensor, values: torch.Tensor
) -> None:
    """Stores values [N, width] at ``cache[blocks, rows]``; addresses are distinct.

    Mutates:
        cache [num_blocks, rows_per_block, width].
    """
    step = _rows_between_blocks(cache)
    if step:
        index = torch.add(rows, blocks, alpha=step)
        _as_rows(cache, step).index_copy_(0, index, _narrow(values, cache.dtype))
    else:
        cache[blocks, rows] = _narrow(values, cache.dtype)


def read_rows(
    cache: torch.Tensor, blocks: torch.Tensor, rows: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Returns ``cache[blocks, rows]`` as [*blocks.shape, width] in ``dtype``."""
    step = _rows_between_blocks(cache)
    if not step:
        return cache[blocks, rows].to(dtype)
    index = torch.add(rows, blocks, alpha=step).flatten()
    values = _as_rows(cache, step).index_select(0, index)
    return values.view(*blocks.shape, cache.shape[2]).to(dtype)


def round_rows(cache: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Returns values [N, width] as reading them back from ``cache`` would give them."""
    if cache.dtype == values.dtype:
        return values
    return _narrow(values, cache.dtype).to(values.dtype)


def _narrow(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns values as a cache of a type keeps them: beyond the largest fp16, that one."""
    if dtype is torch.float16 and values.dtype is not torch.float16:
        values = values.clamp(-_LARGEST_HALF, _LARGEST_HALF)
    return values.to(dtype)


def _rows_between_blocks(cache: torch.Tensor) -> int:
    """Returns the distance of two blocks in rows, or 0 when it is no whole number of them.

    Where it is one (also in most packed pools), rows have one index, and copying whole rows by it
    is ten times as fast as indexing by two tensors.
    """
    block_stride, row_stride, _ = cache.stride()
    width = cache.shape[2]
    return 0 if row_stride != width or block_stride % width else block_stride // width


def _as_rows(cache: torch.Tensor, step: int) -> torch.Tensor:
    num_blocks, rows_per_block, width = cache.shape
    return cache.as_strided(((num_blocks - 1) * step + rows_per_block, width), (width, 1))


# -- compressor -------------------------------------------------------------------------------


def compress_windows(
    current: torch.Tensor,
    previous: torch.Tensor | None,
    no_previous: torch.Tensor | None,
) -> torch.Tensor:
    """Reduces each window's rows to one entry: a softmax over rows, per channel.

    A row holds c and s side by side. Without overlap both are d wide; with overlap both are 2d
    wide, and the window before contributes its first halves, the current one its second halves.

    Args:
        current: fp32 [N, ratio, 2 * d], or [N, ratio, 4 * d] with overlap.
        previous: fp32 [N, ratio, 4 * d], or None without overlap.
        no_previous: bool [N, 1, 1]: the window before does not exist; None = always exists.

    Returns:
        fp32 [N, d], not yet normed.
    """
    if previous is None:
        values, scores = current.chunk(2, dim=-1)
    else:
        _, own_values, _, own_scores = current.chunk(4, dim=-1)
        old_values, _, old_scores, _ = previous.chunk(4, dim=-1)
        if no_previous is not None:
            old_scores = old_scores.masked_fill(no_previous, float("-inf"))
        values = torch.cat([old_values, own_values], dim=1)
        scores = torch.cat([old_scores, own_scores], dim=1)
    return torch.softmax(scores, dim=1).mul_(values).sum(dim=1)


# -- lightning indexer ------------------------------------------------------------------------


def index_scores(
    queries: torch.Tensor, keys: torch.Tensor, head_weights: torch.Tensor
) -> torch.Tensor:
    """Scores entries: sum over heads of weight * relu(query . key).

    Args:
        queries: [B, Q, H, d].
        keys: [B, K, d].
        head_weights: [B, Q, H], constants folded in; may be negative.

    Returns:
        fp32 [B, Q, K].
    """
    num_batches, num_queries, num_heads, _ = queries.shape
    num_keys = keys.shape[1]
    scores = queries.new_empty((num_batches, num_queries, num_keys), dtype=torch.float32)
    step = max(1, _MAX_SCORE_VALUES // max(1, num_batches * num_heads * num_keys))
    for first in range(0, num_queries, step):
        part = slice(first, first + step)
        products = torch.bmm(queries[:, part].flatten(1, 2), keys.mT).relu_()
        products = products.view(num_batches, -1, num_heads, num_keys)
        scores[:, part] = torch.matmul(head_weights[:, part].unsqueeze(2), products).squeeze(2)
    return scores


def select_entries(scores: torch.Tensor, num_selected: int) -> torch.Tensor:
    """Marks the highest scores of each row; among equal ones the earliest entries win.

    The rule does not depend on the row's neighbours or length, which ``torch.topk`` leaves open.

    Args:
        scores: [..., K], -inf for entries that may not be chosen; K >= num_selected.
        num_selected: Entries to mark per row.

    Returns:
        bool [..., K], exactly ``num_selected`` True per row.
    """
    threshold = scores.topk(num_selected, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    is_above = scores > threshold
    is_equal = scores == threshold
    num_missing = num_selected - is_above.sum(-1, keepdim=True)
    return is_above | (is_equal & (is_equal.cumsum(-1) <= num_missing))


def list_entries(chosen: torch.Tensor, num_selected: int) -> torch.Tensor:
    """Lists what ``select_entries`` marked.

    Args:
        chosen: bool [..., K], exactly ``num_selected`` True per row.
        num_selected: Entries marked per row.

    Returns:
        int64 [..., num_selected]: their places, ascending.
    """
    return chosen.nonzero()[:, -1].view(*chosen.shape[:-1], num_selected)


# -- attention --------------------------------------------------------------------------------


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor,
) -> torch.Tensor:
    """Attention of many heads over one shared key, which is the value too.

    Args:
        queries: [B, Q, H, d], already scaled.
        keys: [B, 1 + L, d]; key 0 is zero and stands for the sink.
        mask: fp32 [B, Q, 1, M], 0 or -inf, for the last M <= L keys; None when all are seen.
        sinks: fp32 [H]: each head's logit in the softmax denominator.

    Returns:
        [B, Q, H, d].
    """
    num_batches, num_queries, num_heads, width = queries.shape
    num_keys = keys.shape[1]
    keys_t = keys.mT
    output = torch.empty_like(queries)
    step = max(1, _MAX_SCORE_VALUES // max(1, num_batches * num_heads * num_keys))
    for first in range(0, num_queries, step):
        part = slice(first, first + step)
        scores = torch.bmm(queries[:, part].flatten(1, 2), keys_t).float()
        scores = scores.view(num_batches, -1, num_heads, num_keys)
        scores[..., 0] = sinks
        if mask is not None:
            scores[..., num_keys - mask.shape[-1] :] += mask[:, part]
        weights = torch.softmax(scores, -1).to(keys.dtype).flatten(1, 2)
        mixed = torch.bmm(weights, keys)
        if step >= num_queries:
            return mixed.view(num_batches, num_queries, num_heads, width)
        output[:, part] = mixed.view(num_batches, -1, num_heads, width)
    return output


# -- experts ----------------------------------------------------------------------------------


def router_scores(logits: torch.Tensor) -> torch.Tensor:
    """Returns sqrt(softplus(logits)), fp32."""
    return softplus(logits.float()).sqrt()


def choose_experts(scores: torch.Tensor, bias: torch.Tensor, num_chosen: int) -> torch.Tensor:
    """Returns the ids [T, num_chosen] of the highest scores + bias."""
    return (scores + bias).topk(num_chosen, dim=-1, sorted=False).indices


def expert_weights(scores: torch.Tensor, expert_ids: torch.Tensor, factor: float) -> torch.Tensor:
    """Returns the chosen scores [T, k], normalised to the sum ``factor``."""
    chosen = scores.gather(1, expert_ids)
    return chosen.mul_(factor / chosen.sum(-1, keepdim=True).add_(1e-20))


def clamped_swiglu_(gate_up: torch.Tensor, limit: float) -> torch.Tensor:
    """Returns silu(min(gate, limit)) * clamp(up, -limit, limit) of [N, gate | up].

    Mutates:
        gate_up.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate.clamp_(max=limit)).mul_(up.clamp_(-limit, limit))


def mix_experts(
    x: torch.Tensor,
    gate_up_weights: torch.Tensor,
    down_weights: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    limit: float,
) -> torch.Tensor:
    """Sums each token's chosen experts, and the shared expert, which stands last in the stacks.

    Args:
        x: [T, D].
        gate_up_weights: [E + 1, 2 * M, D], gate rows first.
        down_weights: [E + 1, D, M].
        expert_ids: int64 [T, k].
        weights: fp32 [T, k].
        limit: Clamp of gate and up.

    Returns:
        [T, D].
    """
    return mix_expert_products(
        x,
        lambda rows, expert: strided_linear(rows, gate_up_weights[expert]),
        lambda rows, expert: strided_linear(rows, down_weights[expert]),
        gate_up_weights.shape[0] - 1,
        expert_ids,
        weights,
        limit,
    )


def mix_expert_products(
    x: torch.Tensor,
    map_up: ExpertProduct,
    map_down: ExpertProduct,
    shared: int,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    limit: float,
) -> torch.Tensor:
    """``mix_experts`` by products of any kind.

    Tokens are grouped by expert, so that each chosen expert costs two matrix products whatever
    the batch.

    Args:
        x: [T, D].
        map_up: Maps rows [n, D] by an expert's gate and up matrices to [n, 2 * M], gate first.
        map_down: Maps rows [n, M] by an expert's down matrix to [n, D].
        shared: Number of the shared expert.
        expert_ids: int64 [T, k].
        weights: fp32 [T, k].
        limit: Clamp of gate and up.

    Returns:
        [T, D].
    """
    num_chosen = expert_ids.shape[1]
    flat_ids = expert_ids.flatten()
    order = flat_ids.argsort(stable=True)
    tokens = order // num_chosen
    rows = x[tokens]
    num_pairs = order.shape[0]
    segments = find_segments(flat_ids[order].tolist())
    hidden = torch.cat(
        [map_up(rows[first:last], expert) for expert, first, last in segments] + [map_up(x, shared)]
    )
    hidden = clamped_swiglu_(hidden, limit)
    # Scaling before the second product is the same sum and touches fewer values.
    hidden[:num_pairs] *= weights.flatten()[order].unsqueeze(1).to(x.dtype)
    parts = torch.cat([map_down(hidden[first:last], expert) for expert, first, last in segments])
    output = map_down(hidden[num_pairs:], shared).contiguous()
    return output.index_add_(0, tokens, parts)


def find_segments(sorted_ids: list[int]) -> list[tuple[int, int, int]]:
    """Returns (id, first, last) of each run of equal ids."""
    segments = []
    first = 0
    for index in range(1, len(sorted_ids) + 1):
        if index == len(sorted_ids) or sorted_ids[index] != sorted_ids[first]:
            segments.append((sorted_ids[first], first, index))
            first = index
    return segments
