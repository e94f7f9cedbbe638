"""Sends the requests of a batch, many at a time, and writes down what comes back."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import tqdm

from vllm.entrypoints.batch.lines import BadLine, BatchRequest, count_lines, read_lines
from vllm.entrypoints.batch.results import ResultFile
from vllm.logger import init_logger

logger = init_logger(__name__)

_UNAVAILABLE = 503
_DEFAULT_RETRY_S = 1.0

# Called once for every line that is dealt with.
Advance = Callable[[], object]


@dataclass(slots=True)
class BatchCounts:
    """What became of the lines.

    Attributes:
        num_answered: Requests answered with 200.
        num_failed: Requests answered with an error.
        num_bad: Lines that could not be sent.
        num_done_before: Requests that an earlier run had answered.
    """

    num_answered: int = 0
    num_failed: int = 0
    num_bad: int = 0
    num_done_before: int = 0

    def __str__(self) -> str:
        return (
            f"{self.num_answered} answered, {self.num_failed} failed, {self.num_bad} bad lines, "
            f"{self.num_done_before} done before"
        )


class BatchRunner:
    """One run over one input.

    Owns: the counts, and the tasks while it runs.

    Args:
        client: Of the server; paths are joined to its base URL.
        results: Where results go; says what is done already.
        max_concurrency: Requests sent at a time.
        shows_progress: Whether to draw a bar.
    """

    def __init__(
        self,
        client: httpx.AsyncClient,
        results: ResultFile,
        max_concurrency: int,
        *,
        shows_progress: bool = True,
    ) -> None:
        self._client = client
        self._results = results
        self._max_concurrency = max_concurrency
        self._shows_progress = shows_progress
        self.counts = BatchCounts()

    async def run(self, path: Path) -> None:
        """Answer every line of the file that is not done yet. Cancelling ends what runs."""
        total = count_lines(path)
        with tqdm.tqdm(total=total, unit="req", disable=not self._shows_progress) as bar:
            pending = self._pending(path, bar.update)
            # Workers pull from one iterator: a file of any length is never in memory as a whole.
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self._max_concurrency, max(total, 1))):
                    group.create_task(self._work(pending, bar.update))

    def _pending(self, path: Path, advance: Advance) -> Iterator[BatchRequest]:
        """Yield what must be sent; note the rest."""
        for line in read_lines(path):
            if isinstance(line, BadLine):
                logger.error("line %d: %s", line.number, line.reason)
                self._results.add_bad_line(line)
                self.counts.num_bad += 1
                advance()
            elif line.custom_id in self._results.done:
                self.counts.num_done_before += 1
                advance()
            else:
                yield line

    async def _work(self, pending: Iterator[BatchRequest], advance: Advance) -> None:
        for request in pending:
            await self._answer(request)
            advance()

    async def _answer(self, request: BatchRequest) -> None:
        response = await self._send(request)
        try:
            body = response.json()
        except ValueError:
            body = response.text
        request_id = response.headers.get("x-request-id", "")
        self._results.add_response(request, response.status_code, request_id, body)
        if response.is_success:
            self.counts.num_answered += 1
        else:
            self.counts.num_failed += 1
            logger.error(
                "line %d (%s): status %d: %s",
                request.number,
                request.custom_id,
                response.status_code,
                body,
            )

    async def _send(self, request: BatchRequest) -> httpx.Response:
        """Send a request until the server has room for it."""
        while True:
            response = await self._client.post(request.url, json=dict(request.body))
            if response.status_code != _UNAVAILABLE:
                return response
            await asyncio.sleep(_read_seconds(response.headers.get("retry-after", "")))


def _read_seconds(text: str) -> float:
    return float(text) if text.isdecimal() else _DEFAULT_RETRY_S
