"""How far neighbours that never rest slow a decode step down, against the same steps without them.

    python -m benchmarks.busy_neighbours [--rounds 6] [--steps 200] [--batch 4] [--threads 2]
        [--native 1]

Decode steps of the random 28M-parameter DeepSeek-V4 of ``benchmarks.engine``: first as the machine
is, then with one spinning process per core, as many rounds as asked for, because one round's
slowest step says little. Wall time in milliseconds; one JSON line. The first half of a round says
something only on a machine that has nothing else to do.
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
from tqdm import tqdm

from benchmarks.engine import CONFIG, build_reference
from benchmarks.result import percentiles, print_result
from tests.model_executor.models.harness import PagedHarness
from tests.model_executor.published import plain_model
from vllm.model_executor.model_loader.loader import load_model_weights
from vllm.platforms.host_cpus import count_usable_cores

PROMPT_LEN = 64


def time_steps(harness: PagedHarness, batch: int, num_steps: int) -> list[float]:
    """Return the milliseconds of decode steps of ``batch`` requests."""
    rng = random.Random(0)
    length = PROMPT_LEN + num_steps
    requests = [
        harness.add([rng.randrange(CONFIG["vocab_size"]) for _ in range(length)])
        for _ in range(batch)
    ]
    harness.step([(request, PROMPT_LEN) for request in requests])
    times = []
    for _ in range(num_steps):
        begin = time.perf_counter()
        harness.step([(request, 1) for request in requests])
        times.append(1000 * (time.perf_counter() - begin))
    return times


def time_beside(
    num_neighbours: int, model: torch.nn.Module, args: argparse.Namespace
) -> list[float]:
    """Return the milliseconds of ``args.steps`` steps beside processes that never rest."""
    spin = [sys.executable, "-c", "while True: pass"]
    neighbours = [subprocess.Popen(spin) for _ in range(num_neighbours)]
    try:
        harness = PagedHarness(
            model, num_blocks=args.batch * 400, native=args.threads if args.native else 0
        )
        return time_steps(harness, args.batch, args.steps)
    finally:
        for neighbour in neighbours:
            neighbour.kill()
            neighbour.wait()


def main() -> None:
    """Measure both, round by round, and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--threads", type=int, default=count_usable_cores())
    parser.add_argument("--native", type=int, choices=(0, 1), default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_reference(folder)
        model = plain_model(json.loads((folder / "config.json").read_text()))
        load_model_weights(model, folder, use_tqdm=False)
    rounds, ratios = [], []
    for _ in tqdm(range(args.rounds), unit="round"):
        alone = time_beside(0, model, args)
        busy = time_beside(len(os.sched_getaffinity(0)), model, args)
        timings = {
            name: {**percentiles(times), "max": round(max(times), 2)}
            for name, times in (("alone", alone), ("busy", busy))
        }
        rounds.append(timings)
        ratios.append(round(max(busy) / timings["alone"]["p50"], 2))
    values = {"slowest_to_median": sorted(ratios), "rounds": rounds}
    print_result("busy_neighbours", vars(args), values)


if __name__ == "__main__":
    main()
