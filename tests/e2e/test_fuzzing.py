"""Random requests, made from the server's own schema and against it, never break it."""

import subprocess
import sys

from benchmarks.rubbish import find_unrest, send_all
from tests.e2e.server_process import ServerProcess


def test_no_request_makes_a_server_error(server: ServerProcess) -> None:
    command = [sys.executable, "-m", "schemathesis.cli", "run", server.url + "/openapi.json"]
    command += ["--checks", "not_a_server_error", "--phases", "coverage,fuzzing"]
    command += ["--max-examples", "6", "--seed", "1", "--request-timeout", "30"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    assert "Traceback" not in server.log


async def test_rubbish_is_turned_away(session_server: ServerProcess) -> None:
    """Deep, huge, cut, hostile and half-sent bodies, and what is no HTTP; all from one seed."""
    tally = await send_all(session_server.url, 150, 16, seed=3, limit_s=120)
    assert tally.faults == []
    assert sum(tally.statuses.values()) == 150
    assert tally.statuses["400"] > 50
    assert find_unrest(session_server.url) == []
    assert "Traceback" not in session_server.log
