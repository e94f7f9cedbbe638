"""The JSON of messages: blocks, usage, the message and the events of a stream."""

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from vllm.entrypoints.anthropic.diagnostics import Diagnostics


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    """A part of the answer."""

    text: str = ""


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    """What the model thinks before; ``signature`` is its opaque form."""

    thinking: str = ""
    signature: str = ""


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    """A call of a tool."""

    id: str
    name: str
    input: dict[str, Any] = {}


Block = TextBlock | ThinkingBlock | ToolUseBlock


class ThinkingTokens(msgspec.Struct):
    """Tokens of thinking, its end mark included."""

    thinking_tokens: int


class CacheCreation(msgspec.Struct):
    """Tokens written to the prefix cache, by how long they are kept at least."""

    ephemeral_1h_input_tokens: int
    ephemeral_5m_input_tokens: int


class MessageUsage(msgspec.Struct):
    """Tokens of one message. The three kinds of input add up to the prompt.

    Attributes:
        input_tokens: Computed, and not kept: behind the last full unit of the prefix cache.
        cache_read_input_tokens: Read from the prefix cache.
        cache_creation_input_tokens: Computed, and in the prefix cache now.
        miss_tokens: Those that were computed, by reason: with ``--enable-prompt-tokens-details``.
        dense_match_tokens: How far the caches that keep everything matched; likewise.
        external_sources: Of those that were read, restored, by where they lay; likewise.
        encoder_seconds: For which towers ran for pictures before the first token; likewise.
        cache_creation: ``cache_creation_input_tokens`` by their lifetime.
    """

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int
    output_tokens_details: ThinkingTokens | UnsetType = UNSET
    miss_tokens: dict[str, int] | UnsetType = UNSET
    dense_match_tokens: int | UnsetType = UNSET
    external_sources: dict[str, int] | UnsetType = UNSET
    encoder_seconds: float | UnsetType = UNSET
    cache_creation: CacheCreation | UnsetType = UNSET


class MessageBody(msgspec.Struct, tag_field="type", tag="message"):
    """A message of the assistant's."""

    id: str
    model: str
    usage: MessageUsage
    role: str = "assistant"
    content: list[Block] = []
    stop_reason: str | None = None
    stop_sequence: str | None = None
    stop_explanation: str | UnsetType = UNSET
    diagnostics: Diagnostics | None = None


class TokenCount(msgspec.Struct):
    """``POST /v1/messages/count_tokens``."""

    input_tokens: int


class TextDelta(msgspec.Struct, tag_field="type", tag="text_delta"):
    """More of a text block."""

    text: str


class ThinkingDelta(msgspec.Struct, tag_field="type", tag="thinking_delta"):
    """More of a thinking block."""

    thinking: str


class SignatureDelta(msgspec.Struct, tag_field="type", tag="signature_delta"):
    """The signature of a thinking block."""

    signature: str


class InputDelta(msgspec.Struct, tag_field="type", tag="input_json_delta"):
    """More of a call's input."""

    partial_json: str


class MessageStart(msgspec.Struct, tag_field="type", tag="message_start"):
    """The first event."""

    message: MessageBody


class Ping(msgspec.Struct, tag_field="type", tag="ping"):
    """Nothing new."""


class BlockStart(msgspec.Struct, tag_field="type", tag="content_block_start"):
    """A block begins, empty."""

    index: int
    content_block: Block


class BlockDelta(msgspec.Struct, tag_field="type", tag="content_block_delta"):
    """More of a block."""

    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockStop(msgspec.Struct, tag_field="type", tag="content_block_stop"):
    """A block ends."""

    index: int


class StopDelta(msgspec.Struct):
    """Why the message ended.

    Attributes:
        stop_reason: In the words of the API.
        stop_sequence: The one that ended it, if one did.
        stop_explanation: Of an answer that was cut off: which part of its form went on, or that it
            repeated itself. The API's own ``stop_details`` are of refusals alone.
    """

    stop_reason: str | None
    stop_sequence: str | None = None
    stop_explanation: str | UnsetType = UNSET


class MessageDelta(msgspec.Struct, tag_field="type", tag="message_delta"):
    """The message ended; ``usage`` is that of all of it."""

    delta: StopDelta
    usage: MessageUsage


class MessageStop(msgspec.Struct, tag_field="type", tag="message_stop"):
    """The last event."""


Event = MessageStart | Ping | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop
