"""What one engine step, and each request that ended in it, contributed: times and counts.

All times are seconds of the monotonic clock, which the front end and the engine core share on one
machine. A request's life:

    arrival   queued      scheduled       first token      last token    finished
      |--------|---queue----|----prefill-----|-----decode------|------------|
      |-------------- time to first token ---|
      |--------------------------------- end to end ------------------------|
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm.v1.messages import (
    EngineCoreEventType,
    EngineCoreOutput,
    FinishReason,
    PrefillStats,
)


@dataclass(slots=True)
class RequestStateStats:
    """Times and counts of one request so far; 0.0 marks a stage not reached.

    Attributes:
        num_drafts: Steps that verified draft tokens.
        num_draft_tokens: Draft tokens verified.
        num_accepted_tokens: Of those, tokens that became part of the answer.
    """

    arrival_time: float = 0.0
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    num_generation_tokens: int = 0
    num_preemptions: int = 0
    first_token_latency: float = 0.0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    @property
    def mean_accepted_length(self) -> float | None:
        """Tokens a verified draft brought on average, the model's own included; None: no draft."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else None


@dataclass(frozen=True, slots=True)
class RequestSummary:
    """A whole request, all its answers together, for who follows single ones.

    Attributes:
        request_id: As its caller named it.
        trace_headers: The caller's trace, if it has one.
        num_generation_tokens: Of all answers.
        num_cached_tokens: Prompt tokens that the first answer's admission found.
        time_to_first_token: Of the answer that ended last; None: it had none.
    """

    request_id: str
    trace_headers: Mapping[str, str]
    temperature: float
    top_p: float
    num_generation_tokens: int
    num_cached_tokens: int
    time_to_first_token: float | None


@dataclass(frozen=True, slots=True)
class FinishedRequestStats:
    """A request that ended. Times are seconds; 0.0 where a stage was not reached.

    Attributes:
        num_cached_tokens: Prompt tokens read from the prefix cache.
        max_tokens: The limit the request asked for, or was given.
        mean_time_per_output_token: Decode time over the tokens after the first.
        summary: Of the whole request, with the answer that ends it; None with others.
        tenant: Whose it is, if anybody's.
        open_part: What went on in JSON that a limit cut off; None: there is no such.
    """

    finish_reason: FinishReason
    e2e_latency: float = 0.0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generation_tokens: int = 0
    max_tokens: int | None = None
    queued_time: float = 0.0
    prefill_time: float = 0.0
    inference_time: float = 0.0
    decode_time: float = 0.0
    mean_time_per_output_token: float = 0.0
    num_preemptions: int = 0
    n: int = 1
    summary: RequestSummary | None = None
    tenant: str | None = None
    open_part: str | None = None


@dataclass(slots=True)
class IterationStats:
    """Sums and samples of one step.

    Attributes:
        iteration_timestamp: Monotonic time at which the outputs reached the front end.
        num_prompt_tokens: Tokens of prompts whose prefill ended in this step.
        num_cached_prompt_tokens: Of those, read from the prefix cache.
        num_external_prompt_tokens: Of those, loaded by a KV connector.
        external_sources: Those by where they lay, as far as the connector tells.
        num_preemptions: Requests set back in this step.
        rejection_reason: The limit that a request met which was turned away.
        max_num_generation_tokens_iter: Longest answer so far, of each request that ended.
        n_params_iter: ``n`` of each request that ended.
        time_to_first_tokens_iter: A sample for each first token.
        predictions_iter: Of each first token whose hit was foretold: how it came out, and by how
            many tokens it was off.
        inter_token_latencies_iter: A sample for each later output of a request.
        tenant_first_tokens_iter: Of each first token of a tenant's: whose, and after how long.
        tenant_rejections_iter: Requests of tenants that were turned away: whose, and the limit.
    """

    iteration_timestamp: float = field(default_factory=time.monotonic)
    num_generation_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0
    num_external_prompt_tokens: int = 0
    external_sources: dict[str, int] = field(default_factory=dict)
    num_preemptions: int = 0
    rejection_reason: str | None = None
    finished_requests: list[FinishedRequestStats] = field(default_factory=list)
    max_num_generation_tokens_iter: list[int] = field(default_factory=list)
    n_params_iter: list[int] = field(default_factory=list)
    time_to_first_tokens_iter: list[float] = field(default_factory=list)
    predictions_iter: list[tuple[str, int]] = field(default_factory=list)
    inter_token_latencies_iter: list[float] = field(default_factory=list)
    tenant_first_tokens_iter: list[tuple[str, float]] = field(default_factory=list)
    tenant_rejections_iter: list[tuple[str, str]] = field(default_factory=list)

    @property
    def num_computed_prompt_tokens(self) -> int:
        """Prompt tokens that had to be computed."""
        return self.num_prompt_tokens - self.num_cached_prompt_tokens

    def update_from_output(
        self,
        output: EngineCoreOutput,
        timestamp: float,
        num_prompt_tokens: int,
        prefill_stats: PrefillStats | None,
        stats: RequestStateStats,
        tenant: str | None = None,
    ) -> None:
        """Count one request's share of a step.

        Args:
            output: What the engine core sent for the request.
            timestamp: Monotonic time at which the core made it.
            num_prompt_tokens: Length of the request's prompt; 0 if another answer counts it.
            prefill_stats: Where its prompt tokens came from, once known.
            stats: The request's record; updated.
            tenant: Whose request it is, if anybody's.
        """
        for event in output.events or ():
            if event.type == EngineCoreEventType.QUEUED:
                stats.queued_ts = event.timestamp
            elif event.type == EngineCoreEventType.SCHEDULED:
                # A preempted request is scheduled again; its queue time ended the first time.
                stats.scheduled_ts = stats.scheduled_ts or event.timestamp
            else:
                stats.num_preemptions += 1
                self.num_preemptions += 1
        if output.num_draft_tokens:
            stats.num_drafts += 1
            stats.num_draft_tokens += output.num_draft_tokens
            stats.num_accepted_tokens += output.num_accepted_tokens
        num_new_tokens = len(output.new_token_ids)
        has_vectors = output.pooled is not None and output.finished
        if num_new_tokens == 0 and not has_vectors:
            return
        self.num_generation_tokens += num_new_tokens
        if stats.num_generation_tokens == 0:
            self._count_prefill(num_prompt_tokens, prefill_stats)
            stats.first_token_ts = timestamp
            stats.first_token_latency = self.iteration_timestamp - stats.arrival_time
            self.time_to_first_tokens_iter.append(stats.first_token_latency)
            if tenant is not None:
                self.tenant_first_tokens_iter.append((tenant, stats.first_token_latency))
        else:
            self.inter_token_latencies_iter.append(timestamp - stats.last_token_ts)
        stats.last_token_ts = timestamp
        stats.num_generation_tokens += num_new_tokens

    def _count_prefill(self, num_prompt_tokens: int, prefill_stats: PrefillStats | None) -> None:
        self.num_prompt_tokens += num_prompt_tokens
        if prefill_stats is not None:
            self.num_cached_prompt_tokens += prefill_stats.num_cached_tokens
            self.num_external_prompt_tokens += prefill_stats.num_external_tokens
            for source, count in prefill_stats.external_sources.items():
                self.external_sources[source] = self.external_sources.get(source, 0) + count
            if prefill_stats.predicted_tokens is not None:
                off = abs(prefill_stats.num_cached_tokens - prefill_stats.predicted_tokens)
                self.predictions_iter.append((prefill_stats.prediction, off))

    def update_from_finished_request(
        self,
        finish_reason: FinishReason,
        num_prompt_tokens: int,
        max_tokens: int | None,
        stats: RequestStateStats,
        num_cached_tokens: int = 0,
        n: int = 1,
        summary: RequestSummary | None = None,
        tenant: str | None = None,
        open_part: str | None = None,
    ) -> None:
        """Count a request (one of ``n`` answers) that ended."""
        num_later_tokens = stats.num_generation_tokens - 1
        decode_time = _span(stats.first_token_ts, stats.last_token_ts)
        self.finished_requests.append(
            FinishedRequestStats(
                finish_reason=finish_reason,
                e2e_latency=self.iteration_timestamp - stats.arrival_time,
                num_prompt_tokens=num_prompt_tokens,
                num_cached_tokens=num_cached_tokens,
                num_generation_tokens=stats.num_generation_tokens,
                max_tokens=max_tokens,
                queued_time=_span(stats.queued_ts, stats.scheduled_ts),
                prefill_time=_span(stats.scheduled_ts, stats.first_token_ts),
                inference_time=_span(stats.scheduled_ts, stats.last_token_ts),
                decode_time=decode_time,
                mean_time_per_output_token=(
                    decode_time / num_later_tokens if num_later_tokens > 0 else 0.0
                ),
                num_preemptions=stats.num_preemptions,
                n=n,
                summary=summary,
                tenant=tenant,
                open_part=open_part,
            )
        )
        self.max_num_generation_tokens_iter.append(stats.num_generation_tokens)
        self.n_params_iter.append(n)


def _span(start: float, end: float) -> float:
    """Seconds between two stages; 0.0 unless both were reached."""
    return max(0.0, end - start) if start and end else 0.0
