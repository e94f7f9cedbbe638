"""Events are the same however their bytes come."""

import pytest

from vllm.benchmarks.client.sse import Event, EventDecoder

STREAM = (
    ": keep-alive\n\n"
    'event: a\ndata: {"x": "größer"}\n\n'
    "data:one\ndata: two\n\n"
    "id: 7\n\ndata: [DONE]\n\n"
)
EXPECTED = [Event('{"x": "größer"}', "a"), Event("one\ntwo"), Event("[DONE]")]


@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_any_split_gives_the_same_events(line_end: str, size: int) -> None:
    raw = STREAM.replace("\n", line_end).encode()
    decoder = EventDecoder()
    found = [event for i in range(0, len(raw), size) for event in decoder.feed(raw[i : i + size])]
    assert found == EXPECTED


def test_an_unfinished_event_is_none() -> None:
    decoder = EventDecoder()
    assert list(decoder.feed(b"data: half\n")) == []
    assert list(decoder.feed(b"\n")) == [Event("half")]
