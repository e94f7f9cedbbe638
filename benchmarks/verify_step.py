"""What does a step that verifies q - 1 drafts per request cost, against a decode step of one row?

    python -m benchmarks.verify_step [--context 600] [--repeats 15] [--threads 1]

The embedded checkpoint's architecture with random fp32 weights: index tables, model and logits of
a step over 1, 4 and 8 requests with 1, 2 and 4 rows each. Steps of all sizes take turns, so that
noise falls on all of them, and write the same rows again and again. One JSON line: milliseconds of
CPU time per step, and ratios of the medians to the step of one row.
"""

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

import vllm
from benchmarks.result import percentiles, print_result
from vllm.model_executor.model_loader.dummy import fill_with_dummy_weights
from vllm.model_executor.models.deepseek_v4.config import DeepseekV4Config
from vllm.model_executor.models.deepseek_v4.kv_cache import deepseek_v4_kv_cache_specs
from vllm.model_executor.models.deepseek_v4.model import DeepseekV4ForCausalLM
from vllm.v1.attention.layout import CacheLayout
from vllm.v1.attention.metadata import BlockTableView, RequestSlice, build_step_metadata
from vllm.v1.attention.ops.registry import get_reference_op
from vllm.v1.core.layout.packing import group_for_packing
from vllm.v1.kv_cache_interface import KVCacheConfig

BLOCK_SIZE = 32
BATCHES = (1, 4, 8)
ROWS = (1, 2, 4)


class StepRunner:
    """A random model and pages for the largest batch, all of whose contexts are as long.

    Args:
        context: Tokens before the step.
    """

    def __init__(self, context: int) -> None:
        path = Path(vllm.__file__).parent / "assets" / "deepseek-v4" / "config.json"
        config = DeepseekV4Config.from_dict(json.loads(path.read_text(encoding="utf-8")))
        self._model = DeepseekV4ForCausalLM(
            config, ops=get_reference_op, dtype=torch.float32, device="cpu"
        )
        fill_with_dummy_weights(self._model.weight_slots(), 0)
        self._context = context
        self._rng = np.random.default_rng(0)
        self._vocab_size = config.vocab_size
        specs = deepseek_v4_kv_cache_specs(config, BLOCK_SIZE, torch.float32, torch.float32)
        groups = group_for_packing(specs)
        self._layout = CacheLayout.from_kv_cache_config(KVCacheConfig(0, [], groups))
        self._num_blocks = [
            -(-(context + max(ROWS)) // group.block_size) for group in self._layout.groups
        ]
        self._kv_caches = self._fill_pages(specs)

    def _fill_pages(self, specs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        pages = {}
        for name, spec in specs.items():
            group_id = self._layout.group_of[name]
            num_blocks = 1 + max(BATCHES) * self._num_blocks[group_id]
            rows = self._layout.groups[group_id].rows_per_block
            pages[name] = torch.randn(num_blocks, rows, spec.head_size)
        return pages

    def run(self, num_requests: int, num_rows: int) -> float:
        """Runs one step and returns its seconds."""
        slices = [self._make_slice(request, num_rows) for request in range(num_requests)]
        shape = num_requests * num_rows
        token_ids = torch.from_numpy(self._rng.integers(10, self._vocab_size, shape))
        positions = torch.arange(self._context, self._context + num_rows).repeat(num_requests)
        begin = time.process_time()
        with torch.inference_mode():
            meta = build_step_metadata(slices, self._layout, "cpu")
            streams = self._model(token_ids, positions, meta, self._kv_caches)
            self._model.compute_logits(streams).argmax(-1).tolist()
        return time.process_time() - begin

    def _make_slice(self, request: int, num_rows: int) -> RequestSlice:
        tables = tuple(
            BlockTableView(0, np.arange(count, dtype=np.int64) + 1 + request * count)
            for count in self._num_blocks
        )
        return RequestSlice(self._context, num_rows, tables)


def main() -> None:
    """Measure and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--context", type=int, default=600)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    runner = StepRunner(args.context)
    values: dict[str, Any] = {}
    for batch in BATCHES:
        samples: dict[int, list[float]] = {rows: [] for rows in ROWS}
        for turn in range(args.repeats + 2):
            for rows, seconds in samples.items():
                seconds.append(runner.run(batch, rows))
                if turn < 2:
                    seconds.clear()  # warm-up
        base = percentiles([1e3 * s for s in samples[1]])["p50"]
        for rows, seconds in samples.items():
            found = percentiles([1e3 * s for s in seconds])
            values[f"batch_{batch}_rows_{rows}_ms"] = {
                **found,
                "ratio": round(found["p50"] / base, 2),
            }
    print_result("verify_step", vars(args), values)


if __name__ == "__main__":
    main()
