"""Runs the sections of ``benchmarks.gpu``, each in a process and within a time of its own.

    python -m benchmarks.gpu_run --output gpu-check.json [--short] [--only kernels families]

The JSON is written after each section, so whatever ends the run, what was found by then is there:

    {"machine": {...}, "sections": {"kernels": {"status": "passed", "results": {...}}, ...}}

A section is "passed", "wrong" (its results say what), "failed", "out of time" (of both the last
output is kept, and what was found by then) or "skipped" (it needs a GPU, or no time was left).
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# What is proven comes before what is measured, and what the aims are about before the rest. The
# first section compiles what the others launch.
SECTIONS_AND_LIMITS_S = {
    "compile": 170,
    "kernels": 100,
    "packed": 40,
    "families": 140,
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
# What is killed is gone at once, unless a driver does not let it go.
_ENDING_S = 5.0
# Compilers that were begun end after the time that they are given.
_COMPILING_S = 130
_KEPT_OUTPUT = 4000
_STATUS = {0: "passed", 1: "wrong", 2: "skipped"}
# Section, figure, at least or at most, aim.
_AIMS = (
    ("small", "decode, batch 1, graphs, share of bandwidth", ">=", 0.6),
    ("small", "decode, batch 64, times transformers", ">=", 10.0),
    ("small", "decode, batch 1, graphs, times no graphs", ">=", 3.0),
    ("large", "prefill, share of bf16 rate", ">=", 0.5),
    ("attention", "4096 tokens, of torch's time", "<=", 1.3),
)


def run_section(command: list[str], limit_s: float) -> dict[str, Any]:
    """Runs one section; returns what is known of it afterwards, whatever happened."""
    begin, is_late = time.monotonic(), False
    with tempfile.TemporaryFile() as log:
        # A session of its own: compilers that it started end with it.
        running = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            running.wait(limit_s)
        except subprocess.TimeoutExpired:
            is_late = True
        finally:
            # Also where this run itself is told to end.
            _end(running)
        log.seek(0)
        output = log.read().decode(errors="replace")
    found: dict[str, Any] = {"seconds": round(time.monotonic() - begin, 1)}
    report = find_report(output)
    if is_late:
        # What it had found by then, if it says so.
        return {"status": "out of time", **found, **report, "output": output[-_KEPT_OUTPUT:]}
    if running.returncode in (0, 1) and "results" in report:
        return {"status": _STATUS[running.returncode], **found, **report}
    status = "skipped" if running.returncode == 2 else "failed"
    return {"status": status, **found, **report, "output": output[-_KEPT_OUTPUT:]}


def _end(running: "subprocess.Popen[bytes]") -> None:
    """Ends a section; one that hangs in the card's driver is left behind."""
    if running.poll() is not None:
        return
    os.killpg(running.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        running.wait(_ENDING_S)


def _stop(*_: object) -> None:
    raise SystemExit("ended from outside")


def find_report(output: str) -> dict[str, Any]:
    """Returns the last line that is a report, of those that a section writes as it goes on."""
    for line in reversed(output.splitlines()):
        if line.startswith('{"machine"'):
            try:
                report: dict[str, Any] = json.loads(line)
            except json.JSONDecodeError:  # cut off
                continue
            return report
    return {}


def compare_aims(sections: dict[str, Any]) -> list[str]:
    """Returns a line for each aim: what was found, and whether that is enough."""
    lines = []
    for section, figure, sign, aim in _AIMS:
        found = sections.get(section, {}).get("results", {}).get(figure)
        if found is None:
            told = "not measured"
        else:
            is_met = found >= aim if sign == ">=" else found <= aim
            told = f"{found:.3g}, " + ("met" if is_met else "TO TUNE")
        lines.append(f"{section}: {figure} {sign} {aim:g}: {told}")
    return lines


def main() -> int:
    """Run the sections; exits with 1 where one is wrong, failed or ran out of its time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="where the JSON goes")
    parser.add_argument("--short", action="store_true", help="fewer cases and repeats")
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS_AND_LIMITS_S), metavar="SECTION")
    parser.add_argument("--limit-s", type=float, default=570.0, help="seconds of all sections")
    args = parser.parse_args()
    deadline = time.monotonic() + args.limit_s
    signal.signal(signal.SIGTERM, _stop)
    report: dict[str, Any] = {"machine": {}, "sections": {}}
    # Now: a path that cannot be written must not cost a run.
    args.output.write_text(json.dumps(report) + "\n", encoding="utf-8")
    for name in args.only or SECTIONS_AND_LIMITS_S:
        left = deadline - time.monotonic()
        found: dict[str, Any] = {"status": "skipped", "output": "no time was left"}
        if left >= _LEAST_S:
            command = [sys.executable, "-m", "benchmarks.gpu", name, *["--short"] * args.short]
            if name == "compile":
                limit = ["--limit-s", str(_COMPILING_S)]
                command = [sys.executable, "-m", "benchmarks.gpu_ahead", *limit]
            found = run_section(command, min(left, SECTIONS_AND_LIMITS_S[name]))
        report["machine"] = found.pop("machine", report["machine"])
        report["sections"][name] = found
        args.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        print(f"{name:<12} {found['status']:<12} {found.get('seconds', 0):>6} s", flush=True)
        for key, value in found.get("results", {}).items():
            if key == "wrong" or name not in ("kernels",):
                print(f"  {key:<48} {f'{value:.4g}' if isinstance(value, float) else value}")
    if not report["machine"].get("card", "none").startswith("none"):
        print("\n".join(compare_aims(report["sections"])))
    bad = [n for n, s in report["sections"].items() if s["status"] not in ("passed", "skipped")]
    print(f"{args.output}: " + (f"look at {', '.join(bad)}" if bad else "nothing is wrong"))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
