"""The runner of a GPU's sections: whatever a section does, what was found by then is written."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_run

REPORT = 'print("noise"); print(\'{"machine": {"card": "C"}, "results": {"wrong": {}}}\')'
SCRIPTS = {
    "kernels": REPORT,
    "families": f"{REPORT}; raise SystemExit(1)",
    "waits": "print('no GPU'); raise SystemExit(2)",
    "draws": "import os; print('last words', flush=True); os.abort()",
    "invariance": "import threading; print('begun', flush=True); threading.Event().wait()",
}


def run(monkeypatch: pytest.MonkeyPatch, output: Path, *arguments: str) -> tuple[int, Any]:
    """Runs the sections' stand-ins; returns the exit status and the JSON."""
    run_section = gpu_run.run_section

    def stand_in(command: list[str], limit_s: float) -> dict[str, Any]:
        name = command[3]
        # Only what never ends runs into its limit, however slow the machine is.
        limit_s = 1.0 if name == "invariance" else 600.0
        return run_section([sys.executable, "-c", SCRIPTS[name]], limit_s)

    monkeypatch.setattr(gpu_run, "run_section", stand_in)
    monkeypatch.setattr(sys, "argv", ["gpu_run", "--output", str(output), *arguments])
    status = gpu_run.main()
    return status, json.loads(output.read_text(encoding="utf-8"))


def test_every_end_of_a_section_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    status, report = run(monkeypatch, tmp_path / "check.json", "--only", *SCRIPTS)
    found = report["sections"]
    assert status == 1
    assert report["machine"] == {"card": "C"}
    assert {name: section["status"] for name, section in found.items()} == {
        "kernels": "passed",
        "families": "wrong",
        "waits": "skipped",
        "draws": "failed",
        "invariance": "out of time",
    }
    assert "last words" in found["draws"]["output"]
    assert found["kernels"]["results"] == {"wrong": {}}


def test_a_section_that_is_cut_off_keeps_what_it_had_found() -> None:
    begun = '{"machine": {"card": "C"}, "results": {"first": 1, "wrong": {}}}'
    output = f"{begun.replace('1', '0')}\nnoise\n{begun}\n" + '{"machine": {"card": "C"}, "resu'
    assert gpu_run.find_report(output) == json.loads(begun)
    assert gpu_run.find_report("noise") == {}


def test_sections_without_time_left_are_skipped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    arguments = ("--only", "kernels", "--limit-s", "5")
    status, report = run(monkeypatch, tmp_path / "check.json", *arguments)
    assert status == 0
    assert report["sections"]["kernels"] == {"status": "skipped", "output": "no time was left"}


def test_a_run_that_is_ended_ends_its_section(tmp_path: Path) -> None:
    number = tmp_path / "number"
    script = f"""
import sys, threading
from benchmarks import gpu_run
hangs = "import os, threading; open({str(number)!r}, 'w').write(str(os.getpid())); " \\
    "threading.Event().wait()"
run_section = gpu_run.run_section
gpu_run.run_section = lambda command, limit: run_section([sys.executable, "-c", hangs], limit)
sys.argv = ["gpu_run", "--only", "kernels", "--output", {str(tmp_path / "check.json")!r}]
gpu_run.main()
"""
    running = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL)
    while not (number.exists() and number.read_text()):
        assert running.poll() is None
        time.sleep(0.01)
    running.terminate()
    assert running.wait() == 1
    with pytest.raises(ProcessLookupError):
        os.kill(int(number.read_text()), 0)
    assert json.loads((tmp_path / "check.json").read_text())["sections"] == {}
