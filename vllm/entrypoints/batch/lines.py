"""The input of a batch: one request a line, in OpenAI's batch format."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

_FIELDS = ("custom_id", "method", "url", "body")
# What answers in parts, or after the command has ended.
_NOT_IN_A_BATCH = ("stream", "background")


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A line that can be sent.

    Attributes:
        number: Of the line, from 1.
        custom_id: The caller's name of the request; it stands in the output.
        url: Path of a route, such as /v1/chat/completions.
    """

    number: int
    custom_id: str
    url: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that cannot be sent, and why."""

    number: int
    custom_id: str | None
    reason: str


def read_lines(path: Path) -> Iterator[BatchRequest | BadLine]:
    """Yield every line that is not empty, in order; a custom_id that came before makes it bad."""
    seen: dict[str, int] = {}
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if not raw.strip():
                continue
            line = parse_line(number, raw)
            if isinstance(line, BatchRequest):
                first = seen.setdefault(line.custom_id, number)
                if first != number:
                    line = BadLine(
                        number, line.custom_id, f"custom_id was used in line {first} already"
                    )
            yield line


def count_lines(path: Path) -> int:
    """Return how many lines ``read_lines`` yields."""
    with path.open("rb") as file:
        return sum(bool(raw.strip()) for raw in file)


def parse_line(number: int, raw: bytes) -> BatchRequest | BadLine:
    """Return a line as a request, or what is wrong with it."""
    try:
        fields = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return BadLine(number, None, f"not JSON: {error}")
    if not isinstance(fields, dict):
        return BadLine(number, None, f"not an object with {', '.join(_FIELDS)}")
    custom_id = fields.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        return BadLine(number, None, "custom_id must be a text that is not empty")
    reason = _find_fault(fields)
    if reason is not None:
        return BadLine(number, custom_id, reason)
    return BatchRequest(number, custom_id, fields["url"], fields["body"])


def _find_fault(fields: Mapping[str, Any]) -> str | None:
    method, url, body = fields.get("method", "POST"), fields.get("url"), fields.get("body")
    if method != "POST":
        return f"method {method!r} is not POST"
    if not isinstance(url, str) or not url.startswith("/v1/"):
        return f"url {url!r} is not a path such as /v1/chat/completions"
    if not isinstance(body, dict):
        return "body must be an object: the request that url takes"
    for name in _NOT_IN_A_BATCH:
        if body.get(name):
            return f"{name} is not possible in a batch: leave it out"
    return None
