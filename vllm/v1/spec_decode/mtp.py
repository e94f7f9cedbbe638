"""Drafts of the model's own multi-token-prediction block."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import numpy as np
import torch

from vllm.utils.uploads import upload
from vllm.v1.attention.metadata import (
    BlockTableView,
    CacheLayout,
    RequestSlice,
)
from vllm.v1.attention.step_model import StepModel
from vllm.v1.attention.step_pictures import StepPictures
from vllm.v1.sample.sampler import find_highest
from vllm.v1.spec_decode.boundary_streams import BoundaryStreams
from vllm.v1.worker.request_state import RequestState
from vllm.v1.worker.step_input import StepInput


class MTPModel(Protocol):
    """A model with an MTP block. T flat rows, n residual streams of width D."""

    def forward_mtp(
        self,
        streams: torch.Tensor,
        next_token_ids: torch.Tensor,
        positions: torch.Tensor,
        meta: Any,
        kv_caches: Mapping[str, torch.Tensor],
        pictures: StepPictures = ...,
    ) -> torch.Tensor:
        """Return the block's streams ``[T, n, D]`` at ``positions``; writes its window rows.

        ``pictures`` comes to models that are shown some: those among the next tokens.
        """

    def compute_mtp_logits(self, streams: torch.Tensor) -> torch.Tensor:
        """Return fp32 logits ``[M, V]`` of the token two positions on."""


class FindPictures(Protocol):
    """Finds what pictures change for a drafter's rows."""

    def __call__(
        self, runs: Sequence[tuple[RequestState, RequestSlice]], ahead: int
    ) -> StepPictures | None:
        """Return it; None: no request has any."""


@dataclass(frozen=True, slots=True)
class BlockCache:
    """The MTP block's KV caches.

    Attributes:
        group_ids: Their KV groups, whose tables are the only ones read; that of its rows first.
        layout: These groups alone.
        layers: All cache views by name.
    """

    group_ids: tuple[int, ...]
    layout: CacheLayout
    layers: Mapping[str, torch.Tensor]


class MTPProposer:
    """Runs the MTP block behind every step.

    The block's row at t needs the token at t + 1, so it runs once the step's tokens are accepted,
    over the rows that stand. Rejected rows are skipped: the next step writes them.

    After a prefix hit the row before the step's first may stem from another next token. It is run
    again then, from the main model's streams there, which are kept for the last row of every block.

    Args:
        steps: The target, which holds the block.
        num_drafts: Tokens of a draft; from the second on the block's own streams are fed back.
        cache: Where its rows lie.
        device: Where the model is.
        prepare: Makes what the block reads of the target's streams.
        keeps_boundaries: Whether a stale row is made anew; else it stays as it is, which costs
            nothing but the quality of drafts.
        find_pictures: Finds the pictures among the next tokens; None: there are none.
    """

    reads_all_rows: ClassVar[bool] = True

    def __init__(
        self,
        steps: StepModel,
        num_drafts: int,
        cache: BlockCache,
        device: torch.device,
        prepare: Callable[[torch.Tensor], torch.Tensor] | None = None,
        *,
        keeps_boundaries: bool = True,
        find_pictures: FindPictures | None = None,
    ) -> None:
        self._find_pictures = find_pictures
        self._prepare = prepare
        self._keeps_boundaries = keeps_boundaries
        self._model: MTPModel = steps.model
        self._build_metadata = steps.build_metadata
        self._num_drafts = num_drafts
        self._cache = cache
        self._device = device
        self._boundaries = BoundaryStreams()

    def propose(
        self, step: StepInput, streams: torch.Tensor, rebuilds: Mapping[str, int]
    ) -> list[list[int]]:
        """Write the block's rows of the step and draft for the sampled requests."""
        if self._prepare is not None:
            streams = self._prepare(streams)
        found = {req_id: self._boundaries.find(block) for req_id, block in rebuilds.items()}
        kept = {req_id: row for req_id, row in found.items() if row is not None}
        standing = _find_standing_rows(step, list(kept))
        if kept:
            streams = torch.cat([streams, *(row.unsqueeze(0) for row in kept.values())])
        if len(standing.rows) < step.num_tokens or kept:
            streams = streams[self._to_device(standing.rows)]
        if self._keeps_boundaries:
            self._save_boundaries(standing, streams)
        slices = standing.slices
        counts = [item.num_tokens for item in slices]
        next_ids = self._to_device(standing.next_ids)
        streams = self._run(streams, next_ids, standing.positions, slices, step.requests)
        live = [i for i, count in enumerate(step.sampled_counts) if count]
        streams = streams[self._to_device(np.cumsum(counts)[live] - 1)]
        owners: list[int] = []
        found_tokens: list[torch.Tensor] = []
        for depth in range(self._num_drafts):
            if not live:
                break
            tokens = find_highest(self._model.compute_mtp_logits(streams))
            owners += live
            found_tokens.append(tokens)
            if depth + 1 < self._num_drafts:
                streams, live = self._feed_back(step, streams, tokens, live, depth)
        drafts: list[list[int]] = [[] for _ in step.requests]
        if found_tokens:
            # The host waits once, when all are drafted.
            for i, token in zip(owners, torch.cat(found_tokens).tolist(), strict=True):
                drafts[i].append(token)
        return drafts

    def _feed_back(
        self,
        step: StepInput,
        streams: torch.Tensor,
        tokens: torch.Tensor,
        live: list[int],
        depth: int,
    ) -> tuple[torch.Tensor, list[int]]:
        """Run the block one position on for the requests that have a slot there."""
        positions = [step.requests[i].num_tokens - 1 + depth for i in live]
        kept = [
            k
            for k, (i, position) in enumerate(zip(live, positions, strict=True))
            if self._has_slot(step.requests[i], position)
        ]
        still = [live[k] for k in kept]
        if not still:
            return streams, still
        at = np.array([positions[k] for k in kept], dtype=np.int64)
        slices = [
            RequestSlice(
                int(position), 1, step.requests[i].tables.views, read_from=step.slices[i].read_from
            )
            for i, position in zip(still, at, strict=True)
        ]
        rows = self._to_device(np.array(kept, dtype=np.int64))
        owners = [step.requests[i] for i in still]
        return self._run(streams[rows], tokens[rows], at, slices, owners), still

    def forget(self, block_ids: Sequence[int]) -> None:
        """Overwrite the streams of blocks."""
        self._boundaries.forget(block_ids)

    def _save_boundaries(self, standing: "_StandingRows", streams: torch.Tensor) -> None:
        """Keep the streams of rows that end a stored block: a hit may end there."""
        size = self._cache.layout.groups[0].block_size
        ends = np.flatnonzero(standing.positions % size == size - 1)
        if not len(ends):
            return
        owners = np.repeat(
            np.arange(len(standing.slices)), [item.num_tokens for item in standing.slices]
        )
        blocks, rows = [], []
        for row in ends:
            tables = standing.slices[owners[row]].tables
            block = self._find_block(tables, int(standing.positions[row]))
            if block:
                blocks.append(block)
                rows.append(row)
        if blocks:
            self._boundaries.save(blocks, streams[self._to_device(np.array(rows))])

    def _find_block(self, tables: Sequence[BlockTableView], position: int, index: int = 0) -> int:
        """Return the block that stores a position's row in the index-th cache; 0 if none does."""
        table = tables[self._cache.group_ids[index]]
        at = position // self._cache.layout.groups[index].block_size - table.base
        return int(table.block_ids[at]) if 0 <= at < len(table.block_ids) else 0

    def _has_slot(self, state: RequestState, position: int) -> bool:
        # A first chunk gets no slots ahead, and none exist beyond the longest request.
        return all(
            # A row of several tokens is stored with the last of them.
            (group.kind == "dense" and (position + 1) % group.ratio)
            or self._find_block(state.tables.views, position, index)
            for index, group in enumerate(self._cache.layout.groups)
        )

    def _run(
        self,
        streams: torch.Tensor,
        next_ids: torch.Tensor,
        positions: np.ndarray,
        slices: list[RequestSlice],
        owners: Sequence[RequestState],
    ) -> torch.Tensor:
        pictures = None
        if self._find_pictures is not None:
            # The block's row at t reads the token at t + 1, which may be a picture's.
            pictures = self._find_pictures(list(zip(owners, slices, strict=True)), 1)
        group_ids = self._cache.group_ids
        own = [
            replace(
                item,
                tables=tuple(item.tables[group_id] for group_id in group_ids),
                write_from=tuple(item.write_from[group_id] for group_id in group_ids)
                if item.write_from
                else (),
            )
            for item in slices
        ]
        return self._model.forward_mtp(
            streams,
            next_ids,
            self._to_device(positions),
            self._build_metadata(own, self._cache.layout),
            self._cache.layers,
            **({} if pictures is None else {"pictures": pictures}),
        )

    def _to_device(self, values: np.ndarray) -> torch.Tensor:
        return upload(values, self._device)


@dataclass(frozen=True, slots=True)
class _StandingRows:
    """The rows of a step whose next token is known.

    Attributes:
        rows: int64 ``[T]``: flat rows of the step; from its end on, rows made anew.
        positions, next_ids: int64 ``[T]``: their positions, and the tokens after them.
        slices: The same by request.
    """

    rows: np.ndarray
    positions: np.ndarray
    next_ids: np.ndarray
    slices: list[RequestSlice]


def _find_standing_rows(step: StepInput, rebuilt: Sequence[str]) -> _StandingRows:
    """Lay out the rows to run; those of ``rebuilt`` requests begin one position earlier.

    Args:
        step: The step.
        rebuilt: Requests in the order of the rows that follow the step's.
    """
    extra_rows = {req_id: step.num_tokens + i for i, req_id in enumerate(rebuilt)}
    rows, positions, next_ids, slices = [], [], [], []
    for state, item, row in zip(step.requests, step.slices, step.row_starts, strict=True):
        start, end = item.start, min(item.start + item.num_tokens, state.num_tokens - 1)
        extra = extra_rows.get(state.req_id)
        if extra is not None:
            rows.append(np.array([extra], dtype=np.int64))
            start -= 1
        rows.append(np.arange(row, row + end - item.start, dtype=np.int64))
        positions.append(np.arange(start, end, dtype=np.int64))
        next_ids.append(state.get_tokens(start + 1, end + 1))
        # The block drafts text: its rows see none behind them.
        slices.append(replace(item, start=start, num_tokens=end - start, pictures=()))
    return _StandingRows(
        np.concatenate(rows), np.concatenate(positions), np.concatenate(next_ids), slices
    )
