"""Log probabilities of prompt tokens, chunk by chunk.

Row p of a prompt predicts token p + 1, so a prompt of n tokens has n - 1 rows (its first token is
predicted by nothing). Each step reports the rows it computed; logits are made in tiles, because a
chunk of 8,192 rows with a vocabulary of 129k would be 4 GB of them.
"""

from collections.abc import Callable

import numpy as np
import torch

from vllm.v1.sample.logprobs import TokenLogprobs, gather_logprobs
from vllm.v1.sample.metadata import count_logprobs
from vllm.v1.worker.request_state import RequestState
from vllm.v1.worker.step_input import StepInput

_TILE_BYTES = 64 << 20


def gather_prompt_logprobs(
    step: StepInput,
    streams: torch.Tensor,
    compute_logits: Callable[[torch.Tensor], torch.Tensor],
    vocab_size: int,
    tile_bytes: int = _TILE_BYTES,
) -> dict[str, TokenLogprobs]:
    """Look up the prompt rows of this step in the requests that asked.

    Args:
        step: The flat batch.
        streams: ``[T, n, D]`` of its rows.
        compute_logits: Streams of M rows to fp32 logits ``[M, V]``.
        vocab_size: V.
        tile_bytes: Bound on one tile's logits.

    Returns:
        By request; nothing for requests whose prompt rows are all reported.

    Mutates: the requests' ``num_prompt_logprobs``.
    """
    tile_rows = max(1, tile_bytes // (4 * vocab_size))
    found: dict[str, TokenLogprobs] = {}
    for state, part, row_start in zip(step.requests, step.slices, step.row_starts, strict=True):
        requested = state.sampling.params.prompt_logprobs
        if requested is None:
            continue
        first = max(part.start, state.num_prompt_logprobs)
        end = min(part.start + part.num_tokens, state.num_prompt_tokens - 1)
        if first >= end:
            continue
        rows = streams[row_start + first - part.start : row_start + end - part.start]
        count = count_logprobs(requested, vocab_size)
        found[state.req_id] = _gather(rows, state, first, count, compute_logits, tile_rows)
        state.num_prompt_logprobs = end
    return found


def _gather(
    streams: torch.Tensor,
    state: RequestState,
    first: int,
    num_logprobs: int,
    compute_logits: Callable[[torch.Tensor], torch.Tensor],
    tile_rows: int,
) -> TokenLogprobs:
    tiles = []
    for begin in range(0, len(streams), tile_rows):
        logits = compute_logits(streams[begin : begin + tile_rows])
        position = first + begin + 1
        targets = torch.from_numpy(state.get_tokens(position, position + len(logits)))
        tiles.append(gather_logprobs(logits, targets.to(logits.device), num_logprobs))
    return TokenLogprobs(*(np.concatenate(parts) for parts in zip(*tiles, strict=True)))
