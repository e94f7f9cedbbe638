"""How much quicker a prompt is answered from the disk than computed, and how long its load takes.

    python -m benchmarks.restore [--model deepseek-v4] [--tokens 8000] [--repeats 3] [--limit 0]

For each repeat one engine computes a prompt and keeps it, and an engine of its own, over the same
folder and with the rows dropped from the page cache, answers it from there. ``--model qwen3-0.6b``
is a checkpoint of that shape with random weights. Prints one line: seconds by the clock until the
first token, cold and from the disk, of a processor too; bytes; the load's own time, and what the
same objects take when one thread reads and checks them and nothing else runs (``read_s``, right
before, also from the disk): the aim for the load is 1.3 times that and 10 ms.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.kills import store_of
from benchmarks.result import print_result
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.client import InlineCore
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.engine_args import EngineArgs
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.kv_offload.store.file_calls import DiskFiles
from vllm.v1.kv_offload.store.folder import rows_path
from vllm.v1.kv_offload.store.rows_file import RowsFile

_UNIT = 32
_SETTLE_S = 0.002
_QWEN = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32000,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}


def make_engine(
    model: str,
    folder: Path | None,
    limit: int,
    pool_bytes: int,
    size: str = "6GiB",
    **more: Any,
) -> LLMEngine:
    """Return an engine in this process, over a folder; ``more`` are arguments of its own."""
    if limit:
        more["hf_overrides"] = {"max_position_embeddings": limit}
        more["max_model_len"] = limit
    if Path(model).is_dir():
        more |= {"load_format": "dummy", "skip_tokenizer_init": True}
    if folder is not None:
        more |= {"prefix_cache_dir": str(folder), "prefix_cache_disk_size": size}
        more["prefix_cache_warm"] = 0
    args = EngineArgs(model=model, block_size=_UNIT, kv_cache_memory_bytes=pool_bytes, **more)
    config = args.create_vllm_config()
    return LLMEngine(config, InlineCore(lambda: EngineCore(config, UniProcExecutor)))


def ask(engine: LLMEngine, prompt: list[int]) -> dict[str, Any]:
    """Return the seconds to a prompt's first token, the token, and what was cached of it."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    began, busy = time.perf_counter(), time.process_time()
    engine.add_request("0", {"prompt_token_ids": prompt}, params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                return {
                    "s": time.perf_counter() - began,
                    "processor_s": time.process_time() - busy,
                    "tokens": list(output.outputs[0].token_ids),
                    "cached": output.num_cached_tokens or 0,
                }
    raise AssertionError("the request ended without an answer")


def tier_of(engine: LLMEngine) -> Any:
    """Return the tiers of an engine in this process."""
    return engine._core._core.scheduler.connector._tier  # type: ignore[attr-defined]


def settle(engine: LLMEngine) -> None:
    """Let everything be written."""
    core = engine._core._core  # type: ignore[attr-defined]
    while core.scheduler.connector.hooks.has_pending_work():
        core.step()
        time.sleep(_SETTLE_S)


def wait_open(engine: LLMEngine) -> Any:
    """Return the store when all of its index is read."""
    while (store := store_of(engine)) is None or not store.state.is_ready:
        time.sleep(_SETTLE_S)
    return store


def drop_cached(path: Path) -> None:
    """Have the kernel forget a file's pages."""
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(handle)


def read_all(path: Path, store: Any) -> tuple[float, int]:
    """Return the seconds that one thread takes to read and check all objects, and their bytes."""
    files = DiskFiles()
    handle = files.open(path, writable=False)
    rows = RowsFile(files, handle, store.shape.slot_bytes)
    began, num_bytes = time.perf_counter(), 0
    for entry in sorted(store.content.list_objects(), key=lambda entry: entry.position):
        num_bytes += len(rows.read(entry.extent))
    seconds = time.perf_counter() - began
    files.close(handle)
    return seconds, num_bytes


def measure(arguments: argparse.Namespace, model: str, seed: int) -> dict[str, float]:
    """Compute a prompt, restore it in another engine, and compare."""
    rng = random.Random(seed)
    prompt = [rng.randrange(10, 1000) for _ in range(arguments.tokens)]
    pool_bytes = arguments.pool_mib << 20
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "cache"
        engine = make_engine(model, folder, arguments.limit, pool_bytes)
        wait_open(engine)
        cold = ask(engine, prompt)
        settle(engine)
        path = rows_path(tier_of(engine).stores.keeper.path, 0)
        engine.shutdown()
        engine = make_engine(model, folder, arguments.limit, pool_bytes)
        store = wait_open(engine)
        drop_cached(path)
        read_s, num_bytes = read_all(path, store)
        drop_cached(path)
        warm = ask(engine, prompt)
        totals = tier_of(engine).reports.counts.look({"disk": store})
        load_s, loaded = totals.read_seconds.get("disk", 0.0), totals.read_bytes.get("disk", 0)
        engine.shutdown()
    assert warm["tokens"] == cold["tokens"]
    read_s *= loaded / num_bytes
    return {
        "cold_s": cold["s"],
        "warm_s": warm["s"],
        "ratio": cold["s"] / warm["s"],
        "cold_processor_s": cold["processor_s"],
        "warm_processor_s": warm["processor_s"],
        "processor_ratio": cold["processor_s"] / warm["processor_s"],
        "cached_tokens": float(warm["cached"]),
        "mib": loaded / 2**20,
        "load_s": load_s,
        "read_s": read_s,
        "aim_s": 1.3 * read_s + 0.010,
        "within_aim": float(0 < load_s <= 1.3 * read_s + 0.010),
    }


def main() -> None:
    """Measure, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="deepseek-v4")
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit", type=int, default=0, help="Longest context; 0: the model's.")
    parser.add_argument("--pool-mib", type=int, default=256)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        model = arguments.model
        if model == "qwen3-0.6b":
            model = place
            (Path(place) / "config.json").write_text(json.dumps(_QWEN))
        runs = [measure(arguments, model, seed) for seed in range(arguments.repeats)]
    values = {name: round(statistics.median(run[name] for run in runs), 4) for name in runs[0]}
    config = {"model": arguments.model, "tokens": arguments.tokens, "repeats": arguments.repeats}
    print_result("restore", {**config, "load": round(os.getloadavg()[0], 1)}, values)


if __name__ == "__main__":
    main()
