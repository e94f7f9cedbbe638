"""The published case scaled down, end to end through ``vllm bench serve``: old behaviour and ours.

    python -m benchmarks.live_case [--input-len 2048] [--settings old none auto]

For each setting a server of the embedded model is started, loaded with prompts that come back each
round, and stopped: ``old`` (whole-block hits at ``--block-size 128``, interval none, window blocks
of every row from the pool: ``old_server``), ``off`` (no prefix cache), or a retention interval at
``--block-size 32``, as the published change chose it. The pools are equal in bytes. One run, so
read the ratios to the first setting; CPU seconds of the server are what other work on the machine
disturbs least. One JSON line.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.result import print_result
from vllm.benchmarks.startup import find_free_port, wait_healthy
from vllm.entrypoints.cli.main import main as vllm

_COLUMNS = ("mean_ttft_ms", "p90_ttft_ms", "mean_tpot_ms", "output_throughput", "cpu_s")
_OLD = "old"


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process and its children so far."""
    folder = Path("/proc") / str(pid)
    fields = (folder / "stat").read_text().rpartition(")")[2].split()
    own = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    tasks = (folder / "task").iterdir()
    children = [child for task in tasks for child in (task / "children").read_text().split()]
    return own + sum(cpu_s(int(child)) for child in children)


def server_command(setting: str, args: argparse.Namespace, port: int) -> list[str]:
    """Return what serves under one setting."""
    program = ["benchmarks.old_server"] if setting == _OLD else ["vllm", "serve"]
    flags = ["--block-size", "128" if setting == _OLD else "32", "--port", str(port)]
    length = max(4096, 2 * args.input_len)
    flags += ["--kv-cache-memory-bytes", str(args.pool_mib << 20), "--max-model-len", str(length)]
    # Times do not depend on what the answers say beyond the length the model was trained for.
    flags += ["--hf-overrides", json.dumps({"max_position_embeddings": max(16_384, length)})]
    if setting == "off":
        flags.append("--no-enable-prefix-caching")
    else:
        interval = "none" if setting == _OLD else setting
        flags += ["--prefix-cache-retention-interval", interval]
    return [sys.executable, "-m", *program, *flags]


def measure(setting: str, args: argparse.Namespace) -> dict[str, Any]:
    """Serve the load under one setting; returns the result of ``vllm bench serve``."""
    port = find_free_port()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(
        server_command(setting, args, port),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
    )
    try:
        wait_healthy(port, server)
        with tempfile.TemporaryDirectory() as folder:
            load = ["--dataset-name", "repeat", "--repeat-input-len", str(args.input_len)]
            load += ["--repeat-output-len", str(args.output_len), "--ignore-eos"]
            load += ["--repeat-pool", str(args.concurrency), "--num-warmups", "2"]
            load += ["--num-prompts", str(args.rounds * args.concurrency)]
            load += ["--max-concurrency", str(args.concurrency), "--metric-percentiles", "90"]
            place = ["--save-result", "--result-dir", folder, "--result-filename", "r.json"]
            before_s = cpu_s(server.pid)
            code = vllm(["bench", "serve", "--port", str(port), *load, *place])
            assert code == 0, f"no request succeeded under {setting}"
            result: dict[str, Any] = json.loads((Path(folder) / "r.json").read_text())
            return result | {"cpu_s": cpu_s(server.pid) - before_s}
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)


def read_flags(flags: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the flags of a run; None: the process's own."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--settings", nargs="+", default=[_OLD, "off", "none", "auto"])
    parser.add_argument("--input-len", type=int, default=2048)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--pool-mib", type=int, default=64)
    return parser.parse_args(flags)


def measure_all(args: argparse.Namespace) -> dict[str, Any]:
    """Measure every setting, print the table, and return its numbers."""
    results = {setting: measure(setting, args) for setting in args.settings}
    first = results[args.settings[0]]
    print("| | hit % | " + " | ".join(f"{name}, to first" for name in _COLUMNS) + " |")
    print("|---|" + "--:|" * (len(_COLUMNS) + 1))
    values: dict[str, Any] = {}
    for setting, result in results.items():
        hit = (result["prefix_cache"] or {}).get("hit_rate", 0.0)
        ratios = {name: result[name] / first[name] for name in _COLUMNS}
        cells = " | ".join(f"{result[name]:.1f}, {ratios[name]:.2f}x" for name in _COLUMNS)
        print(f"| `{setting}` | {100 * hit:.1f} | {cells} |")
        values[setting] = {"hit_rate": hit, **{name: result[name] for name in _COLUMNS}}
    return values


def main() -> None:
    """Measure every setting, and print the table and the JSON line."""
    args = read_flags()
    print_result("live_case", vars(args), measure_all(args))


if __name__ == "__main__":
    main()
