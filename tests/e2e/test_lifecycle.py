"""Clients that leave, signals, a dead engine core: every stream ends and nothing leaks.

Which platform computes has no part in it: servers of one's own run on the CPU alone.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.server_process import ServerProcess

COMPLETIONS = "/v1/completions"
_CPU = {"VLLM_ASCEND_REFERENCE": "0"}
LONG: dict[str, Any] = {"prompt": "Once", "max_tokens": 8000, "ignore_eos": True, "stream": True}


class StreamReader(threading.Thread):
    """Reads a stream to its end, in a thread."""

    def __init__(self, server: ServerProcess, body: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self._url = server.url + COMPLETIONS
        self._body = body
        self.events: list[str] = []
        self.started = threading.Event()
        self.start()
        assert self.started.wait(120), "no first token"

    def run(self) -> None:
        """Read."""
        with httpx.stream("POST", self._url, json=self._body, timeout=60) as response:
            for line in response.iter_lines():
                if line:
                    self.events.append(line.removeprefix("data: "))
                    self.started.set()

    def end(self, timeout_s: float) -> list[str]:
        """The events, once the stream has ended."""
        self.join(timeout_s)
        assert not self.is_alive(), "the stream hangs"
        return self.events


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., ServerProcess]]:
    """Start servers of one's own; a failed test shows their logs."""
    servers: list[ServerProcess] = []

    def start(*flags: str, wait: bool = True, **environment: str) -> ServerProcess:
        log_path = tmp_path / f"log{len(servers)}.txt"
        server = ServerProcess(log_path, *flags, environment={**_CPU, **environment})
        servers.append(server)
        return server.__enter__() if wait else server

    yield start
    for server in servers:
        server.stop()
        print(server.log)


def _wait_for(condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def test_leaving_a_stream_frees_its_blocks(server: ServerProcess) -> None:
    aborts = server.metric("vllm:request_success_total", finished_reason="abort")
    with httpx.stream("POST", server.url + COMPLETIONS, json=LONG, timeout=30) as response:
        assert response.status_code == 200
        lines = response.iter_lines()
        for _ in range(6):
            next(lines)
        assert server.metric("vllm:num_requests_running") == 1
        assert server.metric("vllm:kv_cache_usage_perc") > 0
    server.wait_idle()
    after = server.metric("vllm:request_success_total", finished_reason="abort")
    assert after == aborts + 1


def test_leaving_without_a_stream_frees_its_blocks(server: ServerProcess) -> None:
    aborts = server.metric("vllm:request_success_total", finished_reason="abort")
    body = {**LONG, "stream": False, "n": 2, "temperature": 1.0}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(server.url + COMPLETIONS, json=body, timeout=2)
    server.wait_idle()
    after = server.metric("vllm:request_success_total", finished_reason="abort")
    assert after == aborts + 2


def test_sigterm_drains(launch: Callable[..., ServerProcess]) -> None:
    server = launch("--shutdown-timeout", "120")
    reader = StreamReader(server, {**LONG, "max_tokens": 400})
    server.process.send_signal(signal.SIGTERM)
    _wait_for(lambda: server.get("/ready").status_code == 503)
    refused = server.post(COMPLETIONS, {"prompt": "x"})
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) > 0
    assert refused.json()["error"]["code"] == 503
    assert server.get("/health").status_code == 200
    *_, last, done = reader.end(120)
    assert done == "[DONE]"
    assert json.loads(last)["choices"][0]["finish_reason"] == "length"
    assert server.process.wait(120) == 0


def test_a_full_queue_is_503_and_a_drain_ends_at_its_timeout(
    launch: Callable[..., ServerProcess],
) -> None:
    server = launch(
        *("--max-num-seqs", "1", "--max-num-queued-reqs", "0", "--shutdown-timeout", "0.3")
    )
    reader = StreamReader(server, LONG)
    refused = server.post(COMPLETIONS, {"prompt": "x", "stream": True})
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) > 0
    assert refused.json()["error"]["type"] == "ServiceUnavailableError"
    server.process.send_signal(signal.SIGINT)
    *_, last, done = reader.end(120)
    assert done == "[DONE]"
    assert json.loads(last)["error"]["code"] == 503
    assert server.process.wait(120) == 0


def test_a_second_signal_forces(launch: Callable[..., ServerProcess]) -> None:
    server = launch()
    reader = StreamReader(server, LONG)
    server.process.send_signal(signal.SIGTERM)
    _wait_for(lambda: server.get("/ready").status_code == 503)
    server.process.send_signal(signal.SIGTERM)
    assert reader.end(120)[-1] == "[DONE]"
    assert server.process.wait(120) == 0


def test_a_dead_engine_core_ends_everything(launch: Callable[..., ServerProcess]) -> None:
    server = launch()
    readers = [StreamReader(server, LONG) for _ in range(2)]
    os.kill(server.engine_pid, signal.SIGKILL)
    statuses: list[int] = []

    def unhealthy_or_gone() -> bool:
        try:
            statuses.append(server.get("/health").status_code)
        except httpx.HTTPError:
            return True
        return statuses[-1] == 503

    _wait_for(unhealthy_or_gone)
    for reader in readers:
        *_, last, done = reader.end(120)
        assert done == "[DONE]"
        assert json.loads(last)["error"]["code"] == 500
    assert server.process.wait(120) == 1
    assert 503 in statuses


def test_a_hung_engine_core_counts_as_dead(launch: Callable[..., ServerProcess]) -> None:
    server = launch(VLLM_ENGINE_HEARTBEAT_TIMEOUT="1")
    reader = StreamReader(server, LONG)
    os.kill(server.engine_pid, signal.SIGSTOP)
    *_, last, done = reader.end(120)
    assert done == "[DONE]"
    assert json.loads(last)["error"]["code"] == 500
    assert server.process.wait(120) == 1


def test_ctrl_c_drains_although_every_process_gets_it(
    launch: Callable[..., ServerProcess],
) -> None:
    server = launch("--shutdown-timeout", "120")
    reader = StreamReader(server, {**LONG, "max_tokens": 100})
    os.killpg(server.process.pid, signal.SIGINT)
    *_, last, done = reader.end(120)
    assert done == "[DONE]"
    assert json.loads(last)["choices"][0]["finish_reason"] == "length"
    assert server.process.wait(120) == 0


def test_a_signal_while_starting_ends_at_once(launch: Callable[..., ServerProcess]) -> None:
    server = launch(wait=False)
    _wait_for(lambda: "Starting vLLM server" in server.log, 30)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(120) == 0


def test_an_engine_core_that_cannot_start_is_told_once(
    launch: Callable[..., ServerProcess],
) -> None:
    server = launch("--num-gpu-blocks-override", "3", wait=False)
    assert server.process.wait(240) != 0
    errors = [line for line in server.log.splitlines() if "vllm serve: error:" in line]
    assert len(errors) == 1
    assert "Traceback" not in server.log


def test_the_server_dying_ends_the_engine_core(launch: Callable[..., ServerProcess]) -> None:
    server = launch()
    pid = server.engine_pid
    server.process.kill()
    server.process.wait(120)

    def is_gone() -> bool:
        try:
            return " Z " in Path(f"/proc/{pid}/stat").read_text()
        except FileNotFoundError:
            return True

    _wait_for(is_gone, 15)


def _run_vllm(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "vllm", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_taken_port_is_an_error_before_anything_loads(server: ServerProcess) -> None:
    result = _run_vllm("serve", "deepseek-v4", "--port", str(server.port))
    assert result.returncode == 2
    assert f":{server.port}" in result.stderr
    assert "EngineCore" not in result.stderr


def test_version() -> None:
    result = _run_vllm("--version")
    assert result.returncode == 0
    assert "not the vllm-project's engine" in result.stdout


def test_one_process_will_do_with_api_keys_and_cors(launch: Callable[..., ServerProcess]) -> None:
    origins = '["http://ui.example"]'
    flags = ("--api-key", "k1", "k2", "--allowed-origins", origins)
    server = launch(*flags, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    body = {"prompt": "x", "max_tokens": 3, "ignore_eos": True}
    refused = server.post(COMPLETIONS, body)
    assert refused.status_code == 401
    assert refused.json()["error"]["type"] == "AuthenticationError"
    for key in ("k1", "k2"):
        headers = {"Authorization": f"Bearer {key}", "Origin": "http://ui.example"}
        response = server.post(COMPLETIONS, body, headers=headers)
        assert response.status_code == 200
        assert response.json()["usage"]["completion_tokens"] == 3
        assert response.headers["access-control-allow-origin"] == "http://ui.example"
    assert server.get("/metrics").status_code == 200
    assert server.post("/tokenize", {"prompt": "x"}).status_code == 401
    server.wait_idle()
    assert server.stop() == 0
