"""Seconds that a gigabyte of a checkpoint takes to load: ``python -m benchmarks.loading``.

Random weights of a shape people run are written in each format, of some layers and of three times
as many. A fresh process starts an engine over each, so that the difference of both is the layers'
alone: reading them from memory that holds the file, and packing them. A figure is the least of
some rounds, of all threads' processor time or of the time on the wall.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.race_files import FOLDERS, FORMATS, SHAPES, find_model
from vllm import LLM

_CACHE_BYTES = 1 << 26


def start_engine(path: str) -> None:
    """Prints how long the processor and the clock ran until an engine was ready."""
    used, start = time.process_time(), time.perf_counter()
    LLM(
        model=path,
        dtype="bfloat16" if "bf16" in path.lower() else "float32",
        skip_tokenizer_init=True,
        max_model_len=64,
        kv_cache_memory_bytes=_CACHE_BYTES,
    )
    print(json.dumps([time.process_time() - used, time.perf_counter() - start]), flush=True)
    # What an engine ends with is not measured.
    os._exit(0)


def measure(path: Path, threads: int) -> tuple[float, float]:
    """Returns what ``start_engine`` prints, of a fresh process."""
    quiet = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.loading", "--start", str(path)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, **quiet, "OMP_NUM_THREADS": str(threads)},
    )
    used, wall = json.loads(run.stdout.splitlines()[-1])
    return used, wall


def count_bytes(path: Path) -> int:
    """Returns the size of a file, or of those of a folder."""
    return sum(file.stat().st_size for file in (path.iterdir() if path.is_dir() else [path]))


def main() -> None:
    """Prints one table: formats by seconds per GB."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--start", help="a file or folder: what a measured process does")
    parser.add_argument("--files", type=Path, help="where the files of weights stay")
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-4b")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--vocab", type=int, default=4096)
    formats = [*FORMATS, *FOLDERS]
    parser.add_argument("--formats", nargs="+", choices=formats, default=formats)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=["cpu", "wall"], default="cpu")
    args = parser.parse_args()
    if args.start is not None:
        start_engine(args.start)
    print("| format | GB | s per GB |")
    print("| --- | --: | --: |")
    with tempfile.TemporaryDirectory() as folder:
        for form in args.formats:
            few, many = (
                find_model(args.shape, layers, args.vocab, form, args.files or Path(folder))
                for layers in (args.layers, 3 * args.layers)
            )
            rounds = [
                [measure(path, args.threads) for path in (few, many)] for _ in range(args.repeats)
            ]
            size = 1e-9 * (count_bytes(many) - count_bytes(few))
            clock = 0 if args.clock == "cpu" else 1
            least_few, least_many = (min(pair[i][clock] for pair in rounds) for i in (0, 1))
            print(f"| {form} | {size:.2f} | {(least_many - least_few) / size:.1f} |", flush=True)


if __name__ == "__main__":
    main()
