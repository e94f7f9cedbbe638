"""From a worker's rows of a whole step to those of one request: log probabilities, vectors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.messages import LogprobsRows, PooledRows

if TYPE_CHECKING:
    from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
    from vllm.v1.request import Request


def num_columns(num_logprobs: int) -> int | None:
    """Return the columns of ``num_logprobs`` alternatives and the token itself; None: all."""
    return None if num_logprobs < 0 else num_logprobs + 1


def slice_logprobs(
    output: ModelRunnerOutput, index: int, num_tokens: int, num_logprobs: int
) -> LogprobsRows | None:
    """Cut out the rows of one request's accepted tokens.

    Args:
        output: The step's output.
        index: The request's position in it.
        num_tokens: Tokens that were accepted; rows of further ones are dropped.
        num_logprobs: Alternatives the request asked for, -1 for all.
    """
    table = output.logprobs
    if table is None:
        return None
    first = _first_row(table, output.sampled_token_ids, index)
    rows = slice(first, first + num_tokens)
    columns = slice(num_columns(num_logprobs))
    return LogprobsRows(
        token_ids=table.logprob_token_ids[rows, columns].tolist(),
        logprobs=table.logprobs[rows, columns].tolist(),
        ranks=table.sampled_token_ranks[rows].tolist(),
    )


def _first_row(table: LogprobsLists, sampled_token_ids: list[list[int]], index: int) -> int:
    if table.cu_num_generated_tokens is not None:
        return table.cu_num_generated_tokens[index]
    return sum(map(len, sampled_token_ids[:index]))


def prompt_rows(tensors: Any, num_logprobs: int) -> LogprobsRows:
    """Convert a chunk's prompt log probabilities.

    Args:
        tensors: Arrays or tensors (token ids ``[n, k + 1]``, log probabilities ``[n, k + 1]``,
            ranks ``[n]``).
        num_logprobs: Alternatives the request asked for, -1 for all.
    """
    token_ids, logprobs, ranks = tensors
    columns = slice(num_columns(num_logprobs))
    return LogprobsRows(
        token_ids=token_ids[:, columns].tolist(),
        logprobs=logprobs[:, columns].tolist(),
        ranks=ranks.tolist(),
    )


def pooled_rows(request: Request, output: ModelRunnerOutput, *, is_last: bool) -> PooledRows | None:
    """Take the vectors that a step gave a request; None: it gave none that are wanted.

    Args:
        request: The request.
        output: The step's output.
        is_last: Whether the request ends with them. A last token's vector that comes to one that
            goes on was computed over rows that were given up since: another one will come.
    """
    if request.pooling_params is None or output.pooler_output is None:
        return None
    rows: Any = output.pooler_output[output.req_id_to_index[request.request_id]]
    if rows is None or not (is_last or request.reads_all_rows):
        return None
    return PooledRows(len(rows), rows.astype("<f4", copy=False).tobytes())
