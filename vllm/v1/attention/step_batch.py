"""The requests of one step as arrays, sorted into decode batches and chunks."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vllm.exceptions import InvariantError
from vllm.utils.uploads import upload
from vllm.v1.attention.step_rules import count_entries, find_entry_start, find_first_prior
from vllm.v1.attention.step_tables import Chunk, DecodeBatch, RequestSlice

# Requests with at most so many tokens are batched: a decode step with up to seven drafts.
MAX_DECODE_QUERIES = 8

# Decodes share a padded batch while their contexts are below this, then per doubling, and per
# doubling of their tokens: padding then at most doubles the rows read and the queries, and a
# request's batch depends on itself alone.
_DECODE_BUCKET_TOKENS = 4096
# Where keys of every token are read, padding costs as much as reading: finer buckets.
_KEY_BUCKET_TOKENS = 256


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The requests of one step, in flat-batch order.

    Attributes:
        slices: Requests with tokens.
        starts, ends: Positions before and after the step, int64 [R].
        counts: Tokens of each request, int64 [R].
        read_from: First position whose window rows are stored, int64 [R].
        row_starts: First flat row of each request, int64 [R].
        num_tokens: Flat rows T.
        request_of_row, position_of_row: int64 [T].
        decode_requests: Request indices of each decode batch.
        chunk_requests: Request indices of the chunks.
    """

    slices: tuple[RequestSlice, ...]
    starts: np.ndarray
    ends: np.ndarray
    counts: np.ndarray
    read_from: np.ndarray
    row_starts: np.ndarray
    num_tokens: int
    request_of_row: np.ndarray
    position_of_row: np.ndarray
    decode_requests: tuple[np.ndarray, ...]
    decodes: tuple[DecodeBatch, ...]
    chunk_requests: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @classmethod
    def from_slices(
        cls, slices: Sequence[RequestSlice], device: torch.device, *, reads_keys: bool = False
    ) -> "StepBatch":
        """Sorts the requests of a step.

        Args:
            slices: The requests in flat-batch order; those without tokens are ignored.
            device: Where the tables are used.
            reads_keys: Whether some layers read a row for every token.

        Raises:
            InvariantError: A request reads window rows from beyond its start.
        """
        kept = tuple(item for item in slices if item.num_tokens)
        starts = np.array([item.start for item in kept], dtype=np.int64)
        counts = np.array([item.num_tokens for item in kept], dtype=np.int64)
        read_from = np.array([item.read_from for item in kept], dtype=np.int64)
        if (read_from > starts).any():
            raise InvariantError(f"window rows are read from {read_from} in steps from {starts}")
        row_starts = np.cumsum(counts) - counts
        bucket_tokens = _KEY_BUCKET_TOKENS if reads_keys else _DECODE_BUCKET_TOKENS
        is_chunk = counts > MAX_DECODE_QUERIES
        for request, item in enumerate(kept):
            # Their tokens see some behind them, which batches do not know.
            is_chunk[request] |= bool(item.pictures)
        decode_requests = _bucket_decodes(starts, counts, ~is_chunk, bucket_tokens)
        chunk_requests = tuple(int(request) for request in np.flatnonzero(is_chunk))
        return cls(
            slices=kept,
            starts=starts,
            ends=starts + counts,
            counts=counts,
            read_from=read_from,
            row_starts=row_starts,
            num_tokens=int(counts.sum()),
            request_of_row=np.repeat(np.arange(len(kept)), counts),
            position_of_row=ragged_arange(starts, counts),
            decode_requests=decode_requests,
            decodes=tuple(
                _build_decode(requests, row_starts, counts, device) for requests in decode_requests
            ),
            chunk_requests=chunk_requests,
            chunks=tuple(
                Chunk(
                    slice(int(row_starts[request]), int(row_starts[request] + counts[request])),
                    int(starts[request]),
                    int(counts[request]),
                    _count_unwanted(kept[request]),
                    kept[request].output_from,
                )
                for request in chunk_requests
            ),
        )

    def find_write_from(self, group_id: int) -> np.ndarray:
        """Returns the position from which each request writes a group's rows, int64 [R]."""
        if not any(item.write_from for item in self.slices):
            return self.starts
        own = [item.write_from[group_id] if item.write_from else 0 for item in self.slices]
        positions: np.ndarray = np.maximum(self.starts, np.array(own, dtype=np.int64))
        return positions

    def count_prior(self, window: int) -> np.ndarray:
        """Returns how many window rows before its start each request reads, int64 [R]."""
        first = find_first_prior(self.starts, self.read_from, window)
        counts: np.ndarray = self.starts - first
        return counts

    def find_completed(self, ratio: int, write_from: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the windows of ``ratio`` tokens that this step completes and writes.

        Args:
            ratio: Tokens of a window.
            write_from: Position from which each request writes entries, int64 [R].

        Returns:
            Their request index and first position, int64 [N] each, in flat-batch order.
        """
        first_entries = count_entries(write_from, ratio)
        counts = np.maximum(count_entries(self.ends, ratio) - first_entries, 0)
        return (
            np.repeat(np.arange(len(counts)), counts),
            find_entry_start(ragged_arange(first_entries, counts), ratio),
        )


def _count_unwanted(item: RequestSlice) -> int:
    return min(max(item.wanted_from - item.start, 0), item.num_tokens)


def ragged_arange(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Concatenates ``starts[i] .. starts[i] + counts[i] - 1`` for every i."""
    offsets = np.cumsum(counts) - counts
    return np.repeat(starts - offsets, counts) + np.arange(int(counts.sum()))


def _bucket_decodes(
    starts: np.ndarray, counts: np.ndarray, is_decode: np.ndarray, bucket_tokens: int
) -> tuple[np.ndarray, ...]:
    requests = np.flatnonzero(is_decode)
    if not len(requests):
        return ()
    if int(starts[requests].max()) < bucket_tokens and int(counts[requests].max()) == 1:
        return (requests,)
    buckets: dict[tuple[int, int], list[int]] = {}
    for request in requests.tolist():
        context = int(starts[request]) // bucket_tokens
        key = (context.bit_length(), (int(counts[request]) - 1).bit_length())
        buckets.setdefault(key, []).append(request)
    return tuple(np.array(buckets[key], dtype=np.int64) for key in sorted(buckets))


def _build_decode(
    requests: np.ndarray, row_starts: np.ndarray, counts: np.ndarray, device: torch.device
) -> DecodeBatch:
    own_counts = counts[requests]
    num_requests, num_queries = len(requests), int(own_counts.max())
    if len(requests) == len(counts) and int(own_counts.min()) == num_queries:
        return DecodeBatch(None, num_requests, num_queries)
    queries = np.arange(num_queries)
    offsets = np.minimum(queries, own_counts[:, None] - 1)
    rows = (row_starts[requests, None] + offsets).reshape(-1)
    kept = np.flatnonzero(queries < own_counts[:, None])
    if len(kept) == len(rows):
        return DecodeBatch(upload(rows, device), num_requests, num_queries)
    return DecodeBatch(
        upload(rows, device),
        num_requests,
        num_queries,
        upload(kept, device),
        upload(rows[kept], device),
    )
