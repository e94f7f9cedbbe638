"""How long from the command to a healthy server, and how much memory it peaks at.

    python -m benchmarks.startup [--runs 3] [--model deepseek-v4]

Starts ``vllm serve`` as a user does, polls ``/health``, sends one completion, reads the peak
resident memory of both processes from /proc, and stops the server. One JSON line.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from benchmarks.result import percentiles, print_result


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
        RuntimeError: The server ended or did not become healthy in time.
    """
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with code {process.returncode}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.01)
    raise RuntimeError(f"the server was not healthy after {limit_s} s")


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


def run_once(model: str) -> tuple[float, float]:
    """Start and stop the server once; return seconds to healthy and peak MiB."""
    port = find_free_port()
    command = [sys.executable, "-m", "vllm", "serve", model, "--port", str(port)]
    begin = time.monotonic()
    process = subprocess.Popen(
        [*command, "--block-size", "32"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        wait_healthy(port, process)
        seconds = time.monotonic() - begin
        complete(port)
        return seconds, peak_memory_mib(process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)


def main() -> None:
    """Measure several starts and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--model", default="deepseek-v4")
    args = parser.parse_args()
    # The first start of a fresh checkout also compiles bytecode; users start more than once.
    run_once(args.model)
    samples = [run_once(args.model) for _ in range(args.runs)]
    values = {
        "seconds_to_healthy": percentiles([seconds for seconds, _ in samples]),
        "peak_memory_mib": percentiles([memory for _, memory in samples]),
    }
    print_result(
        "startup", {"model": args.model, "runs": args.runs, "cores": os.cpu_count()}, values
    )


if __name__ == "__main__":
    main()
