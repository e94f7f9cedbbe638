"""One JSON line per benchmark: what was measured, where, on which commit."""

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from typing import Any


def find_commit() -> str:
    """Return the short hash of the tree's commit, marked where the tree differs from it."""
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    dirty = subprocess.run(
        ["git", "status", "--porcelain"], capture_output=True, text=True, check=False
    )
    return (done.stdout.strip() or "unknown") + ("+changes" if dirty.stdout.strip() else "")


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.split(":")[1].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def describe_machine() -> str:
    """Return the processor's name and its number of cores."""
    return f"{_cpu_name()}, {os.cpu_count()} cores"


def percentiles(samples: Sequence[float]) -> dict[str, float]:
    """Return p10, p50 and p90 of some samples (nearest rank)."""
    ordered = sorted(samples)
    last = len(ordered) - 1
    return {f"p{p}": round(ordered[round(p / 100 * last)], 4) for p in (10, 50, 90)}


def print_result(name: str, config: dict[str, Any], values: dict[str, Any]) -> None:
    """Print the line that ``benchmarks/compare.py`` reads."""
    line = {
        "benchmark": name,
        "commit": find_commit(),
        "hardware": describe_machine(),
        "python": platform.python_version(),
        "config": config,
        "values": values,
    }
    print(json.dumps(line), flush=True)
