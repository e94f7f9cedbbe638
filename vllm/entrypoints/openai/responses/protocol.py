"""The bodies of ``/v1/responses``. Objects in them are checked in ``options``, ``input_items``."""

from typing import Annotated, Any, ClassVar

from pydantic import Field, StrictBool, WithJsonSchema

from vllm.entrypoints.openai.protocol.fields import RESPONSES
from vllm.entrypoints.openai.protocol.requests import SamplingRequest, Text, Whole

InputField = Annotated[
    Any,
    WithJsonSchema(
        {
            "description": "A text, or a list of items.",
            "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}],
        }
    ),
]
ToolChoiceField = Annotated[
    Any,
    WithJsonSchema(
        {
            "description": "none, auto, required, or an object that names functions.",
            "anyOf": [{"type": "string"}, {"type": "object"}, {"type": "null"}],
        }
    ),
]


class InputTokensRequest(SamplingRequest):
    """``POST /v1/responses/input_tokens``: what decides the prompt."""

    route: ClassVar[str] = RESPONSES

    input: InputField = None
    instructions: Text | None = None
    previous_response_id: Text | None = None
    tools: list[Any] | None = None
    tool_choice: ToolChoiceField = None
    parallel_tool_calls: StrictBool | None = None
    reasoning: dict[str, Any] | None = Field(None, description="effort; summary asks for nothing.")
    text: dict[str, Any] | None = Field(None, description="format: text, json_schema, json_object.")
    truncation: Text | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ResponsesRequest(InputTokensRequest):
    """``POST /v1/responses``; sampling fields beyond OpenAI's are those of the other routes."""

    input: InputField
    max_output_tokens: Whole | None = None
    metadata: dict[str, Any] | None = Field(None, description="At most 16 texts, kept and echoed.")
    include: list[Any] | None = None
    top_logprobs: Whole | None = None
    store: StrictBool | None = Field(None, description="Keep the response; true when absent.")
    background: StrictBool | None = None
    prompt_cache_options: dict[str, Any] | None = Field(
        None, description="comparison_response_id asks why the prompt missed; mode, ttl, prewarm."
    )
    max_tool_calls: Whole | None = Field(None, description="Limits built-in tools: there are none.")
