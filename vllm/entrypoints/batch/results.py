"""The output of a batch: one result a line, and what an interrupted run left of it."""

import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from vllm.entrypoints.batch.lines import BadLine, BatchRequest

_OK = 200


class ResultFile:
    """Appends results; those of an earlier run that succeeded stay, the others are done again.

    Owns: the file, while open.

    Args:
        path: Where results go; need not exist.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.done = frozenset(self._keep_good_rows())
        self._file = path.open("ab")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()

    def _keep_good_rows(self) -> list[str]:
        """Rewrite the file without failures and a half-written end; return what is done."""
        if not self._path.exists():
            return []
        good = list(_good_rows(self._path))
        beside = self._path.with_name(self._path.name + ".tmp")
        with beside.open("wb") as file:
            file.writelines(raw for _, raw in good)
        os.replace(beside, self._path)
        return [custom_id for custom_id, _ in good]

    def add_response(self, request: BatchRequest, status: int, request_id: str, body: Any) -> None:
        """Append what a server answered."""
        response = {"status_code": status, "request_id": request_id, "body": body}
        self._append(request.custom_id, response, None)

    def add_bad_line(self, line: BadLine) -> None:
        """Append why a line was not sent."""
        message = f"line {line.number}: {line.reason}"
        self._append(line.custom_id, None, {"code": "invalid_line", "message": message})

    def _append(self, custom_id: str | None, response: Any, error: Any) -> None:
        row = {
            "id": f"batch_req_{uuid.uuid4().hex}",
            "custom_id": custom_id,
            "response": response,
            "error": error,
        }
        # One write, so that an interrupted run leaves whole lines, but for the last.
        self._file.write(msgspec.json.encode(row) + b"\n")
        self._file.flush()


def _good_rows(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield custom_id and line of each result that need not be made again."""
    with path.open("rb") as file:
        for raw in file:
            try:
                row = msgspec.json.decode(raw)
                is_good = row["response"]["status_code"] == _OK
                custom_id = row["custom_id"]
            except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError):
                continue
            if is_good and raw.endswith(b"\n"):
                yield custom_id, raw
