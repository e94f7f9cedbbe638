"""What the rows of one environment share; runs where only that client is installed.

A row is a function that is handed a ``Row`` and fills in what the client saw. The model of the
server says the same in every turn: it calls ``look_up`` with ``ARGUMENTS``.
"""

import json
import os
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

# Clients draw on the standard output; the runner reads lines from what was there before.
_told = os.fdopen(os.dup(1), "w", encoding="utf-8")
os.dup2(2, 1)
URL = os.environ.get("CLIENTS_URL", "http://127.0.0.1:8000")
V1 = URL + "/v1"
MODEL = "agent"
ARGUMENTS = {"key": "Bérgen 🏔", "days": 3}
TURNS = 10
# The other server's model does what each client's own tools and formats ask for, three times.
URL_WORKER = os.environ.get("CLIENTS_WORKER_URL", "http://127.0.0.1:8001")
WORKER_V1 = URL_WORKER + "/v1"
WORKER = "worker"
WORKER_KEY = "worker-key"
WORKER_TURNS = 3
WORKER_CALLS = [ARGUMENTS] * WORKER_TURNS
SAID = "All three records are found."
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"key": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["key", "days"],
}
ASK = "Find the record. " * 8
RESULT = "The record holds nothing of note. "
# A picture of one point.
IMAGE = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk"
    "+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
# Longer than the context of the server.
TOO_LONG = "word " * 20_000


@dataclass
class Row:
    """What one client did.

    Attributes:
        calls: Arguments of every call that the client handed to its tool.
        cached: Cached tokens of each turn, where the client tells them.
        tokens: Tokens of answers, where the client tells them.
        shown: What else shows that it worked.
    """

    calls: list[dict[str, Any]] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    tokens: int = 0
    shown: str = ""

    def look_up(self, key: str, days: int) -> str:
        """Look a record up."""
        self.calls.append({"key": key, "days": days})
        return RESULT

    def check_agent(self, turns: int = TURNS) -> None:
        """Ten calls, each with the model's own arguments; every turn reads more from the cache."""
        assert self.calls == [ARGUMENTS] * turns, self.calls
        if self.cached:
            rising = self.cached[1:]
            assert len(self.cached) == turns, self.cached
            assert rising == sorted(rising), self.cached
            assert rising[0] > 0, self.cached
            assert rising[-1] > rising[0], self.cached


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def expect_overflow(row: Row, refusal: type[Exception], ask: Callable[[], object]) -> None:
    """Asks with more than the model's context; the client's error has the code that says so.

    Args:
        row: Shows the code.
        refusal: The client's class of errors with status 400.
        ask: Asks.
    """
    try:
        ask()
    except refusal as error:
        row.shown = getattr(error, "code", "")
        assert row.shown == "context_length_exceeded", error
        return
    raise AssertionError("no error")


def run(rows: dict[str, Callable[[Row], None]], package: str, version: str = "") -> None:
    """Run rows, or those that the command line names; print one JSON line each.

    Args:
        rows: Functions by the names of their rows.
        package: Whose version is told.
        version: Of what is no Python package.
    """
    wanted = sys.argv[1:] or list(rows)
    told_version = version or metadata.version(package)
    _tell(package=package, version=told_version)
    for name in wanted:
        row = Row()
        _tell(begin=name)
        _wait()
        error = ""
        try:
            rows[name](row)
        except BaseException as failure:  # a row's failure is its result
            error = f"{type(failure).__name__}: {failure}"[:600]
            traceback.print_exc()
        told = {
            "row": name,
            "ok": not error,
            "error": error,
            "calls": len(row.calls),
            "cached": sum(row.cached),
            "tokens": row.tokens,
            "shown": row.shown,
        }
        _tell(**told)
        _wait()


def _tell(**fields: Any) -> None:
    print(json.dumps(fields), file=_told, flush=True)


def _wait() -> None:
    """Let the runner read the server's counters before the next requests."""
    if "CLIENTS_HOME" in os.environ:
        sys.stdin.readline()
