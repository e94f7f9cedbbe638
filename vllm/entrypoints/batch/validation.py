"""A batch's input, read once: either all lines can be sent, or the batch fails and says why."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from vllm.entrypoints.batch.lines import BatchRequest, parse_line
from vllm.entrypoints.batch.prefix_order import prefix_key

MAX_LINES = 50_000
MAX_FILE_BYTES = 200 * 1024 * 1024
_MAX_ERRORS = 100


class BatchError(msgspec.Struct):
    """Why a batch failed."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True)
class PlannedLine:
    """A line to send.

    Attributes:
        number: Of the line, from 1.
        offset: Where it begins in the file, in bytes.
        num_bytes: Its length.
    """

    number: int
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What a batch has to do.

    Attributes:
        lines: In the order in which they are sent.
        model: That all of them name; None: none does.
        errors: Why nothing is sent; empty: everything is.
    """

    lines: Sequence[PlannedLine]
    model: str | None
    errors: Sequence[BatchError]


def plan_batch(path: Path, endpoint: str) -> Plan:
    """Read a batch's input. Takes seconds for a large one: call it in a thread.

    Args:
        path: The file.
        endpoint: That each line must name.
    """
    errors: list[BatchError] = []
    keyed: list[tuple[bytes, PlannedLine]] = []
    first_of: dict[str, int] = {}
    models: dict[Any, int] = {}
    if path.stat().st_size > MAX_FILE_BYTES:
        return _failed(f"The file has more than {MAX_FILE_BYTES} bytes.", "file_too_large")
    for number, offset, raw in _raw_lines(path):
        if len(keyed) + len(errors) >= MAX_LINES:
            return _failed(f"The file has more than {MAX_LINES} lines.", "too_many_lines")
        line = parse_line(number, raw)
        fault = None if isinstance(line, BatchRequest) else line.reason
        if isinstance(line, BatchRequest):
            first = first_of.setdefault(line.custom_id, number)
            models.setdefault(line.body.get("model"), number)
            if first != number:
                fault = f"custom_id {line.custom_id[:60]!r} stands in line {first} already"
            elif line.url != endpoint:
                fault = f"url {line.url[:60]!r} is not the batch's endpoint, {endpoint}"
            elif len(models) > 1:
                fault = "model differs from that of other lines: one file has one model"
        if fault is not None:
            errors.append(BatchError("invalid_request", f"Line {number}: {fault}.", number))
            if len(errors) >= _MAX_ERRORS:
                break
        elif isinstance(line, BatchRequest):
            keyed.append((prefix_key(line.body), PlannedLine(number, offset, len(raw))))
    if errors:
        return Plan((), None, errors)
    if not keyed:
        return _failed("The file has no lines.", "empty_file")
    keyed.sort(key=lambda pair: (pair[0], pair[1].number))
    model = next(iter(models))
    return Plan([line for _, line in keyed], model if isinstance(model, str) else None, ())


def read_line(path: Path, planned: PlannedLine) -> BatchRequest:
    """Return a planned line's request."""
    with path.open("rb") as file:
        file.seek(planned.offset)
        line = parse_line(planned.number, file.read(planned.num_bytes))
    assert isinstance(line, BatchRequest), "it was read before"
    return line


def _raw_lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Yield number, offset and bytes of each line that is not empty."""
    offset = 0
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if raw.strip():
                yield number, offset, raw
            offset += len(raw)


def _failed(message: str, code: str) -> Plan:
    return Plan((), None, [BatchError(code, message)])
