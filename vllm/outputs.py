"""What a caller gets back for a request."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.messages import PooledRows, PrefillStats
    from vllm.v1.metrics.iteration_stats import RequestStateStats


@dataclass(slots=True)
class Logprob:
    """The log probability of one token at one position.

    Attributes:
        logprob: Natural logarithm of the probability, before penalties and temperature.
        rank: 1 for the most likely token of the vocabulary; None when unknown.
        decoded_token: The token as text; bytes that are no whole character show as U+FFFD.
        token_bytes: The token's exact bytes; None without a tokenizer.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None
    token_bytes: bytes | None = None


# Per position: the token there first, then the most likely ones.
TokenLogprobs = dict[int, Logprob]
SampleLogprobs = list[TokenLogprobs]
# The first prompt token has no probability.
PromptLogprobs = list[TokenLogprobs | None]


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's ``n`` answers: all of it, or what is new (``RequestOutputKind.DELTA``).

    Attributes:
        index: Which of the ``n``.
        finish_reason: "stop", "length", "abort", "error" or "repetition"; None while it runs.
        stop_reason: The stop string or stop token id that ended it, what repeated, or what went on
            in JSON that a limit cut off; None for the end token.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None = None
    logprobs: SampleLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        """Whether this answer is complete."""
        return self.finish_reason is not None


@dataclass(slots=True)
class EmbeddingOutput:
    """A text's vector."""

    embedding: list[float]


@dataclass(slots=True)
class EmbeddingRequestOutput:
    """A request for a vector that is done.

    Attributes:
        num_cached_tokens: Tokens of the text that were read from the prefix cache.
    """

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int
    finished: bool = True


@dataclass(slots=True)
class RequestOutput:
    """A request's state, as far as it is known.

    Attributes:
        outputs: The answers this output brings news of (all ``n`` with FINAL_ONLY).
        finished: Whether every answer is complete.
        metrics: Times and counts of the request.
        num_cached_tokens: Prompt tokens read from the prefix cache; None before admission.
        num_cache_creation_tokens: Prompt tokens that had to be computed; None before admission.
        prefill_stats: Where the prompt tokens came from, one reason for each missed one.
        pooled: The vectors that were asked for in place of an answer.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] | None
    prompt_logprobs: PromptLogprobs | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: "RequestStateStats | None" = None
    num_cached_tokens: int | None = None
    num_cache_creation_tokens: int | None = None
    kv_transfer_params: dict[str, Any] | None = None
    prefill_stats: "PrefillStats | None" = field(default=None, repr=False)
    pooled: "PooledRows | None" = field(default=None, repr=False)

    def merge(self, later: "RequestOutput", *, deltas: bool) -> None:
        """Take in an output that followed before this one was read.

        Args:
            later: The following output of the same request.
            deltas: Whether outputs hold only what is new; else the later replaces the earlier.
        """
        self.finished |= later.finished
        self.metrics = later.metrics
        self.num_cached_tokens = later.num_cached_tokens
        self.num_cache_creation_tokens = later.num_cache_creation_tokens
        self.prefill_stats = later.prefill_stats
        self.pooled = later.pooled or self.pooled
        self.kv_transfer_params = later.kv_transfer_params or self.kv_transfer_params
        self.prompt_logprobs = later.prompt_logprobs or self.prompt_logprobs
        at = {output.index: i for i, output in enumerate(self.outputs)}
        for new in later.outputs:
            if new.index not in at:
                self.outputs.append(new)
            elif deltas:
                _extend(self.outputs[at[new.index]], new)
            else:
                self.outputs[at[new.index]] = new


def _extend(output: CompletionOutput, delta: CompletionOutput) -> None:
    output.text += delta.text
    output.token_ids = [*output.token_ids, *delta.token_ids]
    if delta.logprobs is not None:
        output.logprobs = [*(output.logprobs or ()), *delta.logprobs]
    output.cumulative_logprob = delta.cumulative_logprob
    output.finish_reason = delta.finish_reason
    output.stop_reason = delta.stop_reason
