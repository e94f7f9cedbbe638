"""The published case scaled down, end to end through ``vllm bench serve``: policies side by side.

    python -m benchmarks.live_case [--input-len 2048] [--settings off none auto]

For each setting a server of the embedded model is started, loaded with prompts that come back each
round, and stopped: ``off`` (no prefix cache, the published baseline), or a retention interval. One
run, so read the ratios to the first setting. One JSON line.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.result import print_result
from vllm.benchmarks.startup import find_free_port, wait_healthy
from vllm.entrypoints.cli.main import main as vllm

_COLUMNS = ("mean_ttft_ms", "p90_ttft_ms", "mean_tpot_ms", "output_throughput")


def measure(setting: str, args: argparse.Namespace) -> dict[str, Any]:
    """Serve the load under one setting; returns the result of ``vllm bench serve``."""
    port = find_free_port()
    command = [sys.executable, "-m", "vllm", "serve", "--block-size", "32", "--port", str(port)]
    command += ["--num-gpu-blocks-override", str(args.blocks), "--max-model-len", "4096"]
    command += (
        ["--no-enable-prefix-caching"]
        if setting == "off"
        else ["--prefix-cache-retention-interval", setting]
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
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
            code = vllm(["bench", "serve", "--port", str(port), *load, *place])
            assert code == 0, f"no request succeeded under {setting}"
            result: dict[str, Any] = json.loads((Path(folder) / "r.json").read_text())
            return result
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)


def main() -> None:
    """Measure every setting, and print the table and the JSON line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--settings", nargs="+", default=["off", "none", "0", "auto"])
    parser.add_argument("--input-len", type=int, default=2048)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=2400, help="Of the pool.")
    args = parser.parse_args()
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
    print_result("live_case", vars(args), values)


if __name__ == "__main__":
    main()
