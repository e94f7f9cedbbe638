"""What the sampler must know of a batch, as arrays with one entry per sampled row.

Built when the batch changes and reused over the decode steps in between; all that varies from step
to step is the position of each row's token, which the sampler is given.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import torch

from vllm.sampling_params import SamplingParams
from vllm.utils.uploads import upload
from vllm.v1.sample.edits import Cells, FixedEdits
from vllm.v1.sample.request_edits import RequestEdits, make_request_edits


@dataclass(frozen=True, slots=True)
class RowSampling:
    """One row to sample.

    Attributes:
        params: The request's parameters.
        rng_key: The request's 64-bit key.
        num_prompt_tokens: Length of the request's prompt.
        edits: What the request changes in every row's logits.
    """

    params: SamplingParams
    rng_key: int
    num_prompt_tokens: int
    edits: RequestEdits | None = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "edits", make_request_edits(self.params))


@dataclass(frozen=True, slots=True)
class RowSubset:
    """Rows of the random ones that one filter concerns, and its parameter for each.

    Attributes:
        rows: int64 ``[N]``, or None for all of them in order.
        values: ``[N]``.
        max_value: The largest.
    """

    rows: torch.Tensor | None
    values: torch.Tensor
    max_value: float


@dataclass(frozen=True, slots=True)
class RowSettings:
    """The parameters of N rows, on the host; a filter that a row does not use keeps all.

    Attributes:
        temperature: fp32 ``[N]``, positive.
        min_p: fp32 ``[N]`` in [0, 1].
        top_k: int64 ``[N]`` in 1..V.
        top_p: fp32 ``[N]`` in (0, 1].
    """

    temperature: np.ndarray
    min_p: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray

    @classmethod
    def build(cls, params: Sequence[SamplingParams], vocab_size: int) -> Self:
        """Lay the parameters out; top_k of the vocabulary or more filters nothing."""
        top_k = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
        top_p = np.array([p.top_p for p in params], dtype=np.float32)
        return cls(
            temperature=np.array([p.temperature for p in params], dtype=np.float32),
            min_p=np.array([p.min_p for p in params], dtype=np.float32),
            top_k=np.array(top_k, dtype=np.int64),
            # What is too small for a float32 keeps the most likely token, as it should.
            top_p=np.maximum(top_p, np.finfo(np.float32).tiny),
        )


@dataclass(frozen=True, slots=True)
class RandomRows:
    """The rows that are not greedy.

    Attributes:
        rows: int64 ``[N]``, or None for all of the batch in order.
        rows_host: The same on the host.
        rng_keys: uint64 ``[N]``.
        settings: What they asked for, for those who draw on the host.
        temperature: fp32 ``[N, 1]``.
        min_p, top_k, top_p: None when no row uses the filter.
    """

    rows: torch.Tensor | None
    rows_host: np.ndarray
    rng_keys: np.ndarray
    settings: RowSettings
    temperature: torch.Tensor
    min_p: RowSubset | None
    top_k: RowSubset | None
    top_p: RowSubset | None


@dataclass(frozen=True, slots=True)
class ForbiddenStops:
    """Stop tokens that a row must not yield before a position (``min_tokens``).

    One entry per (row, token id); ``until[i]`` is the first position where it is allowed.
    """

    rows: np.ndarray
    token_ids: np.ndarray
    until: np.ndarray

    def find(self, positions: np.ndarray, device: torch.device) -> Cells | None:
        """Return what is forbidden to rows at these positions; None: nothing any more."""
        is_early = positions[self.rows] < self.until
        if not is_early.any():
            return None
        return Cells(
            upload(self.rows[is_early], device),
            upload(self.token_ids[is_early], device),
        )


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """The sampling of one batch.

    Attributes:
        num_rows: Rows of logits.
        random: The rows to sample; None when all are greedy.
        forbidden_stops: None when no row has ``min_tokens``.
        num_logprobs: int64 ``[num_rows]``: most likely tokens to report beside the sampled one,
            -1 for rows that asked for none; None when no row asked.
        logprob_ids: Of rows that name the tokens to report, int64, as many as ``num_logprobs``.
        edits: None when no row has a bias, allowed tokens or bad words.
    """

    num_rows: int
    random: RandomRows | None
    forbidden_stops: ForbiddenStops | None
    num_logprobs: np.ndarray | None
    edits: FixedEdits | None = None
    logprob_ids: Mapping[int, np.ndarray] = field(default_factory=dict)

    @classmethod
    def build(
        cls, rows: Sequence[RowSampling], vocab_size: int, device: torch.device | str
    ) -> Self:
        """Lay out the parameters of the rows of a batch."""
        return cls(
            num_rows=len(rows),
            random=_build_random(rows, vocab_size, torch.device(device)),
            forbidden_stops=_build_forbidden(rows, vocab_size),
            num_logprobs=_build_logprobs(rows, vocab_size),
            edits=FixedEdits.build([r.edits for r in rows], vocab_size, torch.device(device)),
            logprob_ids={
                i: np.array(ids, dtype=np.int64)
                for i, row in enumerate(rows)
                if (ids := row.params.logprob_token_ids) is not None
            },
        )


def _build_random(
    rows: Sequence[RowSampling], vocab_size: int, device: torch.device
) -> RandomRows | None:
    indices = [i for i, row in enumerate(rows) if not row.params.is_greedy]
    if not indices:
        return None
    settings = RowSettings.build([rows[i].params for i in indices], vocab_size)
    return RandomRows(
        rows=None if len(indices) == len(rows) else upload(np.array(indices), device),
        rows_host=np.array(indices, dtype=np.int64),
        rng_keys=np.array([rows[i].rng_key for i in indices], dtype=np.uint64),
        settings=settings,
        temperature=upload(settings.temperature, device)[:, None],
        min_p=_subset(settings.min_p, settings.min_p > 0, device),
        top_k=_subset(settings.top_k, settings.top_k < vocab_size, device),
        top_p=_subset(settings.top_p, settings.top_p < 1, device),
    )


def _subset(values: np.ndarray, is_used: np.ndarray, device: torch.device) -> RowSubset | None:
    """Pick the rows that use a filter."""
    if not is_used.any():
        return None
    picked = values[is_used]
    return RowSubset(
        rows=None if is_used.all() else upload(np.flatnonzero(is_used), device),
        values=upload(picked, device),
        max_value=picked.max().item(),
    )


def _build_forbidden(rows: Sequence[RowSampling], vocab_size: int) -> ForbiddenStops | None:
    entries = [
        (i, token_id, row.num_prompt_tokens + row.params.min_tokens)
        for i, row in enumerate(rows)
        if row.params.min_tokens > 0
        for token_id in _stop_ids(row.params)
        if 0 <= token_id < vocab_size
    ]
    if not entries:
        return None
    indices, token_ids, until = np.array(entries, dtype=np.int64).T
    return ForbiddenStops(indices, token_ids, until)


def _stop_ids(params: SamplingParams) -> set[int]:
    ids = set(params.stop_token_ids or ())
    if params.eos_token_id is not None and not params.ignore_eos:
        ids.add(params.eos_token_id)
    return ids


def _build_logprobs(rows: Sequence[RowSampling], vocab_size: int) -> np.ndarray | None:
    if all(row.params.logprobs is None for row in rows):
        return None
    return np.array([count_logprobs(row.params.logprobs, vocab_size) for row in rows])


def count_logprobs(requested: int | None, vocab_size: int) -> int:
    """Return how many most likely tokens to report: -1 (all) and more than all are capped.

    None, no request, gives -1.
    """
    if requested is None:
        return -1
    return vocab_size if requested < 0 else min(requested, vocab_size)
