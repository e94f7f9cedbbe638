"""Times of one answer, for clients that ask where they went (``--enable-per-request-metrics``)."""

import msgspec
from msgspec import UNSET, UnsetType

from vllm.v1.metrics.iteration_stats import RequestStateStats


class AnswerMetrics(msgspec.Struct):
    """Of one answer, in milliseconds; a stage that was not reached is left out.

    Attributes:
        queue_time_ms: From the arrival in the queue to the first step.
        prefill_time_ms: From there to the first token.
        time_to_first_token_ms: From the request's arrival to its first token.
        decode_time_ms: From the first token to the last.
        mean_itl_ms: Decode time over the tokens after the first.
        num_generation_tokens: Of the answer.
        num_preemptions: How often it was set back.
    """

    num_generation_tokens: int
    num_preemptions: int
    queue_time_ms: float | UnsetType = UNSET
    prefill_time_ms: float | UnsetType = UNSET
    time_to_first_token_ms: float | UnsetType = UNSET
    decode_time_ms: float | UnsetType = UNSET
    mean_itl_ms: float | UnsetType = UNSET


def answer_metrics(stats: RequestStateStats | None) -> AnswerMetrics | UnsetType:
    """Return the times of an answer that ended; UNSET where nothing was measured."""
    if stats is None:
        return UNSET
    decode_ms = _span_ms(stats.first_token_ts, stats.last_token_ts)
    num_later = stats.num_generation_tokens - 1
    mean = decode_ms / num_later if decode_ms is not UNSET and num_later > 0 else UNSET
    first = stats.first_token_latency
    return AnswerMetrics(
        num_generation_tokens=stats.num_generation_tokens,
        num_preemptions=stats.num_preemptions,
        queue_time_ms=_span_ms(stats.queued_ts, stats.scheduled_ts),
        prefill_time_ms=_span_ms(stats.scheduled_ts, stats.first_token_ts),
        time_to_first_token_ms=_round(first * 1e3) if first else UNSET,
        decode_time_ms=decode_ms,
        mean_itl_ms=mean if mean is UNSET else _round(mean),
    )


def _span_ms(start: float, end: float) -> float | UnsetType:
    """Between two stages; UNSET unless both were reached."""
    return _round(max(0.0, end - start) * 1e3) if start and end else UNSET


def _round(value_ms: float) -> float:
    return round(value_ms, 3)
