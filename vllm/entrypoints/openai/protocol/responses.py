"""The bodies the server sends. ``UNSET`` fields are left out of the JSON."""

import time
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from vllm.entrypoints.openai.answer_metrics import AnswerMetrics

# Token id -> {logprob, rank, decoded_token}, or null for the first prompt token.
PromptLogprobsJson = list[dict[str, dict[str, Any]] | None]


class PromptTokensDetails(msgspec.Struct):
    """Where prompt tokens came from; all but the first with ``--enable-prompt-tokens-details``.

    Attributes:
        cached_tokens: Read from the prefix cache.
        cache_write_tokens: Computed, and in it now: of chats, whatever the settings.
        dense_match_tokens: How far the caches that keep everything matched; what it exceeds
            ``cached_tokens`` by was lost to window state.
        miss_tokens: The tokens that had to be computed, by reason; they add up to
            ``prompt_tokens - cached_tokens``.
        external_tokens: Of ``cached_tokens``, loaded from a tier or another engine.
        external_sources: Those by where they lay ("host", "disk"), if that is known.
        predicted_tokens: What the router had foretold of ``cached_tokens``, with several cores.
        prediction: Whether that came, "exact", or why not; of several prompts all there are.
        encoder_seconds: For which towers ran before the first token, if any did.
    """

    cached_tokens: int
    cache_write_tokens: int | UnsetType = UNSET
    dense_match_tokens: int | UnsetType = UNSET
    miss_tokens: dict[str, int] | UnsetType = UNSET
    external_tokens: int | UnsetType = UNSET
    external_sources: dict[str, int] | UnsetType = UNSET
    predicted_tokens: int | UnsetType = UNSET
    prediction: str | UnsetType = UNSET
    encoder_seconds: float | UnsetType = UNSET


class CompletionTokensDetails(msgspec.Struct):
    """What tokens of answers are; the mark that ends the reasoning belongs to it."""

    reasoning_tokens: int


class Usage(msgspec.Struct):
    """Tokens of one HTTP request, over all its prompts and answers.

    Attributes:
        prompt_cache_hit_tokens: Of the prompts, read from the prefix cache, as DeepSeek's API
            names them.
        prompt_cache_miss_tokens: The rest of the prompts.
    """

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails
    prompt_cache_hit_tokens: int
    prompt_cache_miss_tokens: int
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class CompletionLogprobs(msgspec.Struct):
    """Log probabilities in the completions dialect: parallel lists, one entry per token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class ChatTopLogprob(msgspec.Struct):
    """One likely token."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct):
    """One sampled token and the likely ones at its place."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Log probabilities in the chat dialect."""

    content: list[ChatTokenLogprob]


class CompletionChoice(msgspec.Struct):
    """One answer, or what is new of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: PromptLogprobsJson | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionBody(msgspec.Struct):
    """A completion, or a chunk of one."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    system_fingerprint: str
    object: str = "text_completion"
    usage: Usage | UnsetType = UNSET
    metrics: AnswerMetrics | UnsetType = UNSET
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET


class FunctionCall(msgspec.Struct):
    """A call's function; in a stream, what is new of it."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCallBody(msgspec.Struct):
    """A call of a message."""

    id: str
    function: FunctionCall
    type: str = "function"


class ToolCallDelta(msgspec.Struct):
    """What is new of a call; the first one of a call names it."""

    index: int
    function: FunctionCall
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class ChatMessageBody(msgspec.Struct):
    """An assistant's message; reasoning stands under the two names that clients know it by."""

    content: str | None
    role: str = "assistant"
    refusal: str | None = None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallBody] | UnsetType = UNSET


class ChatDelta(msgspec.Struct):
    """What is new of a message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    """One answer of a chat."""

    index: int
    message: ChatMessageBody
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    """What is new of an answer of a chat."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatBody(msgspec.Struct):
    """A chat completion."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    system_fingerprint: str
    usage: Usage
    object: str = "chat.completion"
    metrics: AnswerMetrics | UnsetType = UNSET
    prompt_logprobs: PromptLogprobsJson | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET


class ChatChunkBody(msgspec.Struct):
    """A chunk of a chat completion."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    system_fingerprint: str
    object: str = "chat.completion.chunk"
    usage: Usage | UnsetType = UNSET
    metrics: AnswerMetrics | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ModelCard(msgspec.Struct):
    """One served name."""

    id: str
    root: str
    max_model_len: int
    created: int
    owned_by: str
    object: str = "model"
    parent: str | None = None
    note: str | UnsetType = UNSET
    # What it can be asked for: generation, decisions, embeddings, rerank, score.
    capabilities: list[str] = msgspec.field(default_factory=list)
    # What the checkpoint sets where a request does not.
    default_sampling_params: dict[str, Any] | UnsetType = UNSET


class ModelList(msgspec.Struct):
    """``GET /v1/models``."""

    data: list[ModelCard]
    object: str = "list"


class TokenizeBody(msgspec.Struct):
    """``POST /tokenize``."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeBody(msgspec.Struct):
    """``POST /detokenize``."""

    prompt: str


def unix_now() -> int:
    """Return the ``created`` stamp of a response, in whole seconds."""
    return int(time.time())
