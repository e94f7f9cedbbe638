"""What bounds a step, read once from the configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.v1.core.sched.request_queue import SchedulingPolicy

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """The scheduler's numbers.

    Attributes:
        policy: Order of admission and choice of victims.
        max_model_len: Longest request in tokens.
        max_num_seqs: Requests running at a time.
        max_num_tokens: Tokens of one step.
        long_prefill_token_threshold: Longest chunk of one request in a step; 0: no limit.
        enable_chunked_prefill: Whether a prompt may be computed in pieces.
        reserve_full_isl: Whether a request is admitted only if its whole prompt will fit.
        disable_chunked_mm_input: Whether a multimodal item must be computed in one step.
        num_spec_tokens: Draft tokens of a step; 0 without a drafter.
        use_eagle: Whether the drafter's KV rows depend on the next token (EAGLE, MTP).
        num_lookahead_tokens: Slots the drafter writes beyond a step's tokens.
        stale_row: What becomes of its row that another next token made.
        sends_new_tokens: Whether workers learn sampled tokens from the scheduler (pipelines).
    """

    policy: SchedulingPolicy
    max_model_len: int
    max_num_seqs: int
    max_num_tokens: int
    long_prefill_token_threshold: int
    enable_chunked_prefill: bool
    reserve_full_isl: bool
    disable_chunked_mm_input: bool
    num_spec_tokens: int
    use_eagle: bool
    num_lookahead_tokens: int
    stale_row: str
    sends_new_tokens: bool

    @classmethod
    def from_config(cls, vllm_config: VllmConfig) -> SchedulerLimits:
        """Read the limits."""
        config = vllm_config.scheduler_config
        speculative = vllm_config.speculative_config
        num_spec_tokens = speculative.num_speculative_tokens if speculative is not None else 0
        use_eagle = speculative is not None and speculative.use_eagle()
        pipelined = vllm_config.parallel_config.pipeline_parallel_size > 1
        return cls(
            policy=SchedulingPolicy(config.policy),
            max_model_len=vllm_config.model_config.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_tokens=config.max_num_scheduled_tokens or config.max_num_batched_tokens,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            enable_chunked_prefill=config.enable_chunked_prefill,
            reserve_full_isl=config.scheduler_reserve_full_isl,
            disable_chunked_mm_input=config.disable_chunked_mm_input,
            num_spec_tokens=num_spec_tokens,
            use_eagle=use_eagle,
            # An n-gram drafter has no KV rows to write ahead.
            num_lookahead_tokens=num_spec_tokens if use_eagle else 0,
            stale_row=speculative.stale_row if speculative is not None else "keep",
            sends_new_tokens=pipelined and not config.async_scheduling,
        )

    def cap_chunk(self, num_new_tokens: int) -> int:
        """Shorten a chunk to the long-prefill threshold."""
        if 0 < self.long_prefill_token_threshold < num_new_tokens:
            return self.long_prefill_token_threshold
        return num_new_tokens
