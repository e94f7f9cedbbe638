"""A request inside the engine core: a sequence of tokens, its state, and how it ends."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum, auto
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import msgspec

from vllm.exceptions import UserInputError
from vllm.multimodal.comparison import FollowingTokens
from vllm.utils.hashing import BlockHash
from vllm.v1.messages import EngineCoreEvent, EngineCoreEventType, FinishReason, PrefillStats
from vllm.v1.request_options import (
    NO_OPTIONS,
    PoolingParams,
    RequestOptions,
    session_number,
)
from vllm.v1.sequence import TokenSequence
from vllm.v1.structured_output.reasoning import ReasoningTracker
from vllm.v1.structured_output.request import StructuredOutputRequest

if TYPE_CHECKING:
    import torch

    from vllm.lora.request import LoRARequest
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.sampling_params import SamplingParams
    from vllm.v1.messages import EngineCoreRequest


class RequestStatus(IntEnum):
    """Where a request stands; every value after PREEMPTED is an end."""

    WAITING = auto()
    WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR = auto()
    WAITING_FOR_REMOTE_KVS = auto()
    WAITING_FOR_STREAMING_REQ = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    FINISHED_STOPPED = auto()
    FINISHED_LENGTH_CAPPED = auto()
    FINISHED_ABORTED = auto()
    FINISHED_IGNORED = auto()
    FINISHED_ERROR = auto()
    FINISHED_REPETITION = auto()

    def __str__(self) -> str:
        return self.name

    @staticmethod
    def is_finished(status: RequestStatus) -> bool:
        """Whether this is an end."""
        return status > RequestStatus.PREEMPTED

    @staticmethod
    def get_finished_reason(status: RequestStatus) -> FinishReason | None:
        """Return how clients see this end, None before it."""
        return _FINISHED_REASONS.get(status)


# States in which a request waits for something other than room.
_BLOCKED = frozenset(
    {
        RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR,
        RequestStatus.WAITING_FOR_REMOTE_KVS,
        RequestStatus.WAITING_FOR_STREAMING_REQ,
    }
)

# A prompt longer than the model is ignored; clients see that the length ended it.
_FINISHED_REASONS: dict[RequestStatus, FinishReason] = {
    RequestStatus.FINISHED_STOPPED: FinishReason.STOP,
    RequestStatus.FINISHED_LENGTH_CAPPED: FinishReason.LENGTH,
    RequestStatus.FINISHED_ABORTED: FinishReason.ABORT,
    RequestStatus.FINISHED_IGNORED: FinishReason.LENGTH,
    RequestStatus.FINISHED_ERROR: FinishReason.ERROR,
    RequestStatus.FINISHED_REPETITION: FinishReason.REPETITION,
    RequestStatus.WAITING_FOR_STREAMING_REQ: FinishReason.STOP,
}


# Asked several times a token: a name of the module is quicker than one of the class.
_LAST_ALIVE = RequestStatus.PREEMPTED


class Request(TokenSequence):
    """One sequence to compute: who wants it, where it stands, how it ends.

    Owner: the Scheduler, through the methods below; a KV manager reads it. Compared and hashed by
    identity; ordered by priority, then arrival.

    Attributes:
        prefill_stats: Where the prompt's tokens came from, until it is sent with an output.
        encoder_s: Seconds that encoders ran for its items.
        num_scores: Alternatives that it wants of each prompt position, where log probabilities
            that are known let it hit all the same; None: it wants none, or reads nothing.
        is_extra_answer: Whether it is a further answer to a prompt that another request brought.
        tenant: Whose request it is; None: nobody's in particular.
        options: What its client said of it; those that the interface names are attributes too.
        session: Number of its session, where its name is not known: of a record.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int] | None,
        sampling_params: SamplingParams | None,
        pooling_params: Any = None,
        client_index: int = 0,
        arrival_time: float | None = None,
        prompt_embeds: torch.Tensor | None = None,
        prompt_is_token_ids: list[bool] | None = None,
        mm_features: list[MultiModalFeatureSpec] | None = None,
        lora_request: LoRARequest | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
        trace_headers: Mapping[str, str] | None = None,
        block_hasher: Callable[[Request], list[BlockHash]] | None = None,
        resumable: bool = False,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: dict[str, Any] | None = None,
        abort_immediately: bool = False,
        is_extra_answer: bool = False,
        cache_boundaries: Sequence[int] = (),
        cache_ttls: Mapping[int, float] | None = None,
        block_hashes: Sequence[BlockHash] = (),
        tenant: str | None = None,
        options: RequestOptions = NO_OPTIONS,
        session: int | None = None,
    ) -> None:
        super().__init__(request_id, prompt_token_ids, prompt_embeds, block_hasher, block_hashes)
        self.client_index = client_index
        self.priority = priority
        self.tenant = tenant
        self.options = options
        self.arrival_time = time.time() if arrival_time is None else arrival_time
        self.trace_headers = trace_headers
        self.abort_immediately = abort_immediately
        self.is_extra_answer = is_extra_answer
        # Offsets behind which others may go on otherwise, and seconds to keep some of them for.
        self.cache_boundaries = tuple(cache_boundaries)
        self.cache_ttls = dict(cache_ttls or {})

        self.sampling_params = sampling_params
        self.pooling_params = pooling_params or options.pooling
        self.lora_request = lora_request
        self.cache_salt = cache_salt
        self.max_tokens = 1
        self.kv_transfer_params: dict[str, Any] | None = None
        self.structured_output_request: StructuredOutputRequest | None = None
        self.status = RequestStatus.WAITING
        self._read_params(reasoning_ended, reasoning_parser_kwargs)
        self.prompt_is_token_ids = prompt_is_token_ids
        self.mm_features: list[MultiModalFeatureSpec] = mm_features or []
        self._mark_items()

        self.num_preemptions = self.next_decode_eligible_step = self.num_nans_in_logits = 0
        self.stop_reason: int | str | None = None
        self.events: list[EngineCoreEvent] = []
        self.prefill_stats: PrefillStats | None = None
        self.encoder_s = 0.0
        self.skip_reading_prefix_cache = self._skips_prefix_cache()
        self.num_scores = self._find_num_scores()
        # What it computes is published nowhere: no key, checkpoint, event, tier or record.
        self.skip_cache_insert = options.skip_cache_insert
        # Where that ends, of a request that leaves a beginning alone.
        end = options.cache_insert_end
        self.insert_end = sys.maxsize if end is None else end
        self.session = session
        if options.session_id is not None and not options.skip_cache_insert:
            self.session = session_number(options.session_id, tenant, cache_salt)
        # What it leaves goes first, as spare checkpoints do.
        self.is_spare = options.is_spare

        # A resumable request gets further input while it lives; None in the queue ends it.
        self.resumable = resumable
        self.streaming_queue: deque[Any] | None = deque() if resumable else None

        # Last: hashes cover multimodal items, the adapter and the salt too.
        self.update_block_hashes()

    def _read_params(
        self, reasoning_ended: bool | None, reasoning_parser_kwargs: dict[str, Any] | None
    ) -> None:
        """Take what the sampling or pooling parameters decide."""
        params = self.sampling_params
        if params is None:
            if self.pooling_params is None:
                raise UserInputError(
                    f"Request {self.request_id} has neither sampling_params nor pooling_params: "
                    "give one of them."
                )
            return
        if params.max_tokens is None:
            raise UserInputError(
                f"Request {self.request_id} has no max_tokens: resolve it against the model's "
                "context before the request enters the engine core.",
                "max_tokens",
            )
        self.max_tokens = params.max_tokens
        if params.extra_args is not None:
            self.kv_transfer_params = params.extra_args.get("kv_transfer_params")
        if params.structured_outputs is not None:
            self.structured_output_request = StructuredOutputRequest(
                params.structured_outputs,
                reasoning_ended=reasoning_ended,
                reasoning_parser_kwargs=reasoning_parser_kwargs,
            )
            if params.reasoning is not None:
                self.structured_output_request.reasoning = ReasoningTracker(params.reasoning)
                self.structured_output_request.reasoning_ended = False
            self.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR

    def _mark_items(self) -> None:
        """Mark items' ends: others may go on otherwise before them and behind them.

        Few marks leave a checkpoint, the first ones: two of the client's stay in front, then come
        the last item's, which nobody asked about before.
        """
        ends = [
            end
            for own in (feature.mm_position for feature in reversed(self.mm_features))
            for end in (own.offset + own.length, own.offset)
        ]
        if ends:
            given = self.cache_boundaries
            marks = (*given[:2], *ends[:2], *given[2:], *ends[2:])
            self.cache_boundaries = tuple(mark for mark in dict.fromkeys(marks) if mark)

    @property
    def text_owner(self) -> str | None:
        """Whose later requests may be drafted what stands in its text; None: nobody's.

        Drafts that stand come faster: as with hits, who sees that learns what somebody else wrote.
        """
        return self._owner() if self.leaves_all else None

    @property
    def reads_all_rows(self) -> bool:
        """Whether it wants something of every token of its prompt, of which caches tell nothing."""
        pooling = self.pooling_params
        return isinstance(pooling, PoolingParams) and pooling.all_rows

    @property
    def leaves_all(self) -> bool:
        """Whether all that it computes may be found by others."""
        return not self.skip_cache_insert and self.insert_end == sys.maxsize

    def _skips_prefix_cache(self) -> bool:
        """Whether what others left in caches is of no use to it, as far as it goes by itself."""
        if self.sampling_params is not None:
            # Logits exist for computed positions only: see num_scores.
            return bool(
                self.sampling_params.skip_reading_prefix_cache
                or self.sampling_params.prompt_logprobs is not None
                or self.reads_all_rows
            )
        return bool(getattr(self.pooling_params, "skip_reading_prefix_cache", None))

    def _find_num_scores(self) -> int | None:
        params = self.sampling_params
        if params is None or params.skip_reading_prefix_cache or params.prompt_logprobs == -1:
            return None
        return params.prompt_logprobs

    @classmethod
    def from_engine_core_request(
        cls,
        request: EngineCoreRequest,
        block_hasher: Callable[[Request], list[BlockHash]] | None,
    ) -> Request:
        """Build a request from its message."""
        return cls(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            sampling_params=request.sampling_params,
            client_index=request.client_index,
            arrival_time=request.arrival_time,
            cache_salt=request.options.cache_salt,
            priority=request.options.priority,
            trace_headers=request.options.trace_headers,
            block_hasher=block_hasher,
            is_extra_answer=request.is_extra_answer,
            cache_boundaries=request.options.cache_boundaries,
            cache_ttls=request.options.cache_ttls,
            block_hashes=[BlockHash(known) for known in request.block_hashes],
            tenant=request.tenant,
            options=request.options,
            mm_features=[image.to_spec() for image in request.images],
        )

    # ------------------------------------------------------------------- state

    def start_loading(self, num_computed_tokens: int) -> None:
        """Wait for a connector that writes these tokens' KV."""
        self.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        self.num_computed_tokens = num_computed_tokens

    @property
    def is_blocked(self) -> bool:
        """Whether it waits for something other than room."""
        return self.status in _BLOCKED

    def unblock(self) -> None:
        """Wait for room alone from now on."""
        resumes = self.num_preemptions > 0
        self.status = RequestStatus.PREEMPTED if resumes else RequestStatus.WAITING

    def start_running(self, num_computed_tokens: int) -> None:
        """Enter the running set with this many tokens found in the cache."""
        self.status = RequestStatus.RUNNING
        self.num_computed_tokens = num_computed_tokens

    def preempt(self) -> None:
        """Give everything back; the request computes again from what the cache still holds."""
        self.status = RequestStatus.PREEMPTED
        self.num_computed_tokens = 0
        self.spec_token_ids = []
        self.num_preemptions += 1
        self.is_prefill_chunk = False

    def is_surely_done(self, *, has_drafts: bool) -> bool:
        """Whether tokens on their way already make the request's last step certain.

        Args:
            has_drafts: Whether steps carry drafts. Each step in flight brings one token; with
                drafts more than one placeholder, so that only a single step is certain.
        """
        if self.num_output_placeholders == 0:
            return False
        certain = 1 if has_drafts else self.num_output_placeholders
        return self.num_output_tokens + certain >= self.max_tokens

    def finish(self, status: RequestStatus, stop_reason: int | str | None = None) -> None:
        """End the request.

        Args:
            status: One of the FINISHED_ values.
            stop_reason: The stop token or string, if one ended it.
        """
        assert RequestStatus.is_finished(status), f"{status} is not an end."
        self.status = status
        if stop_reason is not None:
            self.stop_reason = stop_reason

    def fail(self, reason: str | None = None) -> None:
        """End the request with an error; no further input can revive it."""
        self.finish(RequestStatus.FINISHED_ERROR, stop_reason=reason)
        self.resumable = False

    def is_finished(self) -> bool:
        """Whether the request has ended."""
        return self.status > _LAST_ALIVE

    def get_finished_reason(self) -> FinishReason | None:
        """Return how clients see its end, None before it."""
        return _FINISHED_REASONS.get(self.status)

    @property
    def use_structured_output(self) -> bool:
        """Whether a grammar constrains its output."""
        return self.structured_output_request is not None

    @property
    def has_grammar(self) -> bool:
        """Whether its grammar is compiled."""
        structured = self.structured_output_request
        return structured is not None and bool(structured.grammar)

    # ---------------------------------------------------------- encoder inputs

    @property
    def has_encoder_inputs(self) -> bool:
        """Whether it has multimodal items."""
        return bool(self.mm_features)

    @property
    def following_tokens(self) -> Sequence[int]:
        """Its tokens, as a drafter's rows are told apart by what follows them."""
        if not self.mm_features:
            return self.all_token_ids
        return FollowingTokens(self.all_token_ids, self.mm_features)

    def encoder_key(self, input_id: int) -> str:
        """Return under which the encoder's output of one item is kept.

        Who finds it there learns that somebody sent the item, so tenants and salts have their own.
        """
        identifier = self.mm_features[input_id].identifier
        owner = self._owner()
        return f"{owner}:{identifier}" if owner else identifier

    def _owner(self) -> str:
        """Return what stands for its tenant and salt; nothing for those without either."""
        if self.tenant is None and self.cache_salt is None:
            return ""
        return sha256(repr((self.tenant, self.cache_salt)).encode()).hexdigest()[:32]

    def encoder_keys(self) -> list[str]:
        """Return the keys of all items, in order."""
        return [self.encoder_key(index) for index in range(len(self.mm_features))]

    def get_num_encoder_embeds(self, input_id: int) -> int:
        """Return the encoder embeddings of one multimodal item."""
        return self.mm_features[input_id].mm_position.get_num_embeds()

    # ---------------------------------------------------------- events, stats

    def record_event(self, event_type: EngineCoreEventType, timestamp: float | None = None) -> None:
        """Note a stage, now or at the given monotonic time."""
        self.events.append(EngineCoreEvent.new_event(event_type, timestamp))

    def take_events(self) -> list[EngineCoreEvent] | None:
        """Drain the noted stages; None if there are none."""
        if not self.events:
            return None
        events, self.events = self.events, []
        return events

    def note_nans(self, num_nans: int) -> None:
        """Note how many of its latest logits were NaN."""
        self.num_nans_in_logits = num_nans

    def record_prefill_stats(self, stats: PrefillStats) -> None:
        """Commit where the prompt's tokens came from: once, at the first admission.

        A preempted request's second lookup finds its own blocks; it is no news to the user.
        """
        if self.num_preemptions == 0:
            self.prefill_stats = stats

    def take_prefill_stats(self) -> PrefillStats | None:
        """Drain the prefill stats; None if there are none."""
        stats, self.prefill_stats = self.prefill_stats, None
        if stats is not None and self.encoder_s:
            return msgspec.structs.replace(stats, encoder_s=self.encoder_s)
        return stats

    def note_encoder(self, seconds: float) -> None:
        """Note that an encoder ran so long for one of its items."""
        self.encoder_s += seconds

    # ------------------------------------------------------------------ order

    def __lt__(self, other: Request) -> bool:
        mine = (self.priority, self.arrival_time, self.request_id, id(self))
        return mine < (other.priority, other.arrival_time, other.request_id, id(other))

    def __repr__(self) -> str:
        return (
            f"Request(request_id={self.request_id!r}, status={self.status}, "
            f"num_tokens={self.num_tokens}, num_computed_tokens={self.num_computed_tokens})"
        )
