"""What the scheduler tells the workers for one step: ints, ids and tables, no tensors."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.v1.core.values.cache_step import RowBounds, WindowTable

if TYPE_CHECKING:
    import torch

    from vllm.lora.request import LoRARequest
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.tower_orders import TowerOrder
    from vllm.v1.request import Request
    from vllm.v1.structured_output.masks import GrammarMasks


@dataclass
class NewRequestData:
    """A request that the workers see for the first time (or again after a preemption)."""

    req_id: str
    prompt_token_ids: list[int] | None
    mm_features: "list[MultiModalFeatureSpec]"
    sampling_params: "SamplingParams | None"
    pooling_params: Any
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int
    lora_request: "LoRARequest | None"
    prompt_embeds: "torch.Tensor | None" = None
    prompt_is_token_ids: list[bool] | None = None
    # All tokens known so far, answer included, for a request resumed by re-computation.
    prefill_token_ids: list[int] | None = None
    # Under which the encoder's outputs are kept, by item; None: under the identifiers.
    encoder_keys: list[str] | None = None
    # Whose later requests may be drafted what stands in its text; None: nobody's.
    text_owner: str | None = None

    @classmethod
    def from_request(
        cls,
        request: "Request",
        block_ids: tuple[list[int], ...],
        prefill_token_ids: list[int] | None = None,
    ) -> "NewRequestData":
        """Copy what workers need from the scheduler's request."""
        return cls(
            req_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            mm_features=request.mm_features,
            sampling_params=request.sampling_params,
            pooling_params=request.pooling_params,
            block_ids=block_ids,
            num_computed_tokens=request.num_computed_tokens,
            lora_request=request.lora_request,
            prompt_embeds=request.prompt_embeds,
            prompt_is_token_ids=getattr(request, "prompt_is_token_ids", None),
            prefill_token_ids=prefill_token_ids,
            encoder_keys=request.encoder_keys() if request.mm_features else None,
            text_owner=request.text_owner,
        )

    def _describe(self, *, with_tokens: bool) -> str:
        shape = self.prompt_embeds.shape if self.prompt_embeds is not None else None
        ids = self.prompt_token_ids or []
        tokens = f"prompt_token_ids={ids}" if with_tokens else f"prompt_token_ids_len={len(ids)}"
        return (
            f"NewRequestData(req_id={self.req_id}, {tokens}, mm_features={self.mm_features}, "
            f"sampling_params={self.sampling_params}, block_ids={self.block_ids}, "
            f"num_computed_tokens={self.num_computed_tokens}, lora_request={self.lora_request}, "
            f"prompt_embeds_shape={shape})"
        )

    def __repr__(self) -> str:
        return self._describe(with_tokens=True)

    def anon_repr(self) -> str:
        """Describe the request without its tokens, for logs."""
        return self._describe(with_tokens=False)


@dataclass
class CachedRequestData:
    """Requests the workers know already: only what changed, one entry per request and list."""

    req_ids: list[str]
    resumed_req_ids: set[str]
    new_token_ids: list[list[int]]
    # Only for requests that were not scheduled in the previous step.
    all_token_ids: dict[str, list[int]]
    new_block_ids: list[tuple[list[int], ...] | None]
    num_computed_tokens: list[int]
    num_output_tokens: list[int]

    @property
    def num_reqs(self) -> int:
        """How many requests are listed."""
        return len(self.req_ids)

    @classmethod
    def make_empty(cls) -> "CachedRequestData":
        """Return a value that lists no request."""
        return cls([], set(), [], {}, [], [], [])


@dataclass
class SchedulerOutput:
    """One step's work.

    The worker's order within a step: zero ``new_block_ids_to_zero``, run
    ``kv_cache_block_copies``, connector loads, forward pass; the first three also in a step that
    schedules no token.
    """

    scheduled_new_reqs: list[NewRequestData]
    scheduled_cached_reqs: CachedRequestData
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    scheduled_spec_decode_tokens: dict[str, list[int]]
    scheduled_encoder_inputs: dict[str, list[int]]
    num_common_prefix_blocks: list[int]
    finished_req_ids: set[str]
    free_encoder_mm_hashes: list[str]
    preempted_req_ids: set[str] | None = None
    has_structured_output_requests: bool = False
    pending_structured_output_tokens: bool = False
    num_invalid_spec_tokens: dict[str, int] | None = None
    kv_connector_metadata: Any = None
    ec_connector_metadata: Any = None
    new_block_ids_to_zero: list[int] | None = None
    # (source, destination) block ids: whole pool rows, all layers at once.
    kv_cache_block_copies: list[tuple[int, int]] = field(default_factory=list)
    # Window groups whose table changed in this step, by request (hit_unit only).
    window_tables: dict[str, tuple[WindowTable, ...]] = field(default_factory=dict)
    # Items that workers make beside the steps from now on, and those that they give up.
    tower_orders: "list[TowerOrder]" = field(default_factory=list)
    dropped_orders: list[str] = field(default_factory=list)
    # Requests whose drafter makes the last row of their hit anew: the row stands before the first
    # scheduled token; the block is the one in which the hit found it (hit_unit only).
    drafter_rebuilds: dict[str, int] = field(default_factory=dict)
    # Requests that do not write every row of the tokens they compute.
    row_bounds: dict[str, RowBounds] = field(default_factory=dict)
    # What grammars allow in the rows that are sampled; None: no row follows one.
    grammar_masks: "GrammarMasks | None" = None
    # Whether a connector loads blocks that the step reads: its tokens are void if that fails.
    loads_within: bool = False

    @property
    def has_orders(self) -> bool:
        """Whether there is anything to do: without tokens too, ends to hear of, blocks to copy."""
        return bool(
            self.total_num_scheduled_tokens or self.finished_req_ids or self.kv_cache_block_copies
        )

    @classmethod
    def make_empty(cls) -> "SchedulerOutput":
        """Return a step without work."""
        return cls([], CachedRequestData.make_empty(), {}, 0, {}, {}, [], set(), [])
