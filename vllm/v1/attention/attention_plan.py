"""Masks of one step, per kind of layer: a window length with a compress ratio."""

import numpy as np
import torch

from vllm.utils.uploads import upload
from vllm.v1.attention.layout import CacheLayout
from vllm.v1.attention.step_batch import MAX_DECODE_QUERIES, StepBatch
from vllm.v1.attention.step_rules import count_entries, sees_entry, sees_row
from vllm.v1.attention.step_tables import AttentionPlan, Chunk, QueryTile

_TILE_QUERIES = 256


def build_attention_plans(
    batch: StepBatch, layout: CacheLayout, device: torch.device
) -> dict[tuple[int, int], AttentionPlan]:
    """Builds the masks of every (window, ratio) the layout can combine; ratio 0 = no entries."""
    window_lengths = sorted({group.window for group in layout.groups if group.kind == "window"})
    ratios = sorted({group.ratio for group in layout.groups if group.kind == "dense"})
    return {
        (window, ratio): AttentionPlan(
            decode_masks=tuple(
                _build_decode_mask(batch, requests, window, ratio, device)
                for requests in batch.decode_requests
            ),
            chunk_tiles=tuple(
                _build_tiles(chunk, int(batch.count_prior(window)[request]), window, ratio, device)
                for request, chunk in zip(batch.chunk_requests, batch.chunks, strict=True)
            ),
        )
        for window in window_lengths
        for ratio in (0, *ratios)
    }


def _to_mask(is_visible: np.ndarray, device: torch.device) -> torch.Tensor:
    """Returns fp32 0 where visible, else -inf."""
    return upload(np.where(is_visible, np.float32(0.0), np.float32(-np.inf)), device)


def _build_decode_mask(
    batch: StepBatch, requests: np.ndarray, window: int, ratio: int, device: torch.device
) -> torch.Tensor:
    """Masks | window rows, last ones count | the step's own rows | entries, first ones count |."""
    starts, counts = batch.starts[requests], batch.counts[requests]
    lengths = batch.count_prior(window)[requests, None, None]
    num_queries = int(counts.max())
    # Padding repeats a request's last query.
    queries = np.minimum(np.arange(num_queries), counts[:, None] - 1)[:, :, None]
    # Positions from the request's start on: window rows below zero, then its own.
    keys = np.arange(1 - window, MAX_DECODE_QUERIES)
    is_visible = (keys >= -lengths) & sees_row(keys, queries, window)
    if ratio:
        positions = starts[:, None, None] + queries
        entries = np.arange(int(count_entries(positions.max() + 1, ratio)))
        is_visible = np.concatenate([is_visible, sees_entry(entries, positions, ratio)], axis=2)
    return _to_mask(is_visible[:, :, None, :], device)


def _build_tiles(
    chunk: Chunk, num_prior: int, window: int, ratio: int, device: torch.device
) -> tuple[QueryTile, ...]:
    start, num_tokens = chunk.start, chunk.num_tokens
    tiles = []
    for first in range(0, num_tokens, _TILE_QUERIES):
        last = min(first + _TILE_QUERIES, num_tokens)
        # Local key j holds position start - num_prior + j; query i sits at local key i + num_prior.
        key_start = max(0, first + num_prior - (window - 1))
        key_end = last + num_prior
        queries = np.arange(first, last)[:, None] + num_prior
        keys = np.arange(key_start, key_end)
        is_visible = sees_row(keys, queries, window)
        num_common = num_entries = 0
        if ratio:
            positions = np.arange(first, last) + start
            num_common, num_entries = count_entries(positions[[0, -1]] + 1, ratio).tolist()
            tail = sees_entry(np.arange(num_common, num_entries), positions[:, None], ratio)
            is_visible = np.concatenate([tail, is_visible], axis=1)
        tiles.append(
            QueryTile(
                queries=slice(first, last),
                window_keys=slice(key_start, key_end),
                num_common=num_common,
                num_entries=num_entries,
                tail_mask=_to_mask(is_visible[None, :, None, :], device),
            )
        )
    return tuple(tiles)
