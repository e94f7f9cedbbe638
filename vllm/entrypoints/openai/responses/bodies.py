"""The JSON of responses: items, usage and the response itself."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from vllm.entrypoints.openai.cache_hints import PromptCacheOptions
from vllm.entrypoints.openai.protocol.responses import ChatTokenLogprob
from vllm.entrypoints.openai.responses.diagnostics import Diagnosis


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    """The text of a message."""

    text: str = ""
    annotations: list[Any] = []
    logprobs: Sequence[ChatTokenLogprob] = ()


class ReasoningTextPart(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    """The text of a reasoning item."""

    text: str = ""


class MessageItem(msgspec.Struct, tag_field="type", tag="message"):
    """What the model answers."""

    id: str
    status: str = "in_progress"
    role: str = "assistant"
    content: list[OutputText] = []


class ReasoningItem(msgspec.Struct, tag_field="type", tag="reasoning"):
    """What the model thinks before; ``encrypted_content`` is its opaque form, on demand."""

    id: str
    status: str = "in_progress"
    summary: list[Any] = []
    content: list[ReasoningTextPart] = []
    encrypted_content: str | None = None


class FunctionCallItem(msgspec.Struct, tag_field="type", tag="function_call"):
    """A call of a tool."""

    id: str
    call_id: str
    name: str
    arguments: str = ""
    status: str = "in_progress"
    namespace: str | UnsetType = UNSET


OutputItem = MessageItem | ReasoningItem | FunctionCallItem


class CacheWriteTokens(msgspec.Struct):
    """Tokens written to the prefix cache, by how long they are kept at least."""

    ttl_12h_tokens: int
    ttl_30m_tokens: int


class InputTokensDetails(msgspec.Struct):
    """Tokens read from the prefix cache, and tokens it did not hold but holds now.

    With ``--enable-prompt-tokens-details`` also why the others were computed, how far the caches
    that keep everything matched, from where tokens were restored, and for how long towers ran.
    """

    cached_tokens: int
    cache_write_tokens: int
    cache_write_tokens_details: CacheWriteTokens | UnsetType = UNSET
    miss_tokens: dict[str, int] | UnsetType = UNSET
    dense_match_tokens: int | UnsetType = UNSET
    external_sources: dict[str, int] | UnsetType = UNSET
    encoder_seconds: float | UnsetType = UNSET


class OutputTokensDetails(msgspec.Struct):
    """Tokens of reasoning, its end mark included."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    """Tokens of one response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFailure(msgspec.Struct):
    """Why a response failed."""

    message: str
    code: str = "server_error"
    param: str | None = None


class IncompleteDetails(msgspec.Struct):
    """Why a response is incomplete.

    Attributes:
        reason: In the words of the API.
        stop_reason: Which part of the answer's form went on, or that it repeated itself.
    """

    reason: str = "max_output_tokens"
    stop_reason: str | UnsetType = UNSET


class ResponseBody(msgspec.Struct):
    """A response; what the request said comes back, defaults filled in."""

    id: str
    created_at: int
    model: str
    object: str = "response"
    status: str = "in_progress"
    background: bool = False
    completed_at: int | None = None
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] = {}
    output: list[OutputItem] = []
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    prompt_cache_diagnostics: Diagnosis | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    reasoning: Mapping[str, Any] = {}
    store: bool = True
    temperature: float | None = None
    text: Mapping[str, Any] = {}
    tool_choice: Any = "auto"
    tools: Sequence[Any] = ()
    top_logprobs: int = 0
    top_p: float | None = None
    truncation: str = "disabled"
    usage: ResponseUsage | None = None


class DeletedBody(msgspec.Struct):
    """``DELETE /v1/responses/{id}``."""

    id: str
    object: str = "response"
    deleted: bool = True


class InputItemsBody(msgspec.Struct):
    """``GET /v1/responses/{id}/input_items``: one page."""

    data: Sequence[Mapping[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


class InputTokensBody(msgspec.Struct):
    """``POST /v1/responses/input_tokens``."""

    input_tokens: int
    object: str = "response.input_tokens"
