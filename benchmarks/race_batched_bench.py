"""llama.cpp's part of ``benchmarks.race``, by its own program ``llama-batched-bench``:

    python race_batched_bench.py PROGRAM MODEL.gguf THREADS SHARED

Reads lines of JSON {kind, tokens, together, count} and answers each with {wall_s}, what the program
says its steps took: it chooses no tokens, so nothing but the engine runs between them. SHARED: 1
where requests share the prompt's rows.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any


def answer(task: Mapping[str, Any]) -> dict[str, float]:
    """Runs the program once."""
    program, model, threads, shared = sys.argv[1:]
    prompt, together, count = len(task["tokens"]), task["together"], task["count"]
    command = [program, "-m", model, "-t", threads, "--output-format", "jsonl"]
    command += ["-npp", str(prompt), "-ntg", str(count), "-npl", str(together)]
    # Of the context each request has an equal part.
    command += ["-c", str(together * (prompt + count + 256))]
    command += ["-pps"] if shared == "1" else []
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    line = next(line for line in ran.stdout.splitlines() if line.startswith("{"))
    return {"wall_s": json.loads(line)["t_pp" if task["kind"] == "prefill" else "t_tg"]}


print(json.dumps({"ready": True}), flush=True)
for told in sys.stdin:
    print(json.dumps(answer(json.loads(told))), flush=True)
