"""``vllm bench startup``: from the command to a healthy server, and the memory it peaks at.

Starts ``vllm serve`` as a user does, polls ``/health``, sends one completion, reads the peak
resident memory of both processes from /proc, and stops the server.
"""

import argparse
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from vllm.benchmarks.report.metrics import percentile
from vllm.exceptions import ConfigError, EngineError


def find_free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def child_pids(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            found += child_pids(int(child))
    return found


def peak_memory_mib(pid: int) -> float:
    """Return the summed peak resident memory of a process tree, in MiB."""
    total_kib = 0
    for each in child_pids(pid):
        for line in Path(f"/proc/{each}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                total_kib += int(line.split()[1])
    return total_kib / 1024


def wait_healthy(port: int, process: subprocess.Popen[bytes], limit_s: float = 120) -> None:
    """Poll /health until it answers 200.

    Raises:
        EngineError: The server ended or did not become healthy in time.
    """
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise EngineError(f"The server ended with code {process.returncode}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.01)
    raise EngineError(f"The server was not healthy after {limit_s} s")


def complete(port: int) -> None:
    """Send one small completion, so that the peak covers real work."""
    body = json.dumps({"prompt": "Hello", "max_tokens": 8}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        data=body,
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        json.load(answer)


def run_once(model: str, flags: Sequence[str] = ()) -> tuple[float, float]:
    """Start and stop the server once; return seconds to healthy and peak MiB."""
    port = find_free_port()
    command = [sys.executable, "-m", "vllm", "serve", model, "--port", str(port), *flags]
    begin = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_healthy(port, process)
        seconds = time.monotonic() - begin
        complete(port)
        return seconds, peak_memory_mib(process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)


def run_startup(args: argparse.Namespace) -> int:
    """Measure several starts."""
    if args.num_iters < 1:
        raise ConfigError(f"--num-iters {args.num_iters} must be at least 1.")
    if not Path("/proc/self/status").exists():
        raise ConfigError("Peak memory is read from /proc, which this system does not have.")
    for _ in range(args.num_iters_warmup):
        run_once(args.model, args.serve_flags)
    samples = [
        run_once(args.model, args.serve_flags)
        for _ in tqdm(range(args.num_iters), desc="starts", disable=None)
    ]
    result: dict[str, object] = {"model_id": args.model}
    for name, values in (
        ("startup_seconds", [seconds for seconds, _ in samples]),
        ("peak_memory_mib", [memory for _, memory in samples]),
    ):
        result |= {
            f"avg_{name}": sum(values) / len(values),
            name: values,
            f"{name}_percentiles": {str(p): percentile(values, p) for p in (10, 50, 90)},
        }
        print(f"{name}: median {percentile(values, 50):.2f}, all {[round(v, 2) for v in values]}")
    if args.output_json is not None:
        args.output_json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0
