"""Attention of grouped queries over pages, prefill and decode in one kernel.

    program (query tile, key head, split)

A tile holds some consecutive queries of one request, each with all its heads over the key head.
Keys of a tile, by position, in blocks that begin at multiples of their length whatever the query:

    | rows in pages: below ``own_from``          | rows of the step itself: from the activations |
      block table -> block id -> row               row_start + position - start

so that a query's sums have one order, in one chunk or many, alone or in a batch. A decode step is
split over its context into a fixed number of parts, whose lengths follow from the request's own
length alone; ``_join_splits_kernel`` joins them in order.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vllm.v1.attention.ops.triton.elementwise import tanh_of
from vllm.v1.attention.ops.triton.launch import (
    IS_INTERPRETED,
    launch,
    multiply,
    power_of_two,
    warps_of,
)

# Rows of a tile: tl.dot takes at least 16.
_MIN_ROWS = 16
_KEYS = 128 if IS_INTERPRETED else 64
# Values of a block of keys, which lie in shared memory beside as many values.
_KEY_VALUES = 1 << 20 if IS_INTERPRETED else 1 << 13
# Parts of a step's one buffer, which begin anywhere in it: without this Triton would compile a
# program for each way in which they happen to begin at multiples of 16 bytes, in the middle of
# serving.
_TABLES = ["tile_requests", "tile_queries", "starts", "counts", "row_starts", "block_ids"]


@dataclass(frozen=True, slots=True)
class PagedRequests:
    """Where the requests of a step are, and where one KV group keeps their rows; all int32.

    Attributes:
        tile_requests, tile_queries: By tile: its request (negative: none) and that request's first
            query in it.
        starts: [R]: position of each request's first token of the step.
        counts: [R]: its tokens of the step.
        row_starts: [R]: its first flat row.
        own_from: [R]: rows from this position on are taken from the activations.
        read_from: [R]: rows below this position are not stored.
        table_starts: [R]: where its block ids begin in ``block_ids``.
        table_bases: [R]: index of the first listed block.
        block_ids: Block ids of all tables.
    """

    tile_requests: torch.Tensor
    tile_queries: torch.Tensor
    starts: torch.Tensor
    counts: torch.Tensor
    row_starts: torch.Tensor
    own_from: torch.Tensor
    read_from: torch.Tensor
    table_starts: torch.Tensor
    table_bases: torch.Tensor
    block_ids: torch.Tensor


@dataclass(frozen=True, slots=True)
class ScorePlan:
    """How scores are made.

    Attributes:
        scale: Of the products.
        soft_cap: Scores are capped by tanh; 0: they are not.
        window: Keys a query sees, its own included; 0: all.
        queries_per_tile: Queries of a tile.
        places_per_tile: Queries that a tile of this step may have, so many of each are kept while a
            context is split; 0: all.
        num_splits: Parts of a context.
        latent_dim: Where a row is one key of all heads, its first values that are their value too;
            0: a row is keys, then values.
    """

    scale: float
    soft_cap: float = 0.0
    window: int = 0
    queries_per_tile: int = 1
    num_splits: int = 1
    latent_dim: int = 0
    places_per_tile: int = 0


@triton.jit(
    do_not_specialize=["num_tiles", "places"],
    do_not_specialize_on_alignment=[
        *_TABLES,
        "own_from",
        "read_from",
        "table_starts",
        "table_bases",
    ],
)
def _attend_pages_kernel(
    queries,
    own,
    cache,
    out,
    log_sums,
    sinks,
    tile_requests,
    tile_queries,
    starts,
    counts,
    row_starts,
    own_from,
    read_from,
    table_starts,
    table_bases,
    block_ids,
    query_stride,
    head_stride,
    own_stride,
    block_stride,
    row_stride,
    num_tiles,
    places,
    scale,
    soft_cap,
    window,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
    VALUES_AT: tl.constexpr,
    PAGE_ROWS: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_ONE_TYPE: tl.constexpr,
):
    GROUP: tl.constexpr = HEADS // KV_HEADS
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    request = tl.load(tile_requests + tile)
    if request >= 0:
        first = tl.load(tile_queries + tile)
        start = tl.load(starts + request)
        count = tl.load(counts + request)
        row_start = tl.load(row_starts + request)
        own_first = tl.load(own_from + request)
        stored_from = tl.load(read_from + request)
        table = tl.load(table_starts + request)
        base = tl.load(table_bases + request)

        index = tl.arange(0, ROWS)
        query = first + index // GROUP
        head = kv_head * GROUP + index % GROUP
        is_query = (index < QUERIES * GROUP) & (query < count)
        position = start + query
        row = (row_start + query).to(tl.int64)
        column = tl.arange(0, BLOCK_WIDTH)
        is_column = column < WIDTH
        query_mask = is_query[:, None] & is_column[None, :]
        source = row * query_stride + head * head_stride
        q = tl.load(queries + source[:, None] + column[None, :], mask=query_mask, other=0.0)
        if TAIL > 0:
            tail = tl.arange(0, BLOCK_TAIL)
            is_tail = tail < TAIL
            tail_mask = is_query[:, None] & is_tail[None, :]
            q_tail = tl.load(
                queries + source[:, None] + WIDTH + tail[None, :], mask=tail_mask, other=0.0
            )

        end = start + tl.minimum(first + QUERIES, count)
        low = stored_from
        if window > 0:
            low = tl.maximum(low, start + first - window + 1)
        low = tl.maximum(low, 0)
        first_block = low // KEYS
        num_blocks = (end + KEYS - 1) // KEYS - first_block
        per_split = (num_blocks + SPLITS - 1) // SPLITS
        key_begin = (first_block + split * per_split) * KEYS
        key_end = tl.minimum((first_block + (split + 1) * per_split) * KEYS, end)

        peak = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        mixed = tl.zeros((ROWS, BLOCK_WIDTH), tl.float32)
        for key in range(key_begin, key_end, KEYS):
            at = key + tl.arange(0, KEYS)
            is_seen = (at >= low) & (at < end)
            is_own = is_seen & (at >= own_first)
            is_paged = is_seen & (at < own_first)
            block = tl.load(block_ids + table + at // PAGE_ROWS - base, mask=is_paged, other=0)
            page = block.to(tl.int64) * block_stride + (at % PAGE_ROWS) * row_stride
            fresh = (row_start + at - start).to(tl.int64) * own_stride
            if TAIL > 0:
                key_at = page[:, None] + WIDTH + tail[None, :]
                own_at = fresh[:, None] + WIDTH + tail[None, :]
                seen = is_paged[:, None] & is_tail[None, :]
                k_tail = tl.load(cache + key_at, mask=seen, other=0.0)
                seen = is_own[:, None] & is_tail[None, :]
                own_tail = tl.load(own + own_at, mask=seen, other=0.0).to(k_tail.dtype)
                k_tail = tl.where(is_own[:, None], own_tail, k_tail).to(q.dtype)
            page = page[:, None] + kv_head * WIDTH + column[None, :]
            fresh = fresh[:, None] + kv_head * WIDTH + column[None, :]
            page_mask = is_paged[:, None] & is_column[None, :]
            own_mask = is_own[:, None] & is_column[None, :]
            if IS_ONE_TYPE:
                # One load from wherever a row is: two would lie in shared memory side by side,
                # which smaller cards do not have.
                there = is_seen[:, None] & is_column[None, :]
                source_rows = tl.where(is_own[:, None], own + fresh, cache + page)
                k = tl.load(source_rows, mask=there, other=0.0).to(q.dtype)
            else:
                k = tl.load(cache + page, mask=page_mask, other=0.0)
                k_own = tl.load(own + fresh, mask=own_mask, other=0.0).to(k.dtype)
                k = tl.where(is_own[:, None], k_own, k).to(q.dtype)
            scores = multiply(q, tl.trans(k))
            if TAIL > 0:
                scores += multiply(q_tail, tl.trans(k_tail))
            scores = scores * scale
            if HAS_CAP:
                scores = tanh_of(scores / soft_cap) * soft_cap
            is_visible = is_seen[None, :] & (at[None, :] <= position[:, None])
            if window > 0:
                is_visible = is_visible & (at[None, :] > position[:, None] - window)
            scores = tl.where(is_visible, scores, float("-inf"))
            highest = tl.maximum(peak, tl.max(scores, axis=1))
            # A row that sees nothing yet keeps -inf: its weights must be 0, not NaN.
            anchor = tl.where(highest == float("-inf"), 0.0, highest)
            weights = tl.exp(scores - anchor[:, None])
            fade = tl.exp(peak - anchor)
            total = total * fade + tl.sum(weights, axis=1)
            if VALUES_AT > 0:
                if IS_ONE_TYPE:
                    v = tl.load(source_rows + VALUES_AT, mask=there, other=0.0).to(q.dtype)
                else:
                    v = tl.load(cache + page + VALUES_AT, mask=page_mask, other=0.0)
                    v_own = tl.load(own + fresh + VALUES_AT, mask=own_mask, other=0.0).to(v.dtype)
                    v = tl.where(is_own[:, None], v_own, v).to(q.dtype)
            else:
                v = k
            mixed = mixed * fade[:, None]
            mixed += multiply(weights.to(q.dtype), v)
            peak = highest

        anchor = tl.where(peak == float("-inf"), 0.0, peak)
        log_sum = tl.where(total > 0.0, anchor + tl.log(tl.where(total > 0.0, total, 1.0)), peak)
        if HAS_SINKS:
            if SPLITS == 1:
                sink = tl.load(sinks + head, mask=is_query, other=0.0)
                highest = tl.maximum(peak, sink)
                fade = tl.exp(peak - highest)
                total = total * fade + tl.exp(sink - highest)
                mixed = mixed * fade[:, None]
        mixed = mixed / tl.where(total > 0.0, total, 1.0)[:, None]
        place = row
        if SPLITS > 1:
            place = (split * num_tiles + tile).to(tl.int64) * places + index // GROUP
        target = place * HEADS + head
        tl.store(
            out + target[:, None] * WIDTH + column[None, :],
            mixed.to(out.dtype.element_ty),
            mask=query_mask,
        )
        tl.store(log_sums + target, log_sum, mask=is_query)


@triton.jit(do_not_specialize=["num_tiles", "places"], do_not_specialize_on_alignment=_TABLES)
def _join_splits_kernel(
    parts,
    part_sums,
    sinks,
    out,
    log_sums,
    tile_requests,
    tile_queries,
    counts,
    row_starts,
    num_tiles,
    places,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    place = tl.program_id(0)
    tile = place // places
    request = tl.load(tile_requests + tile)
    query = tl.load(tile_queries + tile) + place % places
    # A request's last tile may lack queries.
    count = tl.load(counts + tl.maximum(request, 0))
    if (request >= 0) & (query < count):
        row = (tl.load(row_starts + request) + query).to(tl.int64)
        head = tl.arange(0, BLOCK_HEADS)
        column = tl.arange(0, BLOCK_WIDTH)
        is_head = head < HEADS
        mask = is_head[:, None] & (column < WIDTH)[None, :]
        peak = tl.full((BLOCK_HEADS,), float("-inf"), tl.float32)
        for split in range(SPLITS):
            source = (split * num_tiles + tile).to(tl.int64) * places + place % places
            source = source * HEADS + head
            peak = tl.maximum(peak, tl.load(part_sums + source, mask=is_head, other=0.0))
        anchor = tl.where(peak == float("-inf"), 0.0, peak)
        total = tl.zeros((BLOCK_HEADS,), tl.float32)
        mixed = tl.zeros((BLOCK_HEADS, BLOCK_WIDTH), tl.float32)
        for split in range(SPLITS):
            source = (split * num_tiles + tile).to(tl.int64) * places + place % places
            source = source * HEADS + head
            weight = tl.exp(tl.load(part_sums + source, mask=is_head, other=0.0) - anchor)
            part = tl.load(parts + source[:, None] * WIDTH + column[None, :], mask=mask, other=0.0)
            mixed += weight[:, None] * part
            total += weight
        log_sum = tl.where(total > 0.0, anchor + tl.log(tl.where(total > 0.0, total, 1.0)), peak)
        if HAS_SINKS:
            sink = tl.load(sinks + head, mask=is_head, other=0.0)
            highest = tl.maximum(peak, sink)
            fade = tl.exp(anchor - highest)
            total = total * fade + tl.exp(sink - highest)
            mixed = mixed * fade[:, None]
        mixed = mixed / tl.where(total > 0.0, total, 1.0)[:, None]
        target = row * HEADS + head
        tl.store(
            out + target[:, None] * WIDTH + column[None, :],
            mixed.to(out.dtype.element_ty),
            mask=mask,
        )
        tl.store(log_sums + target, log_sum, mask=is_head)


def attend_pages(
    queries: torch.Tensor,
    own: torch.Tensor,
    cache: torch.Tensor,
    requests: PagedRequests,
    plan: ScorePlan,
    sinks: torch.Tensor | None,
    into: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attends the rows of a step to pages and to each other.

    Args:
        queries: [T, H, d].
        own: The step's rows [T, 2 * K * d]: keys of K heads, then their values; with latents
            [T, d]. They count as the cache's type would keep them.
        cache: [num_blocks, rows_per_block, 2 * K * d], or d likewise.
        requests: Which rows belong together, and their block tables.
        plan: Scale, caps, window, tiles.
        sinks: fp32 [H]: scores without a value, or None.
        into: Where the results go; None: new tensors.

    Returns:
        [T, H, d], with latents [T, H, latent_dim], and the log-sum-exp of each query's scores
        without sinks, fp32 [T, H]. Rows of no tile are left undefined; a query that sees nothing
        gets zeros and -inf.
    """
    num_rows, heads, width = queries.shape
    kv_heads, tail = cache.shape[2] // (2 * width), 0
    if plan.latent_dim:
        kv_heads, width, tail = 1, plan.latent_dim, width - plan.latent_dim
    group = heads // kv_heads
    splits = plan.num_splits
    tile_rows = max(_MIN_ROWS, power_of_two(plan.queries_per_tile * group))
    if into is None:
        into = (
            torch.empty((num_rows, heads, width), dtype=queries.dtype, device=queries.device),
            torch.empty((num_rows, heads), dtype=torch.float32, device=queries.device),
        )
    out, log_sums = into
    parts, part_sums = into
    num_tiles = len(requests.tile_requests)
    places = plan.places_per_tile or plan.queries_per_tile
    num_places = num_tiles * places
    if splits > 1:
        parts = out.new_empty((splits, num_places, heads, width), dtype=torch.float32)
        part_sums = log_sums.new_empty((splits, num_places, heads))
    assert queries.stride(2) == 1, "a head's values stand side by side"
    assert own.stride(1) == 1, "a row's values stand side by side"
    launch(
        _attend_pages_kernel,
        (num_tiles, kv_heads, splits),
        queries,
        own,
        cache,
        parts,
        part_sums,
        log_sums if sinks is None else sinks,
        requests.tile_requests,
        requests.tile_queries,
        requests.starts,
        requests.counts,
        requests.row_starts,
        requests.own_from,
        requests.read_from,
        requests.table_starts,
        requests.table_bases,
        requests.block_ids,
        queries.stride(0),
        queries.stride(1),
        own.stride(0),
        cache.stride(0),
        cache.stride(1),
        num_tiles,
        places,
        plan.scale,
        plan.soft_cap or 1.0,
        plan.window,
        HEADS=heads,
        KV_HEADS=kv_heads,
        WIDTH=width,
        BLOCK_WIDTH=max(16, power_of_two(width)),
        TAIL=tail,
        BLOCK_TAIL=max(16, power_of_two(tail)),
        VALUES_AT=0 if plan.latent_dim else kv_heads * width,
        PAGE_ROWS=cache.shape[1],
        QUERIES=plan.queries_per_tile,
        ROWS=tile_rows,
        KEYS=max(_MIN_ROWS, min(_KEYS, _KEY_VALUES // power_of_two(width))),
        SPLITS=splits,
        HAS_CAP=plan.soft_cap != 0,
        HAS_SINKS=sinks is not None,
        IS_ONE_TYPE=own.dtype == cache.dtype,
        num_warps=warps_of(tile_rows * power_of_two(width)),
    )
    if splits > 1:
        launch(
            _join_splits_kernel,
            (num_places,),
            parts,
            part_sums,
            log_sums if sinks is None else sinks,
            out,
            log_sums,
            requests.tile_requests,
            requests.tile_queries,
            requests.counts,
            requests.row_starts,
            num_tiles,
            places,
            HEADS=heads,
            WIDTH=width,
            BLOCK_WIDTH=power_of_two(width),
            BLOCK_HEADS=power_of_two(heads),
            SPLITS=splits,
            HAS_SINKS=sinks is not None,
            num_warps=warps_of(power_of_two(heads) * power_of_two(width)),
        )
    return out, log_sums
