"""Counting the tokens of one HTTP request."""

import sys
from collections import Counter
from collections.abc import Sequence

from msgspec import UnsetType

from vllm.entrypoints.openai.answer_metrics import AnswerMetrics, answer_metrics
from vllm.entrypoints.openai.engine_stream import JobOutput
from vllm.entrypoints.openai.protocol.responses import (
    CompletionTokensDetails,
    PromptTokensDetails,
    Usage,
)
from vllm.v1.messages import PrefillStats
from vllm.v1.metrics.iteration_stats import RequestStateStats


class UsageCounter:
    """Tokens of all prompts (each counted once, whatever ``n``) and of all answers.

    Args:
        prompt_lens: Length of each prompt in tokens.
        shows_misses: Whether to say why prompt tokens had to be computed.
        counts_answers: Whether the answers were asked for: a prompt's log probabilities come with
            the first token of one.
        cache_unit: Tokens that the prefix cache keeps at once, to say how many were written; 0:
            none are, None: it is not told.
        insert_end: Tokens up to which they are.
    """

    def __init__(
        self,
        prompt_lens: Sequence[int],
        *,
        shows_misses: bool = False,
        counts_answers: bool = True,
        cache_unit: int | None = None,
        insert_end: int = sys.maxsize,
    ) -> None:
        self._num_prompt_tokens = sum(prompt_lens)
        self._shows_misses = shows_misses
        self._num_cached = [0] * len(prompt_lens)
        self._prefills: list[PrefillStats | None] = [None] * len(prompt_lens)
        self._num_completion_tokens = 0
        self._last: RequestStateStats | None = None
        self._counts_answers = counts_answers
        self._prompt_lens, self._cache_unit = prompt_lens, cache_unit
        self._insert_end = insert_end
        self._num_reasoning: dict[int, int] = {}

    def add(self, item: JobOutput) -> None:
        """Count one output; every answer token must come once (deltas, or final outputs)."""
        if item.output.num_cached_tokens is not None:
            self._num_cached[item.job_index] = item.output.num_cached_tokens
        self._prefills[item.job_index] = item.output.prefill_stats
        self._last = item.output.metrics
        if self._counts_answers:
            self._num_completion_tokens += sum(len(o.token_ids) for o in item.output.outputs)

    def count_reasoning(self, index: int, num_tokens: int) -> None:
        """Note how many tokens of an answer are reasoning so far."""
        self._num_reasoning[index] = num_tokens

    @property
    def usage(self) -> Usage:
        """The counts so far; prompts without an answer yet count as computed, for no reason yet."""
        num_cached = sum(self._num_cached)
        usage = Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=self._num_completion_tokens,
            total_tokens=self._num_prompt_tokens + self._num_completion_tokens,
            prompt_tokens_details=self._details(),
            prompt_cache_hit_tokens=num_cached,
            prompt_cache_miss_tokens=self._num_prompt_tokens - num_cached,
        )
        if self._num_reasoning:
            total = sum(self._num_reasoning.values())
            usage.completion_tokens_details = CompletionTokensDetails(total)
        return usage

    @property
    def metrics(self) -> AnswerMetrics | UnsetType:
        """Times of the answer that was counted last."""
        return answer_metrics(self._last)

    def _details(self) -> PromptTokensDetails:
        details = PromptTokensDetails(sum(self._num_cached))
        if (unit := self._cache_unit) is not None:
            pairs = zip(self._prompt_lens, self._num_cached, strict=True)
            ends = [(min(num, self._insert_end), cached) for num, cached in pairs]
            full = [(end // unit * unit if unit else 0, cached) for end, cached in ends]
            details.cache_write_tokens = sum(max(end - cached, 0) for end, cached in full)
        if self._shows_misses:
            known = [prefill for prefill in self._prefills if prefill is not None]
            details.dense_match_tokens = sum(prefill.dense_match_tokens for prefill in known)
            if num_external := sum(prefill.num_external_tokens for prefill in known):
                details.external_tokens = num_external
            if sources := sum((Counter(p.external_sources) for p in known), Counter()):
                details.external_sources = dict(sources)
            if encoder_s := sum(prefill.encoder_s for prefill in known):
                details.encoder_seconds = round(encoder_s, 3)
            foretold = [p for p in known if p.predicted_tokens is not None]
            if foretold:
                details.predicted_tokens = sum(p.predicted_tokens or 0 for p in foretold)
                details.prediction = ", ".join(sorted({p.prediction for p in foretold}))
            details.miss_tokens = dict(sum((Counter(p.miss_tokens) for p in known), Counter()))
        return details
