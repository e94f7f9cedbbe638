"""Server-sent events."""

from collections.abc import AsyncIterator
from typing import Any

import msgspec

from vllm.entrypoints.openai.errors import describe_late_exception

DONE = b"data: [DONE]\n\n"
_encoder = msgspec.json.Encoder()


def encode_event(body: Any) -> bytes:
    """Return the event that carries ``body`` as JSON."""
    return b"data: " + _encoder.encode(body) + b"\n\n"


async def with_errors_as_events(events: AsyncIterator[bytes], name: str) -> AsyncIterator[bytes]:
    """Yield ``events``; an error becomes one more event. ``[DONE]`` ends it in any case.

    The status has been sent by now, so this is the only way left to tell.

    Args:
        events: Of one response.
        name: Of the request, for the log.
    """
    try:
        async for event in events:
            yield event
    except Exception as error:  # the edge of a response: nothing above could still answer
        described = describe_late_exception(error, f"Request {name}")
        yield b"data: " + described.body + b"\n\n"
    yield DONE
