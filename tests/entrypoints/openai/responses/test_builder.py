"""The items of a response and its events, in the SDK's own types."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from vllm.entrypoints.openai.errors import HttpError
from vllm.entrypoints.openai.protocol.responses import ChatTokenLogprob
from vllm.entrypoints.openai.responses.bodies import (
    InputTokensDetails,
    OutputTokensDetails,
    ResponseBody,
    ResponseUsage,
)
from vllm.entrypoints.openai.responses.builder import ResponseBuilder
from vllm.entrypoints.openai.responses.events import Event, encode_events
from vllm.parser.pieces import (
    ContentText,
    Piece,
    ReasoningText,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)

SDK_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
USAGE = ResponseUsage(5, InputTokensDetails(2, 1), 4, OutputTokensDetails(1), 9)
CALL: list[Piece] = [
    ToolCallStart(0, "c1", "f"),
    ToolCallArguments(0, '{"a": '),
    ToolCallArguments(0, "1}"),
    ToolCallEnd(0),
]
ANSWER: list[Piece] = [ReasoningText("h"), ReasoningText("m"), ContentText("Hi"), *CALL]


def make_builder(**kwargs: Any) -> ResponseBuilder:
    """A builder whose items are numbered."""
    names = iter(range(1000))
    body = ResponseBody("resp_1", 1, "tiny")
    return ResponseBuilder(body, new_id=lambda kind: f"{kind}_{next(names)}", **kwargs)


def as_sdk(events: list[Event]) -> list[Any]:
    """Events as the SDK reads them from the wire."""
    parsed = []
    for event, sent in zip(events, encode_events(events), strict=True):
        head, data, *rest = sent.decode().split("\n")
        assert rest == ["", ""]
        read = SDK_EVENT.validate_json(data.removeprefix("data: "))
        assert head == f"event: {read.type}"
        assert read.type == event.__struct_config__.tag
        parsed.append(read)
    return parsed


def test_events_come_in_the_order_of_the_sdk() -> None:
    builder = make_builder()
    events = [*builder.start(), *builder.add(ANSWER), *builder.finish("tool_calls", USAGE)]
    read = as_sdk(events)
    assert [event.sequence_number for event in read] == list(range(len(read)))
    assert [event.type.removeprefix("response.") for event in read] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    assert read[0].response.output == []
    added = [event.item for event in read if event.type == "response.output_item.added"]
    assert [item.status for item in added] == ["in_progress"] * 3
    assert added[0].content == []
    assert added[2].arguments == ""
    final = read[-1].response
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert final.output[0].content[0].text == "hm"
    assert final.output_text == "Hi"
    assert final.output[2].arguments == '{"a": 1}'
    assert {item.status for item in final.output} == {"completed"}
    assert final.usage.output_tokens_details.reasoning_tokens == 1


def test_a_call_that_breaks_off_is_incomplete() -> None:
    builder = make_builder()
    cut = [ToolCallStart(0, "c", "f"), ToolCallArguments(0, '{"a": '), ToolCallEnd(0, False)]
    as_sdk([*builder.start(), *builder.add([*CALL, *cut]), *builder.finish("length", USAGE)])
    items: Any = builder.body.output
    assert [(item.status, item.arguments) for item in items] == [
        ("completed", '{"a": 1}'),
        ("incomplete", '{"a": '),
    ]


@pytest.mark.parametrize(
    ("reason", "said"), [("length", None), ("repetition", "repetition_detected")]
)
def test_a_cut_response_is_incomplete(reason: str, said: str | None) -> None:
    builder = make_builder()
    events = [
        *builder.start(),
        *builder.add([ContentText("Hal")]),
        *builder.finish(reason, USAGE, stop_reason=said),
    ]
    last = as_sdk(events)[-1]
    assert last.type == "response.incomplete"
    assert last.response.status == "incomplete"
    assert last.response.incomplete_details.reason == "max_output_tokens"
    assert last.response.incomplete_details.model_extra == ({"stop_reason": said} if said else {})
    assert last.response.output[0].status == "incomplete"


@pytest.mark.parametrize("how", ["fail", "cancel"])
def test_an_end_before_the_end_keeps_what_was_said(how: str) -> None:
    builder = make_builder()
    said = [*builder.queue(), *builder.start(), *builder.add([ContentText("Hal")])]
    said += builder.fail(HttpError(500, "The engine died.")) if how == "fail" else builder.cancel()
    read = as_sdk(said)
    assert [event.type for event in read[:3]] == [
        "response.created",
        "response.queued",
        "response.in_progress",
    ]
    response = read[-1].response
    assert response.output_text == "Hal"
    assert response.status == ("failed" if how == "fail" else "cancelled")
    assert (response.error is not None) == (how == "fail")


def test_log_probabilities_go_with_the_text() -> None:
    row = ChatTokenLogprob("Hi", -0.5, [72, 105], [])
    builder = make_builder()
    events = [*builder.start(), *builder.add([ReasoningText("h"), ContentText("Hi")], [row])]
    events += builder.finish("stop", USAGE)
    read = as_sdk(events)
    (delta,) = (event for event in read if event.type == "response.output_text.delta")
    assert delta.logprobs[0].logprob == -0.5
    assert read[-1].response.output[1].content[0].logprobs[0].token == "Hi"


def test_reasoning_is_sealed_on_demand() -> None:
    for seals in (False, True):
        builder = make_builder(seals_reasoning=seals)
        builder.add([ReasoningText("hm")])
        builder.finish("stop", USAGE)
        assert (builder.body.output[0].encrypted_content is not None) == seals  # type: ignore[union-attr]


PIECES = st.lists(
    st.one_of(
        st.builds(ReasoningText, st.sampled_from("ab")).map(lambda piece: [piece]),
        st.builds(ContentText, st.sampled_from("ab")).map(lambda piece: [piece]),
        st.just(CALL),
    ),
    max_size=8,
).map(lambda groups: [piece for group in groups for piece in group])


@pytest.mark.slow
@given(PIECES, st.lists(st.integers(0, 40), max_size=6), st.sampled_from(["stop", "length"]))
@settings(max_examples=40, deadline=None)
def test_the_split_of_pieces_changes_nothing(
    pieces: list[Piece], cuts: list[int], reason: str
) -> None:
    """Events join to the response, and streamed pieces build what all at once do."""
    whole = make_builder()
    whole.start()
    whole.add(pieces)
    whole.finish(reason, USAGE)
    parts = make_builder()
    events = parts.start()
    bounds = sorted({0, len(pieces), *(cut for cut in cuts if cut < len(pieces))})
    for start, end in zip(bounds, [*bounds[1:], len(pieces)], strict=True):
        events += parts.add(pieces[start:end])
    events += parts.finish(reason, USAGE)
    assert parts.body.output == whole.body.output
    read = as_sdk(events)
    done = [event.item for event in read if event.type == "response.output_item.done"]
    assert done == read[-1].response.output
    for index, item in enumerate(done):
        deltas = [e.delta for e in read if e.type.endswith("delta") and e.output_index == index]
        text = item.arguments if item.type == "function_call" else item.content[0].text
        assert "".join(deltas) == text
    Response.model_validate_json(msgspec.json.encode(parts.body))
