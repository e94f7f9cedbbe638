"""Log probabilities of chosen tokens, of the most likely ones beside them, and ranks."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch

from vllm.v1.outputs import LogprobsLists

_NO_IDS: Mapping[int, np.ndarray] = MappingProxyType({})


class TokenLogprobs(NamedTuple):
    """Per row: the chosen token in column 0, then the most likely tokens, best first."""

    token_ids: np.ndarray  # int64 [rows, k + 1]
    logprobs: np.ndarray  # float32 [rows, k + 1]
    ranks: np.ndarray  # int64 [rows], 1 = most likely


def gather_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_logprobs: int
) -> TokenLogprobs:
    """Look up log-softmax values.

    Args:
        logits: Raw fp32 ``[R, V]``.
        token_ids: int64 ``[R]``: the chosen tokens.
        num_logprobs: k, most likely tokens to list (0..V).
    """
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(1, token_ids[:, None])
    ranks = (logprobs > chosen).sum(-1) + 1
    top_values, top_ids = logprobs.topk(num_logprobs, dim=-1)
    return TokenLogprobs(
        torch.cat([token_ids[:, None], top_ids], 1).cpu().numpy(),
        torch.cat([chosen, top_values], 1).cpu().numpy(),
        ranks.cpu().numpy(),
    )


def gather_sampled_logprobs(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    num_logprobs: np.ndarray,
    logprob_ids: Mapping[int, np.ndarray] = _NO_IDS,
) -> LogprobsLists:
    """Look up the sampled tokens' log probabilities in the rows that asked.

    Args:
        logits: Raw fp32 ``[R, V]``.
        token_ids: int64 ``[R]``: the sampled tokens.
        num_logprobs: int ``[R]``: per row k, or -1 for none.
        logprob_ids: Rows that name their k tokens, int64 ``[k]``; the others get the most likely.

    Returns:
        Arrays of all R rows, as wide as the widest; cells that nobody asked for are 0.
    """
    num_rows, widest = len(num_logprobs), int(num_logprobs.max())
    ids = np.zeros((num_rows, widest + 1), dtype=np.int64)
    values = np.zeros((num_rows, widest + 1), dtype=np.float32)
    ranks = np.zeros(num_rows, dtype=np.int64)
    if logprob_ids:
        named = np.array(sorted(logprob_ids), dtype=np.int64)
        num_logprobs = num_logprobs.copy()
        num_logprobs[named] = -1
        is_asked = np.zeros_like(ids, dtype=bool)
        for row in named:
            ids[row, 1 : len(logprob_ids[row]) + 1] = logprob_ids[row]
            is_asked[row, : len(logprob_ids[row]) + 1] = True
        ids[named, 0] = token_ids[torch.from_numpy(named).to(logits.device)].cpu().numpy()
        found, ranks[named] = _look_up(logits, named, ids[named])
        values[named] = np.where(is_asked[named], found, 0)
    # Row sets by k: one whole-vocabulary request must not make the others pay for it.
    for count in np.unique(num_logprobs[num_logprobs >= 0]):
        rows = np.flatnonzero(num_logprobs == count)
        on_device = torch.from_numpy(rows).to(logits.device)
        top = gather_logprobs(logits[on_device], token_ids[on_device], int(count))
        ids[rows, : count + 1] = top.token_ids
        values[rows, : count + 1] = top.logprobs
        ranks[rows] = top.ranks
    return LogprobsLists(ids, values, ranks)


def _look_up(
    logits: torch.Tensor, rows: np.ndarray, token_ids: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return log probabilities ``[N, k]`` of given tokens of some rows, and ranks of the first."""
    logprobs = logits[torch.from_numpy(rows).to(logits.device)].log_softmax(-1)
    found = logprobs.gather(1, torch.from_numpy(token_ids).to(logits.device))
    ranks = (logprobs > found[:, :1]).sum(-1) + 1
    return found.cpu().numpy(), ranks.cpu().numpy()
