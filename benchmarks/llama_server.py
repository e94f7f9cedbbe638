"""llama.cpp's server for a benchmark that compares with it."""

import socket
import subprocess
import time

import httpx

_WAIT_S = 300


class LlamaServer:
    """Serves a GGUF file on a CPU while the ``with`` block runs, which gets a client for it.

    Args:
        program: The server's binary.
        model: The file.
        flags: Of the server.
    """

    def __init__(self, program: str, model: str, *flags: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=None)
        command = [program, "-m", model, "--port", str(port), "-ngl", "0", *flags]
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def __enter__(self) -> httpx.Client:
        deadline = time.monotonic() + _WAIT_S
        while not self._is_healthy():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.__exit__()
                raise RuntimeError("llama.cpp's server did not start")
            time.sleep(0.1)
        return self._client

    def __exit__(self, *_: object) -> None:
        self._client.close()
        self._process.terminate()
        self._process.wait()

    def _is_healthy(self) -> bool:
        try:
            return self._client.get("/health").status_code == 200
        except httpx.TransportError:
            return False
