"""Server-sent events."""

import json
from collections.abc import AsyncIterator

import pytest

from vllm.entrypoints.openai.sse import DONE, encode_event, with_errors_as_events
from vllm.exceptions import ShuttingDownError


def test_an_event_is_one_line() -> None:
    event = encode_event({"text": "a\nb 世"})
    assert event.startswith(b"data: {")
    assert event.endswith(b"}\n\n")
    assert event.count(b"\n") == 2


@pytest.mark.parametrize(
    ("error", "code"), [(ShuttingDownError("over"), 503), (RuntimeError("bug"), 500)]
)
async def test_an_error_is_an_event_and_the_end_is_marked(
    error: Exception, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def events() -> AsyncIterator[bytes]:
        yield b"one"
        raise error

    first, second, last = [event async for event in with_errors_as_events(events(), "r")]
    assert (first, last) == (b"one", DONE)
    assert json.loads(second.removeprefix(b"data: "))["error"]["code"] == code
    assert caplog.text.count("Request r failed") == (code == 500)
