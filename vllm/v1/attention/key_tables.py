"""Index tables of groups that keep keys and values: of every token, or of a window's.

Decode batches read their own rows back from pages with the others, so that a layer gathers once.
Chunks take their own rows from the activations:

    local keys of a chunk   | stored rows before it (prior) | its own rows |
    full attention          every query sees all prior rows and its own rows up to itself: no mask
    window                  tiles of queries, each over a band of local keys
    pictures                tiles likewise: their rows see keys behind them, too

Rows that a chunk computes and does not write are taken from pages in place of its own.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from vllm.utils.uploads import upload
from vllm.v1.attention.block_lookup import BlockLookup
from vllm.v1.attention.layout import GroupLayout
from vllm.v1.attention.step_batch import StepBatch
from vllm.v1.attention.step_rules import sees_row
from vllm.v1.attention.step_tables import (
    ChunkKeys,
    DecodeKeys,
    KeyMetadata,
    KeyTile,
    PageRows,
    RequestSlice,
    RowWrites,
)

_TILE_QUERIES = 256


def build_key_metadata(
    batch: StepBatch,
    group: GroupLayout,
    lookup: BlockLookup,
    writes: RowWrites,
    write_from: np.ndarray,
) -> KeyMetadata:
    """Builds one group's tables.

    Args:
        batch: The step's requests.
        group: Geometry of the group.
        lookup: Its block tables.
        writes: What the step stores in it.
        write_from: Position from which each request writes, int64 [R].

    Raises:
        InvariantError: A row that attention must read is not stored (I5).
    """
    num_prior = batch.count_prior(group.window) if group.window else batch.starts
    masks = _BandMasks(group.window, lookup.device)
    return KeyMetadata(
        writes=writes,
        decodes=tuple(
            _build_decode(batch, requests, num_prior, group.window, lookup, writes)
            for requests in batch.decode_requests
        ),
        chunks=tuple(
            replace(
                _build_chunk(batch, request, int(num_prior[request]), group.window, lookup, masks),
                kept=_find_kept(batch, request, int(write_from[request]), lookup),
            )
            for request in batch.chunk_requests
        ),
    )


def _build_decode(
    batch: StepBatch,
    requests: np.ndarray,
    num_prior: np.ndarray,
    window: int,
    lookup: BlockLookup,
    writes: RowWrites,
) -> DecodeKeys:
    starts, counts = batch.starts[requests], batch.counts[requests]
    # A window shorter than a step may have dropped rows of the step itself.
    has_own = writes.sources is None or _are_stored(batch, requests, lookup)
    lengths = num_prior[requests] + (counts if has_own else 0)
    ends = starts + counts if has_own else starts
    num_keys = int(lengths.max())
    positions = ends[:, None] - np.arange(num_keys, 0, -1)
    owners = requests[:, None]
    if num_keys and not lengths.all():
        # Only without own rows: their padding is borrowed from a request that has some.
        is_empty = lengths == 0
        donor = int(lengths.argmax())
        owners = np.where(is_empty[:, None], requests[donor], owners)
        positions = np.where(is_empty[:, None], positions[donor], positions)
    first = np.where(lengths == 0, 0, ends - lengths)[:, None]
    source = lookup.locate(owners, np.maximum(positions, first))
    num_queries = int(counts.max())
    # Keys by position, padded ones below the request's first; padding repeats the last query.
    queries = starts[:, None] + np.minimum(np.arange(num_queries), counts[:, None] - 1)
    keys = ends[:, None] - np.arange(num_keys, 0, -1)
    is_stored = keys >= (ends - lengths)[:, None]
    if not has_own:
        keys = np.concatenate([keys, starts[:, None] + np.arange(num_queries)], axis=1)
        own = np.ones((len(requests), num_queries), dtype=np.bool_)
        is_stored = np.concatenate([is_stored, own], axis=1)
    is_visible = is_stored[:, None] & sees_row(keys[:, None], queries[:, :, None], window)
    mask = None if is_visible.all() else _to_mask(is_visible[:, None], lookup.device)
    origins = upload((ends - num_keys)[:, None], lookup.device)
    return DecodeKeys(source, has_own, mask, origins)


def _are_stored(batch: StepBatch, requests: np.ndarray, lookup: BlockLookup) -> bool:
    """Tells whether every row of these requests has a block."""
    is_ours = np.isin(batch.request_of_row, requests)
    blocks = lookup.find_blocks(batch.request_of_row[is_ours], batch.position_of_row[is_ours])
    return bool(blocks.all())


def _find_kept(
    batch: StepBatch, request: int, write_from: int, lookup: BlockLookup
) -> PageRows | None:
    """Locates the first rows of a chunk that it computes and does not write."""
    start, end = int(batch.starts[request]), int(batch.ends[request])
    if write_from <= start:
        return None
    return lookup.locate(np.full(1, request), np.arange(start, min(write_from, end)))


def _build_chunk(
    batch: StepBatch,
    request: int,
    num_prior: int,
    window: int,
    lookup: BlockLookup,
    masks: "_BandMasks",
) -> ChunkKeys:
    start, num_tokens = int(batch.starts[request]), int(batch.counts[request])
    prior = lookup.locate(np.full(1, request), np.arange(start - num_prior, start))
    item = batch.slices[request]
    if item.pictures and (window or item.sees_everywhere):
        return ChunkKeys(prior, tuple(_build_picture_tiles(item, num_prior, window, lookup.device)))
    if not window or num_prior + num_tokens <= window:
        return ChunkKeys(prior, ())
    tiles = []
    for first in range(0, num_tokens, _TILE_QUERIES):
        last = min(first + _TILE_QUERIES, num_tokens)
        # Local key j holds position start - num_prior + j; query i stands at i + num_prior.
        key_start = max(0, first + num_prior - (window - 1))
        key_end = last + num_prior
        tiles.append(
            KeyTile(
                slice(first, last),
                slice(key_start, key_end),
                masks.get(last - first, key_end - key_start),
            )
        )
    return ChunkKeys(prior, tuple(tiles))


def _build_picture_tiles(
    item: RequestSlice, num_prior: int, window: int, device: torch.device
) -> Iterator[KeyTile]:
    """Builds tiles whose queries see up to the end of their picture, and back as far as ever."""
    behind = item.find_ends()
    # Local key j holds position first + j.
    first = item.start - num_prior
    for begin in range(0, item.num_tokens, _TILE_QUERIES):
        end = min(begin + _TILE_QUERIES, item.num_tokens)
        queries = np.arange(item.start + begin, item.start + end)[:, None]
        low = max(first, item.start + begin - window + 1) if window else first
        keys = np.arange(low, int(behind[end - 1]))
        seen = keys < behind[begin:end, None]
        if window:
            seen &= keys > queries - window
        yield KeyTile(
            slice(begin, end),
            slice(low - first, int(behind[end - 1]) - first),
            _to_mask(seen, device),
        )


class _BandMasks:
    """Masks of a window's tiles: all are cut from one per number of queries.

    Owns: the masks of one step and group.
    """

    def __init__(self, window: int, device: torch.device) -> None:
        self._window = window
        self._device = device
        self._bands: dict[int, torch.Tensor] = {}

    def get(self, num_queries: int, num_keys: int) -> torch.Tensor:
        """Returns [num_queries, num_keys]: the last key is the last query's own."""
        band = self._bands.get(num_queries)
        if band is None:
            # Query i sees keys i .. i + window - 1 of the band's num_queries + window - 1.
            keys, queries = np.arange(1 - self._window, num_queries), np.arange(num_queries)
            seen = sees_row(keys, queries[:, None], self._window)
            band = _to_mask(seen, self._device)
            self._bands[num_queries] = band
        return band[:, band.shape[1] - num_keys :]


def _to_mask(is_visible: np.ndarray, device: torch.device) -> torch.Tensor:
    """Returns fp32 0 where visible, else -inf."""
    return upload(np.where(is_visible, np.float32(0.0), np.float32(-np.inf)), device)
