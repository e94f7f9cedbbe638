"""Stop rules: when a request has generated enough."""

from __future__ import annotations

from collections.abc import Sequence

from vllm.sampling_params import RepetitionDetectionParams
from vllm.v1.request import Request, RequestStatus


def check_sequence_repetition(token_ids: Sequence[int], params: RepetitionDetectionParams) -> bool:
    """Whether some pattern repeats at the end of a sequence.

    Args:
        token_ids: The sequence.
        params: Pattern lengths ``min_pattern_size or 1`` to ``max_pattern_size`` are tried; one
            must stand ``min_count`` times in a row at the end. Off when ``max_pattern_size`` is 0
            or ``min_count`` is below 2.
    """
    longest, count = params.max_pattern_size, params.min_count
    if longest <= 0 or count < 2:
        return False
    tail = list(token_ids[-longest * count :])
    for size in range(params.min_pattern_size or 1, longest + 1):
        if size * count > len(tail):
            return False
        if tail[-1] != tail[-1 - size]:
            continue
        # Equal to itself shifted by one pattern = the pattern repeated.
        end = tail[-size * count :]
        if end[size:] == end[:-size]:
            return True
    return False


def check_stop(request: Request, max_model_len: int) -> bool:
    """End a request whose last token meets a stop rule.

    Args:
        request: The request; its status and stop reason are set when it ends.
        max_model_len: Most tokens, prompt included.

    Returns:
        Whether it ended.
    """
    params = request.sampling_params
    assert params is not None
    if request.pooling_params is not None:
        # Its token stands for the vectors that have come, and is nobody's.
        request.finish(RequestStatus.FINISHED_STOPPED)
        return True
    num_output_tokens = request.num_output_tokens
    if num_output_tokens < params.min_tokens:
        # Requests whose min_tokens do not fit into the model's length are refused on entry.
        return False
    last_token_id = request.output_token_ids[-1]
    if params.eos_token_id is not None and last_token_id == params.eos_token_id:
        request.finish(RequestStatus.FINISHED_STOPPED)
        return True
    if params.stop_token_ids and last_token_id in params.stop_token_ids:
        request.finish(RequestStatus.FINISHED_STOPPED, stop_reason=last_token_id)
        return True
    if request.num_tokens >= max_model_len or num_output_tokens >= request.max_tokens:
        request.finish(RequestStatus.FINISHED_LENGTH_CAPPED)
        return True
    repetition = params.repetition_detection
    if repetition is not None and check_sequence_repetition(request.output_token_ids, repetition):
        request.finish(RequestStatus.FINISHED_REPETITION, stop_reason="repetition_detected")
        return True
    return False
