"""How much memory each rank of a model takes.

    python -m benchmarks.rank_memory FOLDER --ranks 2 [--spread-experts]

Ranks load the weights and stop: no KV pool, no steps. Linux only. What each read of the files is in
its log line ("Loaded ... tensors").
"""

import argparse
from pathlib import Path

from benchmarks.result import print_result
from vllm.v1.engine.engine_args import EngineArgs
from vllm.v1.executor.process_ranks import ProcessRanks
from vllm.v1.executor.ranked_executor import RankedExecutor

_TIMEOUT_S = 600.0


def main() -> None:
    """Load, measure, print a line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--spread-experts", action="store_true")
    args = parser.parse_args()
    config = EngineArgs(
        str(args.folder),
        tensor_parallel_size=args.ranks,
        enable_expert_parallel=args.spread_experts,
        distributed_executor_backend="mp",
        skip_tokenizer_init=True,
        use_tqdm_on_load=False,
    ).create_vllm_config()
    ranks = ProcessRanks(args.ranks, _TIMEOUT_S)
    executor = RankedExecutor(config, lambda _: ranks)
    try:
        found = [read_memory(pid) for pid in ranks.pids]
    finally:
        executor.shutdown()
    file_bytes = sum(file.stat().st_size for file in args.folder.glob("*.safetensors"))
    print_result(
        "rank_memory",
        {"ranks": args.ranks, "spread_experts": args.spread_experts},
        {
            "file_mib": file_bytes >> 20,
            "peak_mib": [peak >> 20 for peak, _ in found],
            "kept_mib": [kept >> 20 for _, kept in found],
        },
    )


def read_memory(pid: int) -> tuple[int, int]:
    """Return a process's peak of resident memory, and what it holds of its own now, in bytes."""
    fields = {}
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if value.strip().endswith("kB"):
            fields[name] = int(value.split()[0]) << 10
    return fields["VmHWM"], fields["RssAnon"]


if __name__ == "__main__":
    main()
