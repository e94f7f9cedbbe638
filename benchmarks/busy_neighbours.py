"""How far neighbours that never rest slow a decode step down, against the same steps without them.

    python -m benchmarks.busy_neighbours [--steps 200] [--threads 2] [--native 1]

Decode steps of the random 28M-parameter DeepSeek-V4 of ``benchmarks.engine`` at batch 4: first as
the machine is, then with one spinning process per core. Wall time in milliseconds; one JSON line.
The first half says something only on a machine that has nothing else to do.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.engine import CONFIG, build_reference
from benchmarks.result import percentiles, print_result
from tests.model_executor.models.harness import PagedHarness
from tests.model_executor.published import plain_model
from vllm.model_executor.model_loader.loader import load_model_weights
from vllm.platforms.host_cpus import count_usable_cores

BATCH = 4
PROMPT_LEN = 64


def time_steps(harness: PagedHarness, num_steps: int) -> list[float]:
    """Return the milliseconds of decode steps."""
    rng = random.Random(0)
    length = PROMPT_LEN + num_steps
    requests = [
        harness.add([rng.randrange(CONFIG["vocab_size"]) for _ in range(length)])
        for _ in range(BATCH)
    ]
    harness.step([(request, PROMPT_LEN) for request in requests])
    times = []
    for _ in range(num_steps):
        begin = time.perf_counter()
        harness.step([(request, 1) for request in requests])
        times.append(1000 * (time.perf_counter() - begin))
    return times


def main() -> None:
    """Measure both and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--threads", type=int, default=count_usable_cores())
    parser.add_argument("--native", type=int, choices=(0, 1), default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_reference(folder)
        model = plain_model(json.loads((folder / "config.json").read_text()))
        load_model_weights(model, folder, use_tqdm=False)
    found = []
    for num_neighbours in (0, len(os.sched_getaffinity(0))):
        spin = [sys.executable, "-c", "while True: pass"]
        neighbours = [subprocess.Popen(spin) for _ in range(num_neighbours)]
        try:
            harness = PagedHarness(
                model, num_blocks=BATCH * 400, native=args.threads if args.native else 0
            )
            found.append(time_steps(harness, args.steps))
        finally:
            for neighbour in neighbours:
                neighbour.kill()
                neighbour.wait()
    alone, busy = found
    values = {
        "alone": {**percentiles(alone), "max": round(max(alone), 2)},
        "busy": {**percentiles(busy), "max": round(max(busy), 2)},
        "slowest_to_median": round(max(busy) / percentiles(alone)["p50"], 2),
    }
    config = {"steps": args.steps, "threads": args.threads, "native": args.native, "batch": BATCH}
    print_result("busy_neighbours", config, values)


if __name__ == "__main__":
    main()
