"""What writing to the disk costs: the writer's processor time, bytes beyond the rows, the limit.

    python -m benchmarks.writing [--seconds 60] [--limit 12MiB] [--budget 100TiB] [--place DIR]

One engine answers prompts that share beginnings, over a folder that is much too small for them. It
is filled, and written over where that pays; with a budget that is never reached everything is
written, evicted and written again. Prints one line:

* seconds of a processor: of the whole process, and of the threads that write and commit;
* bytes that the device was sent for each byte of acknowledged objects, the file system's own
  included: with ``--place``, a folder on a file system that nobody else uses. Without it what Linux
  counts for this process (``write_bytes`` of /proc/self/io), which leaves the file system's own out
  and may count 128 KiB for a cell that is changed in a file with large pages;
* bytes of slots and entries in use for each byte of objects that can be found;
* the most bytes of all files together that another process saw, every 10 ms, and the limit.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.restore import make_engine, settle, wait_open
from benchmarks.result import print_result
from vllm.sampling_params import SamplingParams
from vllm.utils.byte_sizes import parse_size
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.kv_offload.store.cells import CELL_BYTES
from vllm.v1.kv_offload.store.folder import disk_bytes

_SAMPLE_S = 0.01
# Its column in a device's statistics.
_SECTORS_WRITTEN = 6
_NUM_HEADS = 12
_ANSWER = 24


def watch(folder: str, stop: Any, most: Any) -> None:
    """Note the most bytes that all files of a folder took at any time."""
    while not stop.is_set():
        most.value = max(most.value, disk_bytes(Path(folder)))
        time.sleep(_SAMPLE_S)


def written_bytes(place: str | None) -> int:
    """Return the bytes that a place's device was sent, or that this process sent to devices."""
    if place is not None:
        number = os.stat(place).st_dev
        path = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}/stat")
        return int(path.read_text().split()[_SECTORS_WRITTEN]) * 512
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("write_bytes"))


def thread_seconds() -> dict[str, float]:
    """Return the processor seconds of this process's named threads so far."""
    found: dict[str, float] = {}
    for thread in threading.enumerate():
        path = Path(f"/proc/self/task/{thread.native_id}/schedstat")
        if path.exists():
            found[thread.name] = int(path.read_text().split()[0]) / 1e9
    return found


def load(engine: LLMEngine, seconds: float, seed: int) -> int:
    """Answer prompts for so long; returns the tokens that were computed or hit."""
    rng = random.Random(seed)
    heads = [[rng.randrange(10, 1000) for _ in range(2000)] for _ in range(_NUM_HEADS)]
    params = SamplingParams(temperature=0.0, max_tokens=_ANSWER, ignore_eos=True, detokenize=False)
    deadline, number, num_tokens = time.monotonic() + seconds, 0, 0
    while time.monotonic() < deadline or engine.has_unfinished_requests():
        while time.monotonic() < deadline and engine.get_num_unfinished_requests() < 3:
            head = rng.choice(heads)[: rng.randrange(200, 2000)]
            prompt = [*head, *(rng.randrange(10, 1000) for _ in range(rng.randrange(40, 1500)))]
            engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
            num_tokens += len(prompt) + _ANSWER
            number += 1
        engine.step()
    return num_tokens


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--limit", default="12MiB")
    parser.add_argument("--budget", help="Of bytes written a day.")
    parser.add_argument("--place", help="Where the folder is made.")
    arguments = parser.parse_args()
    limit = parse_size("--limit", arguments.limit)
    with tempfile.TemporaryDirectory(dir=arguments.place) as place:
        folder = Path(place) / "cache"
        stop, most = multiprocessing.Event(), multiprocessing.Value("q", 0)
        watcher = multiprocessing.Process(target=watch, args=(str(folder), stop, most))
        watcher.start()
        more = {"prefix_cache_write_budget": arguments.budget} if arguments.budget else {}
        engine = make_engine("deepseek-v4", folder, 0, 48 << 20, arguments.limit, **more)
        store = wait_open(engine)
        bytes_before, threads_before = written_bytes(arguments.place), thread_seconds()
        busy = time.process_time()
        num_tokens = load(engine, arguments.seconds, 0)
        settle(engine)
        os.sync()
        busy = time.process_time() - busy
        threads = thread_seconds()
        sent = written_bytes(arguments.place) - bytes_before
        by_name = {name: threads[name] - threads_before.get(name, 0.0) for name in threads}
        writer_s = by_name["prefix-cache-writer"] + by_name["prefix-cache-disk"]
        counts, objects = store.counts, sum(store.content.num_objects().values())
        in_use = store.content.used_bytes + objects * CELL_BYTES
        values = {
            "served_tokens": num_tokens,
            "committed": counts.committed,
            "evicted": counts.evicted,
            "process_s": round(busy, 2),
            "writer_s": round(writer_s, 3),
            "writer_share": round(writer_s / busy, 4),
            "committed_mib": round(counts.committed_bytes / 2**20, 1),
            "sent_per_byte": round(sent / counts.committed_bytes, 3),
            "in_use_per_byte": round(in_use / store.content.live_bytes, 4),
        }
        engine.shutdown()
        stop.set()
        watcher.join()
        values |= {"most_bytes": most.value, "limit_bytes": limit, "within": most.value <= limit}
    config = {"seconds": arguments.seconds, "limit": arguments.limit, "budget": arguments.budget}
    print_result("writing", {**config, "load": round(os.getloadavg()[0], 1)}, values)


if __name__ == "__main__":
    main()
