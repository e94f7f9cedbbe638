"""Batches in a folder: what each is, and what was answered so far. Survives ``kill -9``.

batches/batch_3f..json     the batch as clients see it, rewritten as a whole
batches/batch_3f..jsonl    a line for each answer, appended; a half-written last one is cut off
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import msgspec

from vllm.entrypoints.batch.validation import BatchError
from vllm.logger import init_logger

logger = init_logger(__name__)

VALIDATING, FAILED, IN_PROGRESS = "validating", "failed", "in_progress"
FINALIZING, COMPLETED, EXPIRED = "finalizing", "completed", "expired"
CANCELLING, CANCELLED = "cancelling", "cancelled"
# Nothing more happens to these.
ENDED = frozenset({FAILED, COMPLETED, EXPIRED, CANCELLED})


class RequestCounts(msgspec.Struct):
    """Lines of a batch, and what became of them."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchErrors(msgspec.Struct):
    """Why a batch failed."""

    data: list[BatchError]
    object: str = "list"


class CachedTokens(msgspec.Struct):
    """Part of a usage."""

    cached_tokens: int = 0


class ReasoningTokens(msgspec.Struct):
    """Part of a usage."""

    reasoning_tokens: int = 0


class BatchUsage(msgspec.Struct):
    """Tokens of all answers."""

    input_tokens: int = 0
    output_tokens: int = 0
    total_tokens: int = 0
    input_tokens_details: CachedTokens = msgspec.field(default_factory=CachedTokens)
    output_tokens_details: ReasoningTokens = msgspec.field(default_factory=ReasoningTokens)


def add_usage(total: BatchUsage | None, row: Mapping[str, Any]) -> BatchUsage | None:
    """Return a usage with that of a result, whatever its API calls it; None: nobody told any."""
    body = (row.get("response") or {}).get("body")
    told = body.get("usage") if isinstance(body, Mapping) else None
    if not isinstance(told, Mapping):
        return total
    total = total or BatchUsage()
    num_input = told.get("input_tokens", told.get("prompt_tokens")) or 0
    num_output = told.get("output_tokens", told.get("completion_tokens")) or 0
    total.input_tokens += num_input
    total.output_tokens += num_output
    total.total_tokens += num_input + num_output
    of_input = told.get("input_tokens_details") or told.get("prompt_tokens_details") or {}
    of_output = told.get("output_tokens_details") or told.get("completion_tokens_details") or {}
    total.input_tokens_details.cached_tokens += of_input.get("cached_tokens") or 0
    total.output_tokens_details.reasoning_tokens += of_output.get("reasoning_tokens") or 0
    return total


class BatchBody(msgspec.Struct, kw_only=True):
    """A batch as clients see it."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    status: str = VALIDATING
    model: str | None = None
    errors: BatchErrors | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = msgspec.field(default_factory=RequestCounts)
    usage: BatchUsage | None = None
    metadata: dict[str, str] | None = None
    object: str = "batch"


class BatchRecord(msgspec.Struct, kw_only=True):
    """A batch and what is kept beside it.

    Attributes:
        body: What clients see.
        owner: Whose it is; None: nobody's in particular.
        output_expires_in: Seconds for which its results are kept; None: until they are deleted.
        ends_as: The state that it will have when its results are written.
        output_name: Id of the file of its good results, once they are written.
        error_name: Likewise of the others.
    """

    body: BatchBody
    owner: str | None
    output_expires_in: int | None = None
    ends_as: str = COMPLETED
    output_name: str | None = None
    error_name: str | None = None


class Answered(msgspec.Struct):
    """A line that was answered.

    Attributes:
        number: Of the line in the input.
        is_good: Whether it goes into the output, and not into the errors.
        row: What is written there.
    """

    number: int
    is_good: bool
    row: dict[str, Any]


class BatchStore:
    """The batches of a folder.

    Owns: the folder's ``batches``; one process at a time may use it.

    Args:
        folder: Where; made if it is not there.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "batches"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._records: dict[str, BatchRecord] = {}
        for path in sorted(self._folder.glob("*.json")):
            try:
                record = msgspec.json.decode(path.read_bytes(), type=BatchRecord)
            except msgspec.DecodeError as error:
                logger.warning("%s is left out: %s", path, error)
                continue
            self._records[record.body.id] = record
            if record.body.status in ENDED:
                self.drop_log(record.body.id)

    def find(self, batch_id: str) -> BatchRecord | None:
        """Return a batch; None: there is none of this id."""
        return self._records.get(batch_id)

    def all_batches(self) -> list[BatchRecord]:
        """Return all batches, the newest first."""
        records = self._records.values()
        return sorted(records, key=lambda r: (r.body.created_at, r.body.id), reverse=True)

    def save(self, record: BatchRecord) -> None:
        """Write a batch down."""
        self._records[record.body.id] = record
        path = self._folder / f"{record.body.id}.json"
        beside = path.with_suffix(".part")
        beside.write_bytes(msgspec.json.encode(record))
        os.replace(beside, path)

    def drop(self, batch_id: str) -> None:
        """Forget a batch."""
        del self._records[batch_id]
        self.drop_log(batch_id)
        (self._folder / f"{batch_id}.json").unlink(missing_ok=True)

    def open_log(self, batch_id: str) -> "AnswerLog":
        """Return the log of a batch's answers."""
        return AnswerLog(self._folder / f"{batch_id}.jsonl")

    def drop_log(self, batch_id: str) -> None:
        """Remove a log whose answers stand in files."""
        (self._folder / f"{batch_id}.jsonl").unlink(missing_ok=True)


class AnswerLog:
    """The answers of a batch so far.

    Owns: the file, while open.

    Args:
        path: The file; need not exist.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._cut_half_line()
        self._file: BinaryIO = path.open("ab")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()

    def _cut_half_line(self) -> None:
        """Cut off what a process wrote last when it was killed, unless it is a whole line."""
        if not self._path.exists():
            return
        with self._path.open("rb+") as file:
            end = 0
            for raw in file:
                if raw.endswith(b"\n"):
                    end += len(raw)
            file.truncate(end)

    def add(self, answered: Answered) -> None:
        """Append an answer, as one write."""
        self._file.write(msgspec.json.encode(answered) + b"\n")
        self._file.flush()

    def read(self) -> Iterator[Answered]:
        """Yield the answers so far."""
        decoder = msgspec.json.Decoder(Answered)
        with self._path.open("rb") as file:
            for raw in file:
                yield decoder.decode(raw)
