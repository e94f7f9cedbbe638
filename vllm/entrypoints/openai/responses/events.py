"""The events of a streamed response. ``type`` is the event's name; each has its number."""

import msgspec

from vllm.entrypoints.openai.protocol.responses import ChatTokenLogprob
from vllm.entrypoints.openai.responses.bodies import (
    OutputItem,
    OutputText,
    ReasoningTextPart,
    ResponseBody,
)


class Event(msgspec.Struct, tag_field="type", kw_only=True):
    """Base of all."""

    sequence_number: int = 0


class ResponseEvent(Event, kw_only=True):
    """Carries the response as it is."""

    response: ResponseBody


class ResponseCreated(ResponseEvent, tag="response.created", kw_only=True):
    """The first."""


class ResponseQueued(ResponseEvent, tag="response.queued", kw_only=True):
    """A background response waits."""


class ResponseInProgress(ResponseEvent, tag="response.in_progress", kw_only=True):
    """The engine took it."""


class ResponseCompleted(ResponseEvent, tag="response.completed", kw_only=True):
    """The last: all is said."""


class ResponseIncomplete(ResponseEvent, tag="response.incomplete", kw_only=True):
    """The last: it was cut off."""


class ResponseFailed(ResponseEvent, tag="response.failed", kw_only=True):
    """The last: the engine failed, or the response was cancelled."""


class ItemAdded(Event, tag="response.output_item.added", kw_only=True):
    """An item begins."""

    output_index: int
    item: OutputItem


class ItemDone(Event, tag="response.output_item.done", kw_only=True):
    """An item ends."""

    output_index: int
    item: OutputItem


class _OfItem(Event, kw_only=True):
    item_id: str
    output_index: int


class _OfPart(_OfItem, kw_only=True):
    content_index: int = 0


class PartAdded(_OfPart, tag="response.content_part.added", kw_only=True):
    """A part of an item begins."""

    part: OutputText | ReasoningTextPart


class PartDone(_OfPart, tag="response.content_part.done", kw_only=True):
    """A part of an item ends."""

    part: OutputText | ReasoningTextPart


class TextDelta(_OfPart, tag="response.output_text.delta", kw_only=True):
    """More of a message."""

    delta: str
    logprobs: list[ChatTokenLogprob] = []


class TextDone(_OfPart, tag="response.output_text.done", kw_only=True):
    """A message's text is whole."""

    text: str
    logprobs: list[ChatTokenLogprob] = []


class ReasoningDelta(_OfPart, tag="response.reasoning_text.delta", kw_only=True):
    """More of the reasoning."""

    delta: str


class ReasoningDone(_OfPart, tag="response.reasoning_text.done", kw_only=True):
    """The reasoning is whole."""

    text: str


class ArgumentsDelta(_OfItem, tag="response.function_call_arguments.delta", kw_only=True):
    """More of a call's arguments."""

    delta: str


class ArgumentsDone(_OfItem, tag="response.function_call_arguments.done", kw_only=True):
    """A call's arguments are whole."""

    name: str
    arguments: str


_encoder = msgspec.json.Encoder()


def encode_events(events: list[Event]) -> list[bytes]:
    """Return events as they go over the wire, named by their type."""
    return [
        b"event: %s\ndata: %s\n\n" % (_name_of(event), _encoder.encode(event)) for event in events
    ]


def _name_of(event: Event) -> bytes:
    return str(event.__struct_config__.tag).encode()
