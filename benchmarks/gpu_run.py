"""Runs the sections of ``benchmarks.gpu``, each in a process and within a time of its own.

    python -m benchmarks.gpu_run --output gpu-check.json [--short] [--only kernels families]

The JSON is written after each section, so whatever ends the run, what was found by then is there:

    {"machine": {...}, "sections": {"kernels": {"status": "passed", "results": {...}}, ...}}

A section is "passed", "wrong" (its results say what), "failed" (its last output is kept), "out of
time" or "skipped" (it needs a GPU, or no time was left for it).
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

# What is proven comes before what is measured, and what the aims are about before the rest.
SECTIONS_AND_LIMITS_S = {
    "kernels": 100,
    "packed": 40,
    "families": 120,
    "waits": 60,
    "draws": 40,
    "invariance": 60,
    "small": 150,
    "large": 120,
    "attention": 60,
    "sampling": 40,
    "packed_speed": 40,
    "gemma": 80,
    "v4": 80,
}
_LEAST_S = 10
_KEPT_OUTPUT = 4000
_STATUS = {0: "passed", 1: "wrong", 2: "skipped"}


def run_section(command: list[str], limit_s: float) -> dict[str, Any]:
    """Runs one section; returns what is known of it afterwards, whatever happened."""
    begin = time.monotonic()
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""
        text = output.decode(errors="replace") if isinstance(output, bytes) else output
        return {"status": "out of time", "seconds": limit_s, "output": text[-_KEPT_OUTPUT:]}
    found: dict[str, Any] = {"seconds": round(time.monotonic() - begin, 1)}
    lines = done.stdout.strip().splitlines()
    try:
        report = json.loads(lines[-1]) if lines else {}
    except json.JSONDecodeError:
        report = {}
    if done.returncode in (0, 1) and "results" in report:
        return {"status": _STATUS[done.returncode], **found, **report}
    status = "skipped" if done.returncode == 2 else "failed"
    return {"status": status, **found, "output": done.stdout[-_KEPT_OUTPUT:]}


def main() -> int:
    """Run the sections; exits with 1 where one is wrong, failed or ran out of its time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="where the JSON goes")
    parser.add_argument("--short", action="store_true", help="fewer cases and repeats")
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS_AND_LIMITS_S), metavar="SECTION")
    parser.add_argument("--limit-s", type=float, default=570.0, help="seconds of all sections")
    args = parser.parse_args()
    deadline = time.monotonic() + args.limit_s
    report: dict[str, Any] = {"machine": {}, "sections": {}}
    for name in args.only or SECTIONS_AND_LIMITS_S:
        left = deadline - time.monotonic()
        found: dict[str, Any] = {"status": "skipped", "output": "no time was left"}
        if left >= _LEAST_S:
            command = [sys.executable, "-m", "benchmarks.gpu", name, *["--short"] * args.short]
            found = run_section(command, min(left, SECTIONS_AND_LIMITS_S[name]))
        report["machine"] = found.pop("machine", report["machine"])
        report["sections"][name] = found
        args.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        print(f"{name:<12} {found['status']:<12} {found.get('seconds', 0):>6} s", flush=True)
        for key, value in found.get("results", {}).items():
            if key == "wrong" or name not in ("kernels",):
                print(f"  {key:<48} {f'{value:.4g}' if isinstance(value, float) else value}")
    bad = [n for n, s in report["sections"].items() if s["status"] not in ("passed", "skipped")]
    print(f"{args.output}: " + (f"look at {', '.join(bad)}" if bad else "nothing is wrong"))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
