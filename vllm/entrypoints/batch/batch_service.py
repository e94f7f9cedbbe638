"""Batches by HTTP: their states, and the work behind them.

validating --> in_progress --> finalizing --> completed
    |               |  |                      expired     not all in time; what is done is kept
    v               |  +-- cancelling ------> cancelled   likewise
  failed            +-- kill -9: begins again here, with what the log has not
"""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec

from vllm.entrypoints.batch.batch_store import (
    CANCELLED,
    CANCELLING,
    COMPLETED,
    ENDED,
    EXPIRED,
    FAILED,
    FINALIZING,
    IN_PROGRESS,
    VALIDATING,
    Answered,
    AnswerLog,
    BatchBody,
    BatchErrors,
    BatchRecord,
    BatchStore,
    add_usage,
)
from vllm.entrypoints.batch.file_store import BATCH, BATCH_OUTPUT, KEPT_S, FileStore
from vllm.entrypoints.batch.lines import BatchRequest
from vllm.entrypoints.batch.validation import BatchError, Plan, PlannedLine, plan_batch, read_line
from vllm.exceptions import FileNotStoredError, UserInputError
from vllm.logger import init_logger

logger = init_logger(__name__)

ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/decisions",
)
MAX_BATCHES = 1000
"""Of an owner that are remembered."""
MAX_OPEN = 100
"""Of an owner that have not ended."""
WINDOW = "24h"
# How often what is old is removed.
_TIDY_S = 3600.0
_WINDOW_S = 24 * 3600
# No room now, or a tenant's limit: the line waits.
_TRY_AGAIN = (429, 503)
_OK = 200
_NOT_IN_TIME = {
    "code": "batch_expired",
    "message": "This request could not be executed before the completion window expired.",
}


@dataclass(frozen=True, slots=True)
class Reply:
    """What the server answered a line.

    Attributes:
        retry_after_s: When to try again, where there was no room.
    """

    status: int
    request_id: str
    body: Any
    retry_after_s: float = 1.0


class Send(Protocol):
    """Answers one request in the name of an owner, below all that clients wait for."""

    def __call__(self, request: BatchRequest, owner: str | None) -> Awaitable[Reply]:
        """Return the answer."""


@dataclass(slots=True)
class _Running:
    """A batch that is worked on.

    Attributes:
        task: The work.
        is_cancelled: Set when its owner cancels it.
    """

    task: "asyncio.Task[None]"
    is_cancelled: asyncio.Event = field(default_factory=asyncio.Event)


class BatchService:
    """The batches of a server.

    Owns: the store of batches, and the tasks that work on them.

    Args:
        files: Has the inputs, gets the results.
        store: Of the batches.
        max_concurrency: Lines of all batches that are worked on at a time.
        clock: Seconds since 1970.
    """

    def __init__(
        self,
        files: FileStore,
        store: BatchStore,
        max_concurrency: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._files, self._store = files, store
        self._max_concurrency = max_concurrency
        self._clock = clock
        self._send: Send | None = None
        # First come, first served: batches take turns.
        self._places = asyncio.Semaphore(max_concurrency)
        self._running: dict[str, _Running] = {}
        self._tidying: asyncio.Task[None] | None = None
        files.keep_while(lambda file_id: self.user_of(file_id) is not None)

    # ---- life --------------------------------------------------------------------------------

    def start(self, send: Send) -> None:
        """Go on with what is not done; called once the server is ready."""
        self._send = send
        self._tidying = asyncio.create_task(self._tidy(), name="old batches and files")
        for record in reversed(self._store.all_batches()):
            if record.body.status not in ENDED:
                logger.info("Batch %s goes on: it was %s", record.body.id, record.body.status)
                self._begin(record)

    async def stop(self) -> None:
        """Leave everything as it is; the next start goes on. Idempotent."""
        self._send = None
        tasks = [running.task for running in self._running.values()]
        if self._tidying is not None:
            tasks.append(self._tidying)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._running.clear()

    async def _tidy(self) -> None:
        """Remove what is old, now and then: nobody needs to ask for it."""
        while True:
            try:
                self._files.expire()
                self.drop_old()
            except OSError as error:
                logger.warning("Old batches and files could not be removed: %s", error)
            await asyncio.sleep(_TIDY_S)

    def drop_old(self) -> None:
        """Forget batches that ended, once they are as old as results get."""
        begun_by = self._clock() - KEPT_S
        for record in self._store.all_batches():
            if record.body.status in ENDED and record.body.created_at <= begun_by:
                self._store.drop(record.body.id)

    def _begin(self, record: BatchRecord) -> None:
        batch_id = record.body.id
        task = asyncio.create_task(self._work(record), name=f"batch {batch_id}")
        running = self._running[batch_id] = _Running(task)
        if record.body.status == CANCELLING:
            running.is_cancelled.set()

        def end(task: "asyncio.Task[None]") -> None:
            if self._running.get(batch_id) is running:
                del self._running[batch_id]
            if not task.cancelled() and (error := task.exception()) is not None:
                logger.error(
                    "Batch %s stopped: it goes on at the next start", batch_id, exc_info=error
                )

        task.add_done_callback(end)

    # ---- what clients ask --------------------------------------------------------------------

    def create(
        self,
        owner: str | None,
        input_file_id: str,
        endpoint: str,
        *,
        metadata: dict[str, str] | None = None,
        output_expires_in: int | None = None,
    ) -> BatchBody:
        """Begin a batch.

        Raises:
            FileNotStoredError: Its input is not there.
            UserInputError: It is for another purpose, or its owner has too many batches or files.
        """
        about = self._files.find(input_file_id, owner)
        if about.purpose != BATCH:
            raise UserInputError(
                f"The file {input_file_id!r} is for {about.purpose!r}: upload it with the purpose "
                f"{BATCH!r}.",
                "input_file_id",
            )
        self._make_room(owner)
        now = int(self._clock())
        body = BatchBody(
            id=f"batch_{uuid.uuid4().hex}",
            endpoint=endpoint,
            input_file_id=input_file_id,
            completion_window=WINDOW,
            created_at=now,
            expires_at=now + _WINDOW_S,
            metadata=metadata,
        )
        record = BatchRecord(body=body, owner=owner, output_expires_in=output_expires_in)
        self._store.save(record)
        self._begin(record)
        return body

    def _make_room(self, owner: str | None) -> None:
        """Forget an owner's oldest batches for a new one.

        Raises:
            UserInputError: There may be no other.
        """
        if self._files.num_free_bytes(owner) <= 0:
            raise UserInputError(
                "Your files take all that they may (--batch-dir-max-bytes), and a batch writes "
                "others: delete some first.",
                "input_file_id",
            )
        bodies = self.batches_of(owner)
        over = [body for body in bodies if body.status in ENDED]
        if len(bodies) - len(over) >= MAX_OPEN:
            raise UserInputError(
                f"{MAX_OPEN} batches of yours are open, and no more may be: wait until one ends, "
                "or cancel it.",
                "input_file_id",
            )
        for body in over[MAX_BATCHES - 1 - (len(bodies) - len(over)) :]:
            self._store.drop(body.id)

    def find(self, batch_id: str, owner: str | None) -> BatchBody:
        """Return a batch.

        Raises:
            FileNotStoredError: There is none of this id, or it is another owner's.
        """
        return self._find(batch_id, owner).body

    def _find(self, batch_id: str, owner: str | None) -> BatchRecord:
        record = self._store.find(batch_id)
        if record is None or record.owner != owner:
            raise FileNotStoredError(f"There is no batch {batch_id[:80]!r}.", "batch_id")
        return record

    def batches_of(self, owner: str | None) -> list[BatchBody]:
        """Return an owner's batches, the newest first."""
        return [record.body for record in self._store.all_batches() if record.owner == owner]

    def cancel(self, batch_id: str, owner: str | None) -> BatchBody:
        """Let a batch send nothing more; what is done is kept.

        Raises:
            FileNotStoredError: As ``find``.
            UserInputError: It has ended.
        """
        record = self._find(batch_id, owner)
        body = record.body
        if body.status in ENDED or body.status == FINALIZING:
            raise UserInputError(f"The batch {batch_id!r} is {body.status}: too late.", "batch_id")
        if body.status != CANCELLING:
            body.status, body.cancelling_at = CANCELLING, self._now()
            self._store.save(record)
        running = self._running.get(batch_id)
        if running is not None:
            running.is_cancelled.set()
        return body

    def delete(self, batch_id: str, owner: str | None) -> None:
        """Forget a batch that has ended; its files stay.

        Raises:
            FileNotStoredError: As ``find``.
            UserInputError: It has not ended.
        """
        body = self.find(batch_id, owner)
        if body.status not in ENDED:
            raise UserInputError(
                f"The batch {batch_id!r} is {body.status}: cancel it first.", "batch_id"
            )
        self._store.drop(batch_id)

    def user_of(self, file_id: str) -> str | None:
        """Return a batch that still reads a file; None: there is none."""
        bodies = (record.body for record in self._store.all_batches())
        return next(
            (b.id for b in bodies if b.input_file_id == file_id and b.status not in ENDED), None
        )

    # ---- work --------------------------------------------------------------------------------

    def _now(self) -> int:
        return int(self._clock())

    async def _work(self, record: BatchRecord) -> None:
        body = record.body
        if body.status != FINALIZING:
            try:
                path = self._files.path_of(body.input_file_id, record.owner)
            except FileNotStoredError as error:
                self._fail(record, [BatchError("input_file_missing", str(error))])
                return
            plan = await asyncio.to_thread(plan_batch, path, body.endpoint)
            if plan.errors:
                self._fail(record, plan.errors)
                return
            await self._send_lines(record, plan, path)
        await self._finalize(record)

    def _fail(self, record: BatchRecord, errors: Sequence[BatchError]) -> None:
        body = record.body
        body.errors = BatchErrors(list(errors))
        body.status, body.failed_at = FAILED, self._now()
        self._store.save(record)

    async def _send_lines(self, record: BatchRecord, plan: Plan, path: Path) -> None:
        """Send what is not done, until all is, the time is over, or the owner cancels."""
        body, running = record.body, self._running[record.body.id]
        body.request_counts.total, body.model = len(plan.lines), plan.model
        if body.status == VALIDATING:
            body.status, body.in_progress_at = IN_PROGRESS, self._now()
            self._store.save(record)
        with self._store.open_log(body.id) as log:
            done = self._count_done(record, log)
            if running.is_cancelled.is_set():
                record.ends_as = CANCELLED
                return
            pending = (line for line in plan.lines if line.number not in done)
            sending = asyncio.ensure_future(self._send_all(record, pending, path, log))
            cancelled = asyncio.ensure_future(running.is_cancelled.wait())
            try:
                await asyncio.wait(
                    {sending, cancelled},
                    timeout=max(0.0, body.expires_at - self._clock()),
                    return_when=asyncio.FIRST_COMPLETED,
                )
                is_done = sending.done() and not sending.cancelled()
            finally:
                cancelled.cancel()
                sending.cancel()
                results = await asyncio.gather(sending, return_exceptions=True)
            if is_done and isinstance(results[0], Exception):
                raise results[0]
            if body.status == CANCELLING:
                record.ends_as = CANCELLED
            elif not is_done:
                record.ends_as = EXPIRED
                self._note_late(plan, path, log)
                body.request_counts.failed = len(plan.lines) - body.request_counts.completed

    def _count_done(self, record: BatchRecord, log: AnswerLog) -> Collection[int]:
        """Count what an earlier process has logged; return the numbers of those lines."""
        done, counts = set(), record.body.request_counts
        counts.completed = counts.failed = 0
        for answered in log.read():
            done.add(answered.number)
            counts.completed += answered.is_good
            counts.failed += not answered.is_good
        return done

    def _note_late(self, plan: Plan, path: Path, log: AnswerLog) -> None:
        """Log an error for every line that was not answered in time."""
        done = {answered.number for answered in log.read()}
        for line in plan.lines:
            if line.number not in done:
                custom_id = read_line(path, line).custom_id
                log.add(Answered(line.number, False, _row(custom_id, None, _NOT_IN_TIME)))

    async def _send_all(
        self,
        record: BatchRecord,
        pending: Iterator[PlannedLine],
        path: Path,
        log: AnswerLog,
    ) -> None:
        async def work() -> None:
            # All pull from one iterator: lines are begun in its order.
            for line in pending:
                async with self._places:
                    await self._answer(record, read_line(path, line), log)

        async with asyncio.TaskGroup() as group:
            for _ in range(self._max_concurrency):
                group.create_task(work())

    async def _answer(self, record: BatchRecord, request: BatchRequest, log: AnswerLog) -> None:
        assert self._send is not None, "lines are sent once the server is ready"
        reply = await self._send(request, record.owner)
        while reply.status in _TRY_AGAIN:
            await asyncio.sleep(reply.retry_after_s)
            reply = await self._send(request, record.owner)
        response = {
            "status_code": reply.status,
            "request_id": reply.request_id,
            "body": reply.body,
        }
        is_good, counts = reply.status == _OK, record.body.request_counts
        log.add(Answered(request.number, is_good, _row(request.custom_id, response, None)))
        counts.completed += is_good
        counts.failed += not is_good

    async def _finalize(self, record: BatchRecord) -> None:
        """Write the results into files; killed meanwhile, it is done again."""
        body = record.body
        record.output_name = record.output_name or f"file-{uuid.uuid4().hex}"
        record.error_name = record.error_name or f"file-{uuid.uuid4().hex}"
        if record.ends_as != CANCELLED and body.status != FINALIZING:
            body.status, body.finalizing_at = FINALIZING, self._now()
        self._store.save(record)
        await asyncio.to_thread(self._write_results, record)
        body.status = record.ends_as
        setattr(body, f"{record.ends_as}_at", self._now())
        self._store.save(record)
        self._store.drop_log(body.id)
        counts = body.request_counts
        logger.info(
            "Batch %s is %s: %d of %d lines answered, %d failed",
            body.id,
            body.status,
            counts.completed,
            counts.total,
            counts.failed,
        )

    def _write_results(self, record: BatchRecord) -> None:
        body = record.body
        names = {True: record.output_name, False: record.error_name}
        counts = {True: 0, False: 0}
        usage = None
        with self._store.open_log(body.id) as log:
            for is_good, name in names.items():
                suffix = "output" if is_good else "error"
                writer = self._files.write(
                    record.owner,
                    f"{body.id}_{suffix}.jsonl",
                    BATCH_OUTPUT,
                    expires_in=record.output_expires_in,
                    file_id=name,
                )
                with writer:
                    for answered in log.read():
                        if answered.is_good is is_good:
                            writer.add(msgspec.json.encode(answered.row) + b"\n")
                            counts[is_good] += 1
                            usage = add_usage(usage, answered.row)
                    if counts[is_good]:
                        writer.finish()
        body.output_file_id = record.output_name if counts[True] else None
        body.error_file_id = record.error_name if counts[False] else None
        body.usage = usage


def _row(
    custom_id: str, response: Mapping[str, Any] | None, error: Mapping[str, Any] | None
) -> dict[str, Any]:
    return {
        "id": f"batch_req_{uuid.uuid4().hex}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }


__all__ = ["COMPLETED", "ENDPOINTS", "WINDOW", "BatchService", "Reply", "Send"]
