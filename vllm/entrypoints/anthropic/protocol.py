"""The bodies of ``/v1/messages``. Nested objects are checked in ``conversion`` and ``options``."""

from typing import Annotated, Any, ClassVar

from pydantic import Field, StrictBool, WithJsonSchema

from vllm.entrypoints.openai.protocol.fields import MESSAGES
from vllm.entrypoints.openai.protocol.requests import Many, SamplingRequest, Text, Whole

SystemField = Annotated[
    Any,
    WithJsonSchema(
        {
            "description": "A text, or a list of text blocks.",
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "object"}},
                {"type": "null"},
            ],
        }
    ),
]


class CountTokensRequest(SamplingRequest):
    """``POST /v1/messages/count_tokens``: what decides the prompt."""

    route: ClassVar[str] = MESSAGES

    messages: list[Any]
    system: SystemField = None
    tools: list[Any] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = Field(None, description="type: enabled, disabled, adaptive.")
    thread: dict[str, Any] | None = Field(
        None, description="Refused, so that clients send the whole conversation."
    )
    output_config: dict[str, Any] | None = Field(None, description="effort and format.")
    output_format: dict[str, Any] | None = Field(None, description="The same as its format.")
    cache_control: dict[str, Any] | None = Field(None, description="Marks the last block.")
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(CountTokensRequest):
    """``POST /v1/messages``; sampling fields beyond Anthropic's are those of the other routes."""

    max_tokens: Whole
    stop_sequences: Many[Text] | None = None
    stream: StrictBool | None = None
    diagnostics: dict[str, Any] | None = Field(
        None, description="previous_message_id asks where the prompt parted from that message's."
    )
