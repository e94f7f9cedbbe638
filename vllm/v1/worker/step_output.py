"""From sampled rows to each request's new tokens: drafts are kept or dropped here."""

from collections.abc import Sequence

import numpy as np

from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.sample.sampler import SamplerOutput
from vllm.v1.worker.step_input import StepInput

# Ends a request for vectors; nobody is told of it.
_NO_TOKEN = 0


def accept_tokens(step: StepInput, sampled: SamplerOutput | None) -> ModelRunnerOutput:
    """Give each request its tokens.

    A draft stands while it equals the token sampled at its position; the first sampled token that
    differs ends the request's step. Every token emitted is thus one the target model sampled.

    Mutates: the requests' known tokens.
    """
    token_ids = [] if sampled is None else sampled.token_ids.tolist()
    accepted: list[list[int]] = []
    row = 0
    for state, count, drafts in zip(step.requests, step.sampled_counts, step.drafts, strict=True):
        if count == 1:
            tokens = [token_ids[row]]
            state.append_token(token_ids[row])
        else:
            tokens = token_ids[row : row + _count_accepted(token_ids, row, count, drafts)]
            state.append_tokens(tokens)
        accepted.append(tokens)
        row += count
    return find_outputs(step, sampled, accepted)


def find_outputs(
    step: StepInput, sampled: SamplerOutput | None, accepted: list[list[int]]
) -> ModelRunnerOutput:
    """Return what a step gave its requests, their tokens being known."""
    req_ids = [state.req_id for state in step.requests]
    logprobs = _keep_logprobs(sampled, step.sampled_counts, accepted)
    for place in step.ended:
        # To the scheduler a request for vectors is one whose answer has one token.
        accepted[place] = [_NO_TOKEN]
    return ModelRunnerOutput(
        req_ids=req_ids,
        req_id_to_index={req_id: i for i, req_id in enumerate(req_ids)},
        sampled_token_ids=accepted,
        logprobs=logprobs,
    )


def _count_accepted(
    token_ids: Sequence[int], first_row: int, count: int, drafts: Sequence[int]
) -> int:
    """Return how many of a request's sampled tokens count: the matching drafts' and one more."""
    if count == 0:
        return 0
    for i, draft in enumerate(drafts):
        if token_ids[first_row + i] != draft:
            return i + 1
    return count


def _keep_logprobs(
    sampled: SamplerOutput | None, counts: Sequence[int], accepted: list[list[int]]
) -> LogprobsLists | None:
    if sampled is None or sampled.logprobs is None:
        return None
    ids, values, ranks, _ = sampled.logprobs
    kept_rows: list[int] = []
    row = 0
    for count, tokens in zip(counts, accepted, strict=True):
        kept_rows += range(row, row + len(tokens))
        row += count
    if len(kept_rows) < len(ranks):
        ids, values, ranks = ids[kept_rows], values[kept_rows], ranks[kept_rows]
    bounds = np.cumsum([0, *(len(tokens) for tokens in accepted)]).tolist()
    return LogprobsLists(ids, values, ranks, bounds)
