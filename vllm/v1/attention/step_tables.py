"""The index tables of one step, as data: which rows each layer writes, reads and completes.

Built once per step and shared by all layers of a group, so that layers hold no per-request
Python on the decode path. Two ways through a layer exist and give the same numbers:

* requests with few tokens (decode steps, alone or with drafts) are batched into padded gathers
  (``DecodeBatch``),
* the others run one by one, their queries in tiles (``Chunk``).

Keys of a query, in column order, of a chunk and of a decode batch. Those of a batch stand where
neither its other requests nor its number of tokens or entries move them, so that the order of a
query's sums does not depend on these:

    | compressed entries 0..n-1 (or the indexer's choice) | window rows, then the step's own |
    | window rows, the last ones last | own rows, the first ones first | compressed entries |
      so many as a window has, less 1   MAX_DECODE_QUERIES               0..n-1, or the choice
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import numpy as np
import torch

from vllm.exceptions import InvariantError


@dataclass(frozen=True, slots=True)
class BlockTableView:
    """The blocks of one request in one group.

    Attributes:
        base: Index of the first listed block (block ``i`` covers tokens from ``i * block_size``).
        block_ids: int64 ids of blocks base, base + 1, ...; 0 = not stored.
    """

    base: int
    block_ids: np.ndarray


@dataclass(frozen=True, slots=True)
class RequestSlice:
    """The tokens of one request in this step.

    Attributes:
        start: Tokens computed before this step.
        num_tokens: Tokens of this step: positions start..start+num_tokens-1, contiguous in the
            flat batch, requests in the order of the slices.
        tables: One per KV group, in group order.
        write_from: By KV group, the position from which this step writes rows; rows below are
            computed for what reads them inside the step, and entries below are taken as stored.
            Empty: everything is written.
        read_from: The first position whose window rows are stored; attention sees none before.
        wanted_from: The first position whose streams are read; the model may leave those before it
            undefined.
        num_drafts: Of the last tokens so many are guesses: what is stored in the place of another
            token's must not depend on them until they are settled.
        output_from: The first position whose output anybody reads, in this step or a later one; a
            model may leave out what no such position depends on, and then stores nothing for it.
            0: all of it may be read.
        pictures: Positions ``[begin, end)`` of pictures whose rows see each other both ways in
            layers that let them, of those that the step touches: it holds their last row.
        sees_everywhere: Whether layers without a window let them, too.
        previous_ids: Ids of as many tokens before ``start`` as the model reads, the last one last;
            -1 where there is none. None: it reads none.
    """

    start: int
    num_tokens: int
    tables: tuple[BlockTableView, ...]
    write_from: tuple[int, ...] = ()
    read_from: int = 0
    wanted_from: int = 0
    num_drafts: int = 0
    output_from: int = 0
    previous_ids: Sequence[int] | None = None
    pictures: Sequence[tuple[int, int]] = ()
    sees_everywhere: bool = False

    def find_ends(self) -> np.ndarray:
        """Returns behind which position each token sees nothing, int64 [num_tokens].

        Raises:
            InvariantError: A picture ends behind the step (I9).
        """
        end = self.start + self.num_tokens
        ends = np.arange(self.start + 1, end + 1)
        for first, behind in self.pictures:
            if behind > end:
                raise InvariantError(
                    f"a step of tokens {self.start} to {end - 1} cuts the picture at {first} to "
                    f"{behind - 1} (I9)"
                )
            ends[max(0, first - self.start) : behind - self.start] = behind
        return ends


@dataclass(frozen=True, slots=True)
class PageRows:
    """Addresses of rows in a paged cache: ``cache[blocks, rows]``; both int64, of one shape."""

    blocks: torch.Tensor
    rows: torch.Tensor


@dataclass(frozen=True, slots=True)
class RowWrites:
    """Rows of the flat batch and where they go.

    Attributes:
        sources: Flat rows [N], or None for all of them in order.
        target: Their addresses [N].
    """

    sources: torch.Tensor | None
    target: PageRows


@dataclass(frozen=True, slots=True)
class PaddedRows:
    """Rows read for the requests of a decode batch, padded to a common length.

    Padding repeats a row that the request may read; the null block is never read.

    Attributes:
        source: Addresses [B, L].
        lengths: Rows that count, int64 [B]: the first ones for entries, the last for windows.
        min_length: The least of ``lengths``.
        empty_requests: int64 indices of requests without any row (their padding is another
            request's row and must be zeroed), or None.
    """

    source: PageRows
    lengths: torch.Tensor
    min_length: int
    empty_requests: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """Requests with few tokens, of comparable context: B requests of up to Q tokens each.

    A request with fewer than Q tokens is padded with its last row; what is computed there is
    dropped.

    Attributes:
        rows: Their flat rows, int64 [B * Q], a request's in order; None when they are all rows of
            the step, unpadded and in its order.
        num_requests: B.
        num_queries: Q.
        kept: Indices into ``rows`` without the padding, int64 [N]; None when there is none.
        kept_rows: ``rows[kept]``, None likewise.
    """

    rows: torch.Tensor | None
    num_requests: int
    num_queries: int = 1
    kept: torch.Tensor | None = None
    kept_rows: torch.Tensor | None = None

    def take(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the batch's rows [B, Q, ...] of per-row values [T, ...]."""
        picked = values if self.rows is None else values[self.rows]
        return picked.view(self.num_requests, self.num_queries, *values.shape[1:])

    def put(self, values: torch.Tensor, output: torch.Tensor) -> None:
        """Stores values [B, Q, ...] at the batch's rows, the padding's left out.

        Mutates:
            output [T, ...].
        """
        flat = values.flatten(0, 1)
        if self.kept is None:
            output[slice(None) if self.rows is None else self.rows] = flat
        else:
            output[self.kept_rows] = flat[self.kept]


@dataclass(frozen=True, slots=True)
class QueryTile:
    """Some consecutive queries of a chunk and the keys they share.

    Attributes:
        queries: Offsets into the chunk's tokens.
        window_keys: Offsets into the chunk's local keys (rows read from pages, then its own).
        num_common: Entries that every query of the tile sees.
        num_entries: Entries that at least one query sees.
        tail_mask: fp32 [1, Q, 1, num_entries - num_common + window keys], 0 or -inf: what each
            query sees from entry ``num_common`` on, then its band of window keys.
    """

    queries: slice
    window_keys: slice
    num_common: int
    num_entries: int
    tail_mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class Chunk:
    """A request with many tokens.

    Attributes:
        rows: Its flat rows.
        start: Its first position.
        num_tokens: Its tokens in this step.
        num_unwanted: How many of its first rows nobody reads the streams of.
        output_from: See ``RequestSlice``.
    """

    rows: slice
    start: int
    num_tokens: int
    num_unwanted: int = 0
    output_from: int = 0


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Masks of one kind of layer: a window length with a compress ratio (0 for none).

    Attributes:
        decode_masks: By decode batch: fp32 [B, Q, 1, recent + entries], 0 or -inf; recent are
            window - 1 + MAX_DECODE_QUERIES.
        chunk_tiles: By chunk: its tiles.
    """

    decode_masks: tuple[torch.Tensor, ...]
    chunk_tiles: tuple[tuple[QueryTile, ...], ...]


@dataclass(frozen=True, slots=True)
class WindowMetadata:
    """A window group's writes, and reads of rows below each request's start."""

    writes: RowWrites
    decode_reads: tuple[PaddedRows, ...]
    chunk_reads: tuple[PageRows, ...]


@dataclass(frozen=True, slots=True)
class StateMetadata:
    """A compressor state group's writes, and the windows that this step completes.

    Attributes:
        writes: Rows to keep.
        phases: Position mod ratio of every flat row, int64 [T].
        prior: Addresses [G] of the earlier rows that completed windows need.
        windows: int64 [N, ratio]: rows of each completed window, as indices into the G prior
            rows followed by the T flat rows.
        previous_windows: The same for the window before, or None without overlap. Where it does
            not exist, some existing row stands in.
        no_previous: bool [N, 1, 1], True where the window before does not exist; None when it
            always does.
        entry_positions: int64 [N]: first position of each completed window.
    """

    writes: RowWrites
    phases: torch.Tensor
    prior: PageRows
    windows: torch.Tensor
    previous_windows: torch.Tensor | None
    no_previous: torch.Tensor | None
    entry_positions: torch.Tensor

    @property
    def num_completed(self) -> int:
        """Windows (and so entries) that this step completes."""
        return self.windows.shape[0]


@dataclass(frozen=True, slots=True)
class DenseMetadata:
    """A dense group's new entries (in the order of ``StateMetadata.windows``) and reads.

    Attributes:
        target: Addresses [N] of the entries completed by this step.
        sources: Flat rows int64 [N] of the tokens that are an entry each, at a ratio of 1; None:
            all rows in order, or another ratio.
        decode_reads: By decode batch: the visible entries.
        chunk_reads: By chunk: addresses of every entry its last query sees.
    """

    target: PageRows
    decode_reads: tuple[PaddedRows, ...]
    chunk_reads: tuple[PageRows, ...]
    sources: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class PreviousTokens:
    """The tokens before each of a step's.

    Attributes:
        ids: int64 [G]: of all requests, those before their first token of the step.
        index: int64 [T, N]: of the token so many places before each row (1 to N), its place among
            ``ids`` followed by the step's own token ids; -1: there is none.
    """

    ids: torch.Tensor
    index: torch.Tensor


@dataclass(frozen=True, slots=True)
class DecodeKeys:
    """Keys of a decode batch, for layers that keep keys and values of every token.

    Attributes:
        source: Addresses [B, L] of the stored rows, a request's last ones last; where a request
            has fewer, other rows stand in front, which the mask hides.
        has_own: Whether the step's own rows are among them: they stand in pages by then. Else they
            follow, from the activations.
        mask: fp32 [B, 1, Q, L (+ Q)], 0 or -inf; None when every query sees all keys.
        origins: int64 [B, 1]: the position of a request's first column, negative where other rows
            stand in front.
    """

    source: PageRows
    has_own: bool
    mask: torch.Tensor | None
    origins: torch.Tensor

    def pick_rows(
        self, positions: torch.Tensor, own: torch.Tensor, read: Callable[[PageRows], torch.Tensor]
    ) -> torch.Tensor:
        """See ``PicksKeys``."""
        columns = positions - self.origins
        if self.has_own:
            source = self.source
            return read(PageRows(source.blocks.gather(1, columns), source.rows.gather(1, columns)))
        joined = torch.cat([read(self.source), own], 1)
        return joined.gather(1, columns.unsqueeze(-1).expand(-1, -1, joined.shape[-1]))


class PicksKeys(Protocol):
    """Where single rows of a decode batch's requests are, for layers that choose among them."""

    def pick_rows(
        self, positions: torch.Tensor, own: torch.Tensor, read: Callable[[PageRows], torch.Tensor]
    ) -> torch.Tensor:
        """Return the rows [B, N, W] at positions [B, N] of the requests.

        Args:
            positions: Of the step's tokens or those before it.
            own: The step's own rows [B, Q, W].
            read: Reads rows of pages by addresses.
        """


@dataclass(frozen=True, slots=True)
class KeyTile:
    """Some consecutive queries of a chunk and the keys they see, by a window's mask.

    Attributes:
        queries: Offsets into the chunk's tokens.
        keys: Offsets into the chunk's local keys (stored rows, then its own).
        mask: fp32 [queries, keys], 0 or -inf.
    """

    queries: slice
    keys: slice
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class ChunkKeys:
    """Keys of a chunk: the stored rows before it, then its own from the activations.

    Attributes:
        prior: Addresses [P] of the stored rows that some query sees.
        tiles: Empty: every query sees all stored rows, and the chunk's own up to its position.
        kept: Addresses [N] of the chunk's first rows, where these are not written but taken as
            they are stored; None: all are its own.
    """

    prior: PageRows
    tiles: tuple[KeyTile, ...]
    kept: PageRows | None = None


@dataclass(frozen=True, slots=True)
class KeyMetadata:
    """The writes and reads of a group that keeps keys and values.

    Attributes:
        writes: Rows to keep.
        decodes: By decode batch.
        chunks: By chunk.
        picked: By decode batch; None: by ``decodes``, which captured steps lack.
    """

    writes: RowWrites
    decodes: tuple[DecodeKeys, ...]
    chunks: tuple[ChunkKeys, ...]
    picked: tuple[PicksKeys, ...] | None = None


@dataclass(frozen=True, slots=True)
class StoredState:
    """A state that a step leaves.

    Attributes:
        end: Tokens of the request's part of the step that it stands behind.
        blocks: int64, of the whole state.
    """

    end: int
    blocks: torch.Tensor


@dataclass(frozen=True, slots=True)
class RecurrentRows:
    """One request's part of a step.

    Attributes:
        rows: Its flat rows.
        source: Blocks of the state that it begins with, int64; None: before its first token.
        stores: The states that it leaves, ascending; the last one behind its last token that is no
            draft.
        num_drafts: Its last rows that are drafts, whose states are stored when they are settled.
    """

    rows: slice
    source: torch.Tensor | None
    stores: tuple[StoredState, ...]
    num_drafts: int = 0


class RunsStates(Protocol):
    """Kernels that read and store recurrent states by themselves, over the tables of one step."""

    def run_states(
        self,
        cache_name: str,
        number: int,
        num_key_heads: int,
        channels: torch.Tensor,
        weight: torch.Tensor,
        logs: torch.Tensor,
        rates: torch.Tensor,
    ) -> torch.Tensor:
        """Take the requests' states of the recurrent layer ``number`` through their rows.

        Inputs of the convolution [T, C] by its weight [C, W], logarithms of decays [T, H] or
        [T, H, K] and rates [T, H] to outputs [T, H, V]. What drafts do is kept until they are
        settled.
        """


class AttendsPages(Protocol):
    """Kernels that write and read pages by themselves, over the tables of one step."""

    def attend(
        self,
        cache_name: str,
        queries: torch.Tensor,
        rows: torch.Tensor,
        sinks: torch.Tensor | None,
        scale: float,
        soft_cap: float,
        *,
        latent_dim: int = 0,
        is_owner: bool = True,
    ) -> torch.Tensor:
        """Store a layer's rows [T, 2 * K * d] and attend its queries [T, H, d]: [T, H, d].

        With a ``latent_dim`` rows are [T, d], and the result is [T, H, latent_dim]. Rows of another
        layer (``is_owner``) are stored already.
        """


@dataclass(frozen=True, slots=True)
class StepMetadata:
    """Everything index-like about one step.

    Attributes:
        num_tokens: Rows of the flat batch.
        decodes: Batches of requests with few tokens.
        chunks: The other requests.
        plans: (window, ratio) -> masks; ratio 0 is a layer without entries.
        windows, states, entries, keys, recurrent: By group id.
        group_of: Cache name -> group id.
        state_runner: Where a kernel takes recurrent states through the step, that.
        previous: The tokens before each row's; None: the model reads none.
    """

    pages: ClassVar[AttendsPages | None] = None
    """Where kernels read pages by themselves, what layers attend with; here they gather."""

    num_tokens: int
    decodes: tuple[DecodeBatch, ...]
    chunks: tuple[Chunk, ...]
    plans: Mapping[tuple[int, int], AttentionPlan]
    windows: Mapping[int, WindowMetadata]
    states: Mapping[int, StateMetadata]
    entries: Mapping[int, DenseMetadata]
    group_of: Mapping[str, int]
    keys: Mapping[int, KeyMetadata]
    recurrent: Mapping[int, tuple[RecurrentRows, ...]] = field(default_factory=dict)
    state_runner: RunsStates | None = None
    previous: PreviousTokens | None = None

    def find_wanted(self, device: torch.device) -> torch.Tensor | None:
        """Returns the flat rows whose streams are read, int64 ascending; None: all are.

        Requests with few tokens are batched, and count as a whole.
        """
        if not any(chunk.num_unwanted for chunk in self.chunks):
            return None
        is_wanted = np.ones(self.num_tokens, dtype=np.bool_)
        for chunk in self.chunks:
            is_wanted[chunk.rows.start : chunk.rows.start + chunk.num_unwanted] = False
        return torch.from_numpy(np.flatnonzero(is_wanted)).to(device)
