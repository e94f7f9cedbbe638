"""What a worker returns for one step."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np


class LogprobsLists(NamedTuple):
    """Log probabilities of the sampled tokens of one step.

    Row r belongs to the r-th sampled token of the step, requests in ``req_ids`` order, a request's
    tokens in order. Column 0 is the sampled token itself, columns 1.. the most likely ones.
    """

    logprob_token_ids: "np.ndarray[Any, Any]"  # [rows, k + 1] int
    logprobs: "np.ndarray[Any, Any]"  # [rows, k + 1] float32
    sampled_token_ranks: "np.ndarray[Any, Any]"  # [rows] int, 1 = most likely
    # First row of each request, and one past the last: rows of request i are
    # cu_num_generated_tokens[i] .. cu_num_generated_tokens[i + 1].
    cu_num_generated_tokens: list[int] | None = None


@dataclass
class KVConnectorOutput:
    """What a KV connector reports from a worker after a step."""

    finished_sending: set[str] | list[str] | None = None
    finished_recving: set[str] | list[str] | None = None
    kv_connector_stats: Any = None
    kv_cache_events: Any = None
    kv_connector_worker_meta: Any = None
    invalid_block_ids: set[int] = field(default_factory=set)
    expected_finished_count: int = 0
    # Requests of which nothing that was loaded may be used; their connector has stopped writing.
    failed_recving: set[str] = field(default_factory=set)


@dataclass
class ModelRunnerOutput:
    """Sampled tokens and their company, for the requests of one step.

    Attributes:
        req_ids: The step's requests, in batch order.
        req_id_to_index: Their positions in ``req_ids``.
        sampled_token_ids: Per request the new tokens; empty for a chunk that does not end a prompt.
        logprobs: For the sampled tokens, if any request asked.
        prompt_logprobs_dict: Per request the log probabilities of the prompt positions this step
            computed: (token ids [n, k+1], logprobs [n, k+1], ranks [n]).
        pooler_output: Per request fp32 vectors ``[n, D]`` of prompt positions, None where none are
            wanted; None: of no request of the step.
        made_pictures: By key, what was made beside the steps since the last one, or given up.
        tower_s: Seconds that their tower ran, by key.
    """

    req_ids: list[str]
    req_id_to_index: dict[str, int]
    sampled_token_ids: list[list[int]] = field(default_factory=list)
    logprobs: LogprobsLists | None = None
    prompt_logprobs_dict: "dict[str, Any]" = field(default_factory=dict)
    pooler_output: "list[np.ndarray[Any, Any] | None] | None" = None
    kv_connector_output: KVConnectorOutput | None = None
    ec_connector_output: Any = None
    num_nans_in_logits: dict[str, int] | None = None
    cudagraph_stats: Any = None
    routed_experts: Any = None
    made_pictures: list[tuple[str, bool]] | None = None
    tower_s: dict[str, float] = field(default_factory=dict)


@dataclass
class DraftTokenIds:
    """Draft tokens a proposer made for the next step."""

    req_ids: list[str]
    draft_token_ids: list[list[int]]


EMPTY_MODEL_RUNNER_OUTPUT = ModelRunnerOutput(req_ids=[], req_id_to_index={})


class PendingStep(Protocol):
    """A step that was begun."""

    def wait(self) -> ModelRunnerOutput:
        """Return what it gave, once; waits for the device."""


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A ``PendingStep`` that nobody need wait for."""

    output: ModelRunnerOutput

    def wait(self) -> ModelRunnerOutput:
        """See ``PendingStep``."""
        return self.output
