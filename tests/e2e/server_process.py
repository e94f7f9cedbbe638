"""A real ``vllm serve`` process."""

import os
import re
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from tests.ports import free_ports

# Deadlines end a hang and say nothing of speed: machines that run tests are busy.
_START_TIMEOUT_S = 240.0
_ANSWER_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 60.0
# Every step checks the cache's invariants, whose cost grows with the pool: so it is small here.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CHECK_INVARIANTS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "0.03",
}
ENVIRONMENT = {**os.environ, **_ENVIRONMENT}
# Nothing here speaks TLS: reading the system's certificates for each request takes longest of all.
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
_READY_LINE = re.compile(r"Engine core ready \(process (\d+)\)")


def sum_series(page: str, name: str, **labels: str) -> float:
    """The sum of a metric's series that carry ``labels``."""
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in page.splitlines()
        if line.startswith(name + "{") and all(f'{k}="{v}"' in line for k, v in labels.items())
    )


class ServerProcess:
    """A server, on the embedded checkpoint by default; stops with the ``with`` block."""

    def __init__(
        self,
        log_path: Path,
        *flags: str,
        environment: dict[str, str] | None = None,
        model: str = "deepseek-v4",
        program: Sequence[str] = (sys.executable, "-m", "vllm"),
    ) -> None:
        self.port = free_ports()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_path = log_path
        command = [*program, "serve", model, "--block-size", "32"]
        command += ["--port", str(self.port), *flags]
        with log_path.open("w") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a group of its own: tests signal all of it
                env={**ENVIRONMENT, **(environment or {})},
            )

    def __enter__(self) -> "ServerProcess":
        deadline = time.monotonic() + _START_TIMEOUT_S
        try:
            while not self._is_healthy():
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the server did not start:\n{self.log}")
                time.sleep(0.05)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def _is_healthy(self) -> bool:
        try:
            return self.get("/health").status_code == 200
        except httpx.HTTPError:
            return False

    def stop(self) -> int:
        """End the process if it runs; return its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
        return self.process.wait(_STOP_TIMEOUT_S)

    @property
    def log(self) -> str:
        """What the server wrote."""
        return self.log_path.read_text()

    @property
    def engine_pid(self) -> int:
        """The engine core's process id."""
        match = _READY_LINE.search(self.log)
        assert match is not None, self.log
        return int(match[1])

    def get(self, path: str) -> httpx.Response:
        """GET a path."""
        return httpx.get(self.url + path, timeout=_ANSWER_TIMEOUT_S, verify=NO_TLS)

    def post(self, path: str, body: Any, **kwargs: Any) -> httpx.Response:
        """POST JSON to a path."""
        url = self.url + path
        return httpx.post(url, json=body, timeout=_ANSWER_TIMEOUT_S, verify=NO_TLS, **kwargs)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's series that carry ``labels``."""
        return sum_series(self.get("/metrics").text, name, **labels)

    def wait_idle(self, timeout_s: float = 60.0) -> None:
        """Wait until nothing runs and no block is held; fails when that takes too long."""
        deadline = time.monotonic() + timeout_s
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        while True:
            page = self.get("/metrics").text
            values = [sum_series(page, f"vllm:{name}") for name in names]
            if not any(values):
                return
            assert time.monotonic() < deadline, dict(zip(names, values, strict=True))
            time.sleep(0.05)
