"""Random requests made from the server's own schema never break it."""

import subprocess
import sys

from tests.e2e.server_process import ServerProcess


def test_no_request_makes_a_server_error(server: ServerProcess) -> None:
    command = [sys.executable, "-m", "schemathesis.cli", "run", server.url + "/openapi.json"]
    command += ["--checks", "not_a_server_error", "--phases", "coverage,fuzzing"]
    command += ["--max-examples", "15", "--seed", "1", "--request-timeout", "30"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    assert "Traceback" not in server.log
