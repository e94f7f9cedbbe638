"""Random requests, made from the server's own schema and against it, never break it."""

import subprocess
import sys

import pytest

from benchmarks.rubbish import find_unrest, send_all
from tests.e2e.server_process import ServerProcess

# What requests look like is the same on all platforms. The limits only end a hang: how much is
# sent follows from the seeds.
pytestmark = [
    pytest.mark.parametrize("platform", ["cpu"], indirect=True),
    pytest.mark.timeout(1800),
]
LIMIT_S = 1500
# What they are is served under another path, too, by the same function.
SAME = ("/v1/rerank", "/v2/rerank", "/v1/score", "/v1/systemone")


def test_no_request_makes_a_server_error(server: ServerProcess) -> None:
    command = [sys.executable, "-m", "schemathesis.cli", "run", server.url + "/openapi.json"]
    command += ["--checks", "not_a_server_error", "--phases", "coverage,fuzzing"]
    command += ["--max-examples", "6", "--seed", "1", "--request-timeout", "300"]
    command += [word for path in SAME for word in ("--exclude-path", path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    assert "Traceback" not in server.log


async def test_rubbish_is_turned_away(session_server: ServerProcess) -> None:
    """Deep, huge, cut, hostile and half-sent bodies, and what is no HTTP; all from one seed."""
    tally = await send_all(session_server.url, 150, 16, seed=3, limit_s=LIMIT_S)
    assert tally.faults == []
    assert sum(tally.statuses.values()) == 150
    assert tally.statuses["400"] > 50
    assert find_unrest(session_server.url, limit_s=120) == []
    assert "Traceback" not in session_server.log
