"""The structs that cross between the front end and the engine core (ZMQ + msgpack)."""

import time
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, Self

import msgspec

from vllm.multimodal.inputs import ImageFeature
from vllm.sampling_params import SamplingParams
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.request_options import NO_OPTIONS, RequestOptions

# Reasons of a miss, as they appear in metrics and in usage records.
FIRST_SEEN = "first_seen"
EVICTED = "evicted"
WINDOW_NOT_RETAINED = "window_not_retained"
WINDOW_EVICTED = "window_evicted"
# There were rows of some layers: the request ends too soon behind them to do without the others.
WINDOW_PARTIAL = "window_partial"
WINDOW_REBUILT = "window_rebuilt"
# The same of a recurrent state, which no few tokens bring back.
STATE_NOT_RETAINED = "state_not_retained"
STATE_EVICTED = "state_evicted"
ABOVE_LAST_BOUNDARY = "above_last_boundary"
DRAFTER = "drafter"
BYPASSED = "bypassed"
# A connector loads it (in the local cache's statistics), or did not (in the request's record).
EXTERNAL = "external"
# A tier behind the pool had it once, had it wrong, did not give it, or would have been slower.
EVICTED_FROM_DISK = "evicted_from_disk"
CORRUPT = "corrupt"
RESTORE_FAILED = "restore_failed"
RESTORE_DECLINED = "restore_declined"
# In the order in which they lie in a prompt, behind the hit.
MISS_REASONS = (
    BYPASSED,
    WINDOW_REBUILT,
    DRAFTER,
    EXTERNAL,
    CORRUPT,
    RESTORE_FAILED,
    RESTORE_DECLINED,
    EVICTED_FROM_DISK,
    WINDOW_PARTIAL,
    WINDOW_EVICTED,
    WINDOW_NOT_RETAINED,
    STATE_EVICTED,
    STATE_NOT_RETAINED,
    EVICTED,
    FIRST_SEEN,
    ABOVE_LAST_BOUNDARY,
)


class FinishReason(IntEnum):
    """Why a request ended."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4

    def __str__(self) -> str:
        return self.name.lower()


class EngineCoreEventType(IntEnum):
    """Stages of a request inside the engine core."""

    QUEUED = 1
    SCHEDULED = 2
    PREEMPTED = 3


class EngineCoreEvent(msgspec.Struct, frozen=True):
    """A stage of a request, with a monotonic clock in seconds (comparable on one machine)."""

    type: EngineCoreEventType
    timestamp: float

    @classmethod
    def new_event(
        cls, event_type: EngineCoreEventType, timestamp: float | None = None
    ) -> "EngineCoreEvent":
        """Stamp an event now, or with the given monotonic time."""
        return cls(event_type, time.monotonic() if timestamp is None else timestamp)


class PrefillStats(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a request's prompt tokens came from, committed once, at admission.

    ``num_cached_tokens + sum(miss_tokens.values()) == num_prompt_tokens``, exactly.

    Attributes:
        num_prompt_tokens: Tokens the request was admitted with.
        num_cached_tokens: Of those, not computed: read from the prefix cache, or loaded.
        dense_match_tokens: How far the dense groups alone matched.
        miss_tokens: Tokens by reason of their miss.
        num_external_tokens: Of ``num_cached_tokens``, loaded by a KV connector.
        rebuild_saved_tokens: Of ``num_cached_tokens``, hit because window rows above them, counted
            as missed, are computed again.
        external_sources: ``num_external_tokens`` by where they lay, if the connector tells.
        predicted_tokens: What a router in front of several cores had foretold; None: there is none.
        prediction: Whether that came, "exact", or why not (``Router``).
        encoder_s: Seconds that towers ran for its pictures before its first token.
    """

    num_prompt_tokens: int
    num_cached_tokens: int
    dense_match_tokens: int = 0
    miss_tokens: dict[str, int] = {}
    num_external_tokens: int = 0
    rebuild_saved_tokens: int = 0
    external_sources: dict[str, int] = {}
    predicted_tokens: int | None = None
    prediction: str = ""
    encoder_s: float = 0.0

    def hit_sources(self) -> dict[str, int]:
        """Return ``num_cached_tokens`` by where they came from; those of the pool are the first.

        "external" is what a connector loaded without telling from where.
        """
        num_untold = self.num_external_tokens - sum(self.external_sources.values())
        found = {
            "pool": self.num_cached_tokens - self.num_external_tokens,
            **self.external_sources,
            "external": num_untold,
        }
        return {source: count for source, count in found.items() if count}


class HeldPrefix(msgspec.Struct, frozen=True):
    """A prefix that somebody asked to keep.

    Attributes:
        id: Of the request that asked for it.
        num_tokens: Tokens that a prompt with it need not compute.
        num_blocks: Blocks under its pin.
        is_pinned: Whether its blocks are reused after all others.
        expires_in: Seconds until it is as any other; None: it stays, or it is that now.
        num_hits: Requests that resumed at its end.
    """

    id: str
    num_tokens: int
    num_blocks: int
    is_pinned: bool
    expires_in: float | None
    num_hits: int


class PopularPrefix(msgspec.Struct, frozen=True):
    """A much used prefix that one engine core holds for another to pull.

    Attributes:
        hashes: Of its units, from the first on.
        conversation: Number of the conversation it is of, among those that were offered with it.
        engine_id: Who holds it.
        instance: Its run.
        host: Where it answers.
        port: Where its first worker does.
        lease: What it calls the prefix.
        num_tokens: Tokens of the prefix.
        next_token: The token its drafter saw behind the prefix; None: none, or not known.
        num_blocks: Blocks that it takes.
        weight: How much it was used of late.
    """

    hashes: list[bytes]
    conversation: int
    engine_id: str
    instance: str
    host: str
    port: int
    lease: str
    num_tokens: int
    next_token: int | None
    num_blocks: int
    weight: float


class EngineCoreRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """A validated, tokenized request on its way to the engine core.

    Attributes:
        is_extra_answer: Whether it is one of ``n`` answers to a prompt, and not the first: the
            prompt is counted once.
        block_hashes: Of the prompt's full units, where the front end has them already.
        tenant: Whose request it is, where several share the server; None: nobody's in particular.
        options: What its client says of it.
        images: Its pictures, in their order in the prompt.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    arrival_time: float
    client_index: int = 0
    is_extra_answer: bool = False
    block_hashes: list[bytes] = []
    tenant: str | None = None
    options: RequestOptions = NO_OPTIONS
    images: list[ImageFeature] = []


class LogprobsRows(msgspec.Struct, frozen=True):
    """Log probabilities of consecutive tokens; row i is token i, column 0 the token itself."""

    token_ids: list[list[int]]
    logprobs: list[list[float]]
    ranks: list[int]


class PooledRows(msgspec.Struct, frozen=True):
    """Vectors of consecutive prompt tokens, or of the last: ``num_rows`` of equal width.

    Attributes:
        data: float32, little-endian, row by row.
    """

    num_rows: int
    data: bytes

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Put rows one behind another."""
        return cls(sum(part.num_rows for part in parts), b"".join(part.data for part in parts))


class EngineCoreOutput(msgspec.Struct, omit_defaults=True):
    """What one step added to one request.

    Attributes:
        pooled: Vectors of its prompt, behind those that came before.
        num_draft_tokens: Draft tokens that the step verified.
        num_accepted_tokens: Of those, tokens the model agreed with, up to the end of the answer.
    """

    request_id: str
    new_token_ids: list[int]
    new_logprobs: LogprobsRows | None = None
    new_prompt_logprobs: LogprobsRows | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    events: list[EngineCoreEvent] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    prefill_stats: PrefillStats | None = None
    num_preemptions: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    pooled: PooledRows | None = None

    @property
    def finished(self) -> bool:
        """Whether this is the request's last output."""
        return self.finish_reason is not None


class EngineCoreOutputs(msgspec.Struct, omit_defaults=True):
    """One step's outputs for one client."""

    outputs: list[EngineCoreOutput] = []
    scheduler_stats: SchedulerStats | None = None
    finished_requests: set[str] | None = None
    timestamp: float = 0.0
    engine_index: int = 0

    def __post_init__(self) -> None:
        if self.timestamp == 0.0:
            self.timestamp = time.monotonic()
