"""The bodies clients send. Fields not named here land in ``model_extra``; see ``fields``."""

from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    StrictBool,
    WithJsonSchema,
)
from pydantic.config import JsonDict
from pydantic_core import PydanticCustomError
from typing_extensions import override

from vllm.entrypoints.openai.protocol.fields import CHAT, COMPLETIONS
from vllm.v1.request_options import RequestOptions


def _check_text(text: str) -> str:
    """Refuse lone surrogates: JSON can spell them, but nothing behind this edge can carry them."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError("holds a lone surrogate, which is no valid Unicode") from error
    return text


def _check_number(value: Any) -> Any:
    """Refuse what only turns into a number: true, false and texts."""
    if isinstance(value, bool | str):
        raise PydanticCustomError("number_type", "Input should be a number")
    return value


Text = Annotated[str, AfterValidator(_check_text)]
# JSON has one kind of number: 2.0 is as whole as 2.


class _FirstFault(FailFast):
    """FailFast that may stand in a union, whose members must be hashable."""

    def __hash__(self) -> int:
        return hash(self.fail_fast)


_Item = TypeVar("_Item")
# One wrong item is told, not all of them: a million would keep the server busy for half a minute.
Many = Annotated[list[_Item], _FirstFault()]
Whole = Annotated[int, BeforeValidator(_check_number)]
Number = Annotated[float, BeforeValidator(_check_number)]

# Checked by hand: a union's four error messages help nobody, and lists can be long.
PromptField = Annotated[
    Any,
    WithJsonSchema(
        {
            "description": "A text, a list of token ids, or a list of either.",
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}},
                {"type": "array", "items": {"type": "integer"}},
                {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
            ],
        }
    ),
]


# Checked by hand too, like messages: ``vllm.tokenizers.chat_tools``.
ToolsField = Annotated[
    Any,
    WithJsonSchema(
        {
            "description": "Functions the model may call.",
            "anyOf": [{"type": "array", "items": {"type": "object"}}, {"type": "null"}],
        }
    ),
]
ToolChoiceField = Annotated[
    Any,
    WithJsonSchema(
        {
            "description": "none, auto, required, or the function to call.",
            "anyOf": [{"type": "string"}, {"type": "object"}, {"type": "null"}],
        }
    ),
]
_DEPRECATED: JsonDict = {"deprecated": True}


class _Body(BaseModel):
    model_config = ConfigDict(extra="allow", protected_namespaces=())


class StreamOptions(_Body):
    """What a stream tells besides the text."""

    include_usage: StrictBool | None = Field(None, description="Send a last chunk with the usage.")
    continuous_usage_stats: StrictBool | None = Field(
        None, description="Send the usage in every chunk."
    )


class RepetitionDetection(_Body):
    """What ends an answer that repeats itself."""

    max_pattern_size: Whole | None = Field(None, description="Tokens of the longest pattern.")
    min_pattern_size: Whole | None = Field(None, description="Tokens of the shortest one.")
    min_count: Whole | None = Field(None, description="How often it must stand in a row.")


class EngineRequest(_Body):
    """Fields of all requests that the engine works on; null means the default everywhere.

    Attributes:
        route: Of ``fields.KNOWN_FIELDS``.
        options_type: Gets the values of fields that it has too.
    """

    route: ClassVar[str] = COMPLETIONS
    options_type: ClassVar[type[RequestOptions]] = RequestOptions

    model: Text | None = Field(None, description="A served name; the default when absent.")
    priority: Whole | None = Field(
        None, description="Lower runs earlier, with priority scheduling."
    )
    request_id: Text | None = None
    cache_salt: Text | None = Field(None, description="Prefixes are reused only under equal salts.")
    prompt_cache_key: Text | None = Field(
        None, description="Requests with equal keys meet on one of several engine cores."
    )
    skip_cache_insert: StrictBool | None = Field(
        None, description="Read what is cached, and leave nothing behind."
    )
    prompt_cache_retention: Text | None = Field(
        None, description="in_memory: what it leaves goes to no disk. 24h: it may."
    )
    session_id: Text | None = Field(
        None, description="The conversation or agent that the request is of."
    )

    @property
    def ignored_parts(self) -> list[str]:
        """Names of what stands in the request's own fields and has no effect."""
        return []


class SamplingRequest(EngineRequest):
    """Fields that completions and chats share."""

    n: Whole | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Whole | None = None
    min_p: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    repetition_penalty: Number | None = None
    repetition_detection: RepetitionDetection | None = Field(
        None, description="Ends an answer whose last tokens repeat: see docs/sampling.md."
    )
    logit_bias: dict[str, Number] | None = Field(None, description="Added to logits, by token id.")
    allowed_token_ids: Many[Whole] | None = None
    bad_words: Many[Text] | None = None
    seed: Whole | None = None
    stop: Text | Many[Text] | None = None
    stop_token_ids: Many[Whole] | None = None
    include_stop_str_in_output: StrictBool | None = None
    ignore_eos: StrictBool | None = None
    max_tokens: Whole | None = None
    min_tokens: Whole | None = None
    thinking_token_budget: Whole | None = Field(
        None, description="Tokens of reasoning after which it is ended by force."
    )
    truncate_prompt_tokens: Whole | None = Field(
        None, description="Keep this many of the prompt's tokens; -1: all that fit."
    )
    truncation_side: Literal["left", "right"] | None = None
    response_format: dict[str, Any] | None = Field(
        None, description="text, json_object, json_schema or structural_tag."
    )
    structured_outputs: dict[str, Any] | None = Field(
        None, description="One of json, regex, choice, grammar, json_object, structural_tag."
    )
    guided_json: Annotated[Any, WithJsonSchema(_DEPRECATED)] = None
    guided_regex: Text | None = Field(None, json_schema_extra=_DEPRECATED)
    guided_choice: Many[Text] | None = Field(None, json_schema_extra=_DEPRECATED)
    guided_grammar: Text | None = Field(None, json_schema_extra=_DEPRECATED)
    guided_whitespace_pattern: Text | None = Field(None, json_schema_extra=_DEPRECATED)
    skip_special_tokens: StrictBool | None = None
    spaces_between_special_tokens: StrictBool | None = None
    prompt_logprobs: Whole | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    add_special_tokens: StrictBool | None = None
    return_token_ids: StrictBool | None = None
    return_tokens_as_token_ids: StrictBool | None = None
    kv_transfer_params: dict[str, Any] | None = Field(
        None, description="Prefill apart from decode: see docs/disaggregation.md."
    )

    mm_processor_kwargs: dict[str, Any] | None = Field(
        None, description="Sizes of pictures, over those of the server: see docs/images.md."
    )

    @property
    @override
    def ignored_parts(self) -> list[str]:
        extra = (self.stream_options and self.stream_options.model_extra) or {}
        return [f"stream_options.{name}" for name in extra if name != "include_obfuscation"]


class CompletionRequest(SamplingRequest):
    """``POST /v1/completions``."""

    prompt: PromptField
    logprobs: Whole | None = Field(None, description="Most likely tokens to report per position.")
    echo: StrictBool | None = Field(None, description="Put the prompt in front of the answer.")
    multi_modal_data: dict[str, Any] | None = Field(
        None, description="image: the url of a picture for each marker in the prompt, or a list."
    )
    multi_modal_uuids: dict[str, Any] | None = Field(
        None, description="image: a name for each picture, or null."
    )
    cache_boundaries: Many[Whole] | None = Field(
        None,
        description="Offsets in tokens behind which other prompts may go on otherwise; at most 16.",
    )


class ChatCompletionRequest(SamplingRequest):
    """``POST /v1/chat/completions``."""

    route: ClassVar[str] = CHAT

    messages: Many[dict[str, Any]]
    tools: ToolsField = None
    tool_choice: ToolChoiceField = None
    parallel_tool_calls: StrictBool | None = Field(
        None, description="false: an answer holds one call at most."
    )
    max_completion_tokens: Whole | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Whole | None = None
    reasoning_effort: Text | None = None
    thinking: dict[str, Any] | None = Field(
        None, description="type: enabled or disabled; budget_tokens, as DeepSeek's API has it."
    )
    include_reasoning: StrictBool | None = None
    add_generation_prompt: StrictBool | None = None
    continue_final_message: StrictBool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    prompt_cache_options: dict[str, Any] | None = Field(
        None, description="mode, and ttl: for how long to keep the prompt at least."
    )


class CachePrefixRequest(_Body):
    """``POST /v1/cache/prefixes``: one of ``messages``, ``prompt`` and ``tokens``."""

    model: Text | None = None
    messages: Many[dict[str, Any]] | None = None
    tools: ToolsField = None
    prompt: PromptField | None = None
    tokens: Many[Whole] | None = None
    pin: StrictBool | None = Field(None, description="Reuse its memory last; true unless false.")
    ttl: Number | None = Field(None, description="Seconds after which the pin goes.")
    cache_salt: Text | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None


class EndSessionRequest(_Body):
    """``POST /v1/cache/sessions/{id}/end``."""

    cache_salt: Text | None = Field(None, description="That the session's requests had.")


class AbortHeldRequest(_Body):
    """``POST /abort_requests``: prompts that a prefill server holds and nobody will load."""

    request_ids: Many[Text] = Field(description="Each a remote_request_id.")


class TokenizeRequest(_Body):
    """``POST /tokenize``: either ``prompt`` or ``messages``."""

    model: Text | None = None
    prompt: str | None = None
    messages: Many[dict[str, Any]] | None = None
    tools: ToolsField = None
    add_special_tokens: StrictBool | None = None
    return_token_strs: StrictBool | None = None
    add_generation_prompt: StrictBool | None = None
    continue_final_message: StrictBool | None = None
    reasoning_effort: Text | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(_Body):
    """``POST /detokenize``."""

    model: Text | None = None
    tokens: Annotated[Any, WithJsonSchema({"type": "array", "items": {"type": "integer"}})]
