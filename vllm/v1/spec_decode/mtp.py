"""Drafts of the model's own multi-token-prediction block."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from vllm.v1.attention.metadata import (
    CacheLayout,
    RequestSlice,
    StepMetadata,
    build_step_metadata,
)
from vllm.v1.worker.request_state import RequestState
from vllm.v1.worker.step_input import StepInput


class MTPModel(Protocol):
    """A model with an MTP block. T flat rows, n residual streams of width D."""

    def forward_mtp(
        self,
        streams: torch.Tensor,
        next_token_ids: torch.Tensor,
        positions: torch.Tensor,
        meta: StepMetadata,
        kv_caches: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """Return the block's streams ``[T, n, D]`` at ``positions``; writes its window rows."""

    def compute_mtp_logits(self, streams: torch.Tensor) -> torch.Tensor:
        """Return fp32 logits ``[M, V]`` of the token two positions on."""


@dataclass(frozen=True, slots=True)
class BlockCache:
    """The MTP block's KV cache.

    Attributes:
        group_id: Its KV group, whose table is the only one read.
        layout: That group alone.
        layers: All cache views by name.
    """

    group_id: int
    layout: CacheLayout
    layers: Mapping[str, torch.Tensor]


class MTPProposer:
    """Runs the MTP block behind every step.

    The block's row at t needs the token at t + 1, so it runs once the step's tokens are accepted,
    over the rows that stand. Rejected rows are skipped: the next step writes them.

    Args:
        model: The target, which holds the block.
        num_drafts: Tokens of a draft; from the second on the block's own streams are fed back.
        cache: Where its rows lie.
        device: Where the model is.
    """

    def __init__(
        self,
        model: MTPModel,
        num_drafts: int,
        cache: BlockCache,
        device: torch.device,
    ) -> None:
        self._model = model
        self._num_drafts = num_drafts
        self._cache = cache
        self._device = device

    def propose(self, step: StepInput, streams: torch.Tensor) -> list[list[int]]:
        """Write the block's rows of the step and draft for the sampled requests."""
        rows, next_ids, slices = _find_standing_rows(step)
        counts = [item.num_tokens for item in slices]
        if len(rows) < step.num_tokens:
            streams = streams[self._to_device(rows)]
        streams = self._run(streams, next_ids, step.positions[rows], slices)
        drafts: list[list[int]] = [[] for _ in step.requests]
        live = [i for i, count in enumerate(step.sampled_counts) if count]
        streams = streams[self._to_device(np.cumsum(counts)[live] - 1)]
        for depth in range(self._num_drafts):
            if not live:
                break
            tokens = self._model.compute_mtp_logits(streams).argmax(-1).tolist()
            for i, token in zip(live, tokens, strict=True):
                drafts[i].append(token)
            if depth + 1 < self._num_drafts:
                streams, live = self._feed_back(step, streams, live, drafts, depth)
        return drafts

    def _feed_back(
        self,
        step: StepInput,
        streams: torch.Tensor,
        live: list[int],
        drafts: list[list[int]],
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
            RequestSlice(int(position), 1, step.requests[i].tables.views)
            for i, position in zip(still, at, strict=True)
        ]
        next_ids = np.array([drafts[i][-1] for i in still], dtype=np.int64)
        chosen = streams[self._to_device(np.array(kept, dtype=np.int64))]
        return self._run(chosen, next_ids, at, slices), still

    def _has_slot(self, state: RequestState, position: int) -> bool:
        # A first chunk gets no slots ahead, and none exist beyond the longest request.
        table = state.tables.views[self._cache.group_id]
        index = position // self._cache.layout.groups[0].block_size - table.base
        return 0 <= index < len(table.block_ids) and bool(table.block_ids[index])

    def _run(
        self,
        streams: torch.Tensor,
        next_ids: np.ndarray,
        positions: np.ndarray,
        slices: list[RequestSlice],
    ) -> torch.Tensor:
        group_id = self._cache.group_id
        own = [
            replace(
                item,
                tables=(item.tables[group_id],),
                write_from=item.write_from[group_id : group_id + 1],
            )
            for item in slices
        ]
        return self._model.forward_mtp(
            streams,
            self._to_device(next_ids),
            self._to_device(positions),
            build_step_metadata(own, self._cache.layout, self._device),
            self._cache.layers,
        )

    def _to_device(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)


def _find_standing_rows(step: StepInput) -> tuple[np.ndarray, np.ndarray, list[RequestSlice]]:
    """Return the flat rows whose next token is known, those tokens, and the requests' slices."""
    rows, next_ids, slices = [], [], []
    for state, item, row in zip(step.requests, step.slices, step.row_starts, strict=True):
        end = min(item.start + item.num_tokens, state.num_tokens - 1)
        rows.append(np.arange(row, row + end - item.start, dtype=np.int64))
        next_ids.append(state.get_tokens(item.start + 1, end + 1))
        slices.append(replace(item, num_tokens=end - item.start))
    return np.concatenate(rows), np.concatenate(next_ids), slices
