"""A ``vllm serve`` process for a benchmark."""

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

import httpx


class LiveServer:
    """Serves while the ``with`` block runs.

    Args:
        log_path: Gets what it writes.
        flags: Of ``vllm serve``, the model first.
    """

    def __init__(self, log_path: Path, *flags: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_path = log_path
        command = [sys.executable, "-m", "vllm", "serve", *flags, "--port", str(self.port)]
        with log_path.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    def __enter__(self) -> Self:
        deadline = time.monotonic() + 600
        while not self.is_healthy():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.process.kill()
                raise RuntimeError(f"the server did not start:\n{self.log_path.read_text()}")
            time.sleep(0.05)
        return self

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def is_healthy(self) -> bool:
        """Whether it serves."""
        try:
            return httpx.get(self.url + "/health", timeout=10).status_code == 200
        except httpx.HTTPError:
            return False
