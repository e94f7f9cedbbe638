"""llama.cpp's part of ``benchmarks.race``, by its own program ``llama-batched-bench``:

    python race_batched_bench.py PROGRAM MODEL.gguf THREADS SHARED CLOCK

Reads lines of JSON {kind, prompts, count} and answers each with {wall_s}, what the program says its
steps took: it draws tokens, each request's own, so nothing but the engine runs between them. By
the clock "cpu" it answers with {cpu_s}: the processor time of a run less that of one without those
steps. SHARED: 1 where requests share the prompt's rows.
"""

import json
import resource
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

_MOST_RUNS = 20


def run(prompt: int, together: int, count: int) -> tuple[dict[str, Any], float]:
    """Runs the program; returns what it says, and the seconds of processor time it took."""
    program, model, threads, shared, _ = sys.argv[1:]
    command = [program, "-m", model, "-t", threads, "--output-format", "jsonl"]
    command += ["-npp", str(prompt), "-ntg", str(count), "-npl", str(together)]
    # Of the context each request has an equal part.
    command += ["-c", str(together * (prompt + count + 256))]
    command += ["-pps"] if shared == "1" else []
    # It may end well and say nothing: what it wrote is lost now and then.
    for _ in range(_MOST_RUNS):
        before = spent_by_children()
        ran = subprocess.run(command, capture_output=True, text=True, check=True)
        spent = spent_by_children() - before
        for line in ran.stdout.splitlines():
            if line.startswith("{"):
                return json.loads(line), spent
    raise SystemExit(f"{' '.join(command)} said nothing in {_MOST_RUNS} runs")


def spent_by_children() -> float:
    """Returns the processor time of all processes that were started and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def answer(task: Mapping[str, Any]) -> dict[str, float]:
    """Runs the program once, by the clock "cpu" twice."""
    prompt, together, count = len(task["prompts"][0]), len(task["prompts"]), task["count"]
    is_prefill = task["kind"] == "prefill"
    if sys.argv[5] == "wall":
        told, _ = run(prompt, together, count)
        return {"wall_s": told["t_pp" if is_prefill else "t_tg"]}
    _, spent = run(prompt, together, 1 if is_prefill else count + 1)
    _, without = run(1 if is_prefill else prompt, together, 1)
    return {"cpu_s": spent - without}


print(json.dumps({"ready": True}), flush=True)
for told in sys.stdin:
    print(json.dumps(answer(json.loads(told))), flush=True)
