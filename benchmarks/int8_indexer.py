"""How many of the indexer's choices change when its keys are rows of one byte per value?

Random queries and keys of DeepSeek-V4-Flash's indexer (64 heads of 128, head weights of either
sign), keys normed as the compressor's are. A choice "changes" when an entry of the exact top-k is
not in the rounded one's. int8 with an fp16 scale is A2's and A3's, fp8 with an fp32 scale A5's;
bf16 rows, which the CPU platform keeps, are measured beside.

    python -m benchmarks.int8_indexer [--num-entries 4096] [--num-selected 512] [--num-queries 256]
"""

import argparse

import torch

from benchmarks.result import print_result
from vllm.v1.attention.ops.reference import index_scores, select_entries
from vllm_ascend.ops.row_formats import Fp8IndexRows, Int8Rows

NUM_HEADS, WIDTH = 64, 128


def measure(num_entries: int, num_selected: int, num_queries: int, seed: int) -> dict[str, float]:
    """Return the share of changed choices, by how the keys are kept.

    Args:
        num_entries: Visible entries per query.
        num_selected: Entries to choose.
        num_queries: Queries.
        seed: Of the random numbers.
    """
    rand = torch.Generator().manual_seed(seed)
    queries = torch.randn(1, num_queries, NUM_HEADS, WIDTH, generator=rand)
    keys = torch.randn(num_entries, WIDTH, generator=rand)
    weights = torch.randn(1, num_queries, NUM_HEADS, generator=rand)
    kept = {
        "int8": Int8Rows().decode(Int8Rows().encode(keys), torch.float32),
        "fp8": Fp8IndexRows().decode(Fp8IndexRows().encode(keys), torch.float32),
        "bf16": keys.bfloat16().float(),
    }
    exact = select_entries(index_scores(queries, keys[None], weights), num_selected)
    shares = {}
    for name, rounded in kept.items():
        chosen = select_entries(index_scores(queries, rounded[None], weights), num_selected)
        num_lost = int((exact & ~chosen).sum())
        shares[name] = num_lost / (num_queries * num_selected)
    return shares


def main() -> None:
    """Measure and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-entries", type=int, default=4096)
    parser.add_argument("--num-selected", type=int, default=512)
    parser.add_argument("--num-queries", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    options = vars(parser.parse_args())
    shares = measure(**options)
    values = {f"changed_share_{name}": share for name, share in shares.items()}
    print_result("int8_indexer", options, values)


if __name__ == "__main__":
    main()
