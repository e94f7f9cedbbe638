"""The blocks of a message and its events, in the SDK's own types."""

from typing import Any

import msgspec
import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from vllm.entrypoints.anthropic.bodies import (
    Event,
    MessageBody,
    MessageUsage,
    StopDelta,
    ThinkingTokens,
)
from vllm.entrypoints.anthropic.builder import MessageBuilder
from vllm.entrypoints.openai.opaque_reasoning import open_reasoning
from vllm.parser.pieces import (
    ContentText,
    Piece,
    ReasoningText,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)

SDK_EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
PROMPT = MessageUsage(3, 0, 32, 64)
WHOLE = MessageUsage(3, 9, 32, 64, ThinkingTokens(2))
CALL: list[Piece] = [
    ToolCallStart(0, "call_1", "f"),
    ToolCallArguments(0, '{"a": '),
    ToolCallArguments(0, "1}"),
    ToolCallEnd(0),
]


def make_builder(**kwargs: Any) -> MessageBuilder:
    """A builder of a message."""
    return MessageBuilder(MessageBody("msg_1", "tiny", PROMPT), **kwargs)


def as_sdk(events: list[Event]) -> list[Any]:
    """Events as the SDK reads them; it skips pings before it does."""
    encoded = [msgspec.json.encode(event) for event in events]
    return [SDK_EVENT.validate_json(e) for e in encoded if e != b'{"type":"ping"}']


def test_events_come_in_the_order_of_the_sdk() -> None:
    builder = make_builder()
    events = builder.start(PROMPT)
    events += builder.add([ReasoningText("h"), ReasoningText("m"), ContentText("Hi"), *CALL])
    events += builder.finish(StopDelta("tool_use"), WHOLE)
    shown = []
    for event in as_sdk(events):
        delta = getattr(event, "delta", None)
        shown.append(f"{event.type}:{getattr(event, 'index', '')}:{getattr(delta, 'type', '')}")
    assert shown == [
        "message_start::",
        "content_block_start:0:",
        "content_block_delta:0:thinking_delta",
        "content_block_delta:0:thinking_delta",
        "content_block_delta:0:signature_delta",
        "content_block_stop:0:",
        "content_block_start:1:",
        "content_block_delta:1:text_delta",
        "content_block_stop:1:",
        "content_block_start:2:",
        "content_block_delta:2:input_json_delta",
        "content_block_delta:2:input_json_delta",
        "content_block_stop:2:",
        "message_delta::",
        "message_stop::",
    ]
    assert events[1].__struct_config__.tag == "ping"


def test_thinking_may_be_told_by_its_signature_alone() -> None:
    builder = make_builder(hides_thinking=True)
    events = [*builder.start(PROMPT), *builder.add([ReasoningText("hm"), ContentText("Hi")])]
    events += builder.finish(StopDelta("end_turn"), WHOLE)
    assert b"hm" not in b"".join(msgspec.json.encode(event) for event in events)
    message = Message.model_validate_json(msgspec.json.encode(builder.body))
    first: Any = message.content[0]
    assert first.thinking == ""
    assert open_reasoning(first.signature) == "hm"


def test_a_call_without_arguments_has_an_empty_input() -> None:
    builder = make_builder()
    builder.add([ToolCallStart(0, "c", "f"), ToolCallEnd(0)])
    call: Any = builder.body.content[0]
    assert call.input == {}


def test_a_call_that_breaks_off_is_told_by_the_stream_alone() -> None:
    """Its block ends, the next one has the next index, and the message leaves it out."""
    builder = make_builder()
    events = [*builder.start(PROMPT), *builder.add([ContentText("So.")])]
    cut = [ToolCallStart(0, "c", "f"), ToolCallArguments(0, '{"a": "x'), ToolCallEnd(0, False)]
    events += builder.add([*cut, ContentText("Hm.")])
    events += builder.finish(StopDelta("max_tokens"), WHOLE)
    snapshot: Any = None
    buffers: dict[int, bytes] = {}
    for event in as_sdk(events):
        snapshot = accumulate_event(event=event, current_snapshot=snapshot, json_bufs=buffers)
    kinds = [(block.type, getattr(block, "text", None)) for block in snapshot.content]
    assert kinds == [("text", "So."), ("tool_use", None), ("text", "Hm.")]
    assert [type(block).__name__ for block in builder.body.content] == ["TextBlock", "TextBlock"]


PIECES = st.lists(
    st.one_of(
        st.builds(ReasoningText, st.sampled_from("ab")).map(lambda piece: [piece]),
        st.builds(ContentText, st.sampled_from("ab")).map(lambda piece: [piece]),
        st.just(CALL),
    ),
    max_size=8,
).map(lambda groups: [piece for group in groups for piece in group])


@pytest.mark.slow
@given(PIECES, st.lists(st.integers(0, 40), max_size=6))
@settings(max_examples=40, deadline=None)
def test_the_events_join_to_the_message(pieces: list[Piece], cuts: list[int]) -> None:
    """The SDK's own helper builds, of any split, what all at once is."""
    whole = make_builder()
    whole.start(PROMPT)
    whole.add(pieces)
    whole.finish(StopDelta("end_turn"), WHOLE)
    parts = make_builder()
    events = parts.start(PROMPT)
    bounds = sorted({0, len(pieces), *(cut for cut in cuts if cut < len(pieces))})
    for start, end in zip(bounds, [*bounds[1:], len(pieces)], strict=True):
        events += parts.add(pieces[start:end])
    events += parts.finish(StopDelta("end_turn"), WHOLE)
    assert parts.body == whole.body
    snapshot: Any = None
    buffers: dict[int, bytes] = {}
    for event in as_sdk(events):
        snapshot = accumulate_event(event=event, current_snapshot=snapshot, json_bufs=buffers)
    read = Message.model_validate_json(msgspec.json.encode(parts.body))
    assert snapshot.to_dict(exclude_none=True) == read.to_dict(exclude_none=True)
