"""How requests are batched."""

from dataclasses import InitVar, dataclass, field
from typing import ClassVar

from vllm.config.options import NOT_NEGATIVE, check_options, option
from vllm.config.tenants import TenantsConfig
from vllm.exceptions import ConfigError

POLICIES = ("fcfs", "priority")


@dataclass
class SchedulerConfig:
    """Batching limits and policy.

    Not frozen: outsiders set ``disable_hybrid_kv_cache_manager`` after construction.

    Attributes:
        max_num_batched_tokens: Tokens of one step over all requests.
        max_num_scheduled_tokens: The same for the scheduler alone; None: equal.
        max_num_seqs: Requests running at a time.
        long_prefill_token_threshold: Longest chunk of one prompt in a step; 0: no limit.
        joint_prompt_tokens: Tokens that prompts may have in a step together; a longer one has a
            step without others. None: what the platform says.
        scheduler_reserve_full_isl: Admit a request only if its whole prompt will fit.
        tenants: Who shares the server, and how; None: all requests are alike.
    """

    DEFAULT_MAX_NUM_BATCHED_TOKENS: ClassVar[int] = 2048

    max_model_len: InitVar[int] = 8192
    is_encoder_decoder: InitVar[bool] = False
    runner_type: str = "generate"
    max_num_batched_tokens: int = 2048
    max_num_scheduled_tokens: int | None = None
    max_num_seqs: int = 128
    long_prefill_token_threshold: int = 0
    joint_prompt_tokens: int | None = None
    enable_chunked_prefill: bool = True
    disable_chunked_mm_input: bool = False
    policy: str = option(
        "fcfs",
        group="scheduling",
        flag="--scheduling-policy",
        choices=POLICIES,
        more="`priority`: the lower `priority` of a request, the sooner; then by arrival.",
    )
    async_scheduling: bool | None = option(
        None,
        "Schedule a step while the device runs the last one. Default: off.",
        group="scheduling",
        more="The answers are the same. Off with drafts; steps with grammars, penalties or bad "
        "words wait (`docs/gpu.md`).",
    )
    disable_hybrid_kv_cache_manager: bool | None = None
    scheduler_reserve_full_isl: bool = True
    max_num_queued_reqs: int | None = option(
        None,
        "Waiting requests before new ones get 503. Default: no limit.",
        group="scheduling",
        limit=NOT_NEGATIVE,
    )
    max_num_queued_tokens: int | None = option(
        None,
        "Tokens of prompts that wait for their first token before new ones get 503. Default: no "
        "limit.",
        group="scheduling",
        limit=NOT_NEGATIVE,
    )
    tenants: TenantsConfig | None = None
    max_num_encoder_input_tokens: int = field(init=False)
    encoder_cache_size: int = field(init=False)

    def __post_init__(self, max_model_len: int, is_encoder_decoder: bool) -> None:
        if is_encoder_decoder:
            self.enable_chunked_prefill = False
            self.disable_chunked_mm_input = True
            self.long_prefill_token_threshold = 0
        self.max_num_encoder_input_tokens = self.max_num_batched_tokens
        self.encoder_cache_size = self.max_num_batched_tokens
        check_options(self)
        if self.max_num_seqs < 1 or self.max_num_batched_tokens < 1:
            raise ConfigError(
                f"max_num_seqs={self.max_num_seqs} and max_num_batched_tokens="
                f"{self.max_num_batched_tokens} must be positive."
            )
        if self.joint_prompt_tokens is not None and self.joint_prompt_tokens < 1:
            raise ConfigError(
                f"joint_prompt_tokens={self.joint_prompt_tokens} must be positive, or None for any "
                "number."
            )
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < max_model_len:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below "
                f"max_model_len={max_model_len}: without chunked prefill a prompt must fit in one "
                "step. Raise it or enable chunked prefill."
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below "
                f"max_num_seqs={self.max_num_seqs}: every running request needs a token a step."
            )
