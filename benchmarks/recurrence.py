"""What share of a native step the recurrence takes, of a model with the layers of Qwen 3.5 0.8B.

    python -m benchmarks.recurrence [--dtype bfloat16] [--context 600] [--repeats 5]
        [--clock cpu]

Times steps of a random model, logits included: decode at several batch sizes, and a prompt. In
turns with each step the recurrence of all its layers runs by itself over as many rows: the settling
of drafts does just that, convolution, reading and writing of states included. A table:
milliseconds, least of the repeats, the share, and how much longer the step takes than reading its
weights once and its states twice (they are written too), at the rate of a sum over 512 MiB in the
same run.
"""

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.engine import CLOCKS
from benchmarks.families import measure_bandwidth
from vllm.model_executor.model_loader.dummy import fill_with_dummy_weights
from vllm.model_executor.models.decoder.kv_cache import decoder_kv_cache_specs
from vllm.model_executor.models.decoder.model import DecoderForCausalLM
from vllm.model_executor.models.qwen3_5 import read_qwen3_5
from vllm.native.decoder import NativeDecoder
from vllm.native.library import NativeContext
from vllm.native.loader import load_library
from vllm.native.step_tables import build_native_tables
from vllm.v1.attention.layout import CacheLayout
from vllm.v1.attention.metadata import BlockTableView, RequestSlice
from vllm.v1.attention.ops.registry import get_reference_op
from vllm.v1.core.layout.packing import group_for_packing
from vllm.v1.kv_cache_interface import KVCacheConfig

BLOCK_SIZE = 32
CONFIG: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "vocab_size": 248320,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}
# Requests, tokens of each.
STEPS = {"decode, batch 1": (1, 1), "batch 8": (8, 1), "batch 32": (32, 1), "prefill": (1, 128)}


class StepRunner:
    """A random model and pages for the largest step.

    Args:
        dtype: Of weights; states are fp32 and keys and values of the same type.
        context: Tokens before a decode step.
        num_threads: That compute.
        clock: Seconds.
    """

    def __init__(
        self, dtype: torch.dtype, context: int, num_threads: int, clock: Callable[[], float]
    ) -> None:
        self._clock = clock
        config = read_qwen3_5(CONFIG)
        model = DecoderForCausalLM(config, ops=get_reference_op, dtype=dtype, device="cpu")
        fill_with_dummy_weights(model.weight_slots(), 0)
        # A tied head counts once, and of the embedding a step reads single rows.
        self._weight_bytes = sum(slot.nbytes for slot in model.weight_slots().values())
        self._state_bytes = sum(
            4 * plan.num_value_heads * plan.key_dim * plan.value_dim for plan in config.recurrences
        )
        self._context, self._vocab_size = context, config.vocab_size
        specs = decoder_kv_cache_specs(config, BLOCK_SIZE, dtype, torch.float32)
        groups = group_for_packing(specs)
        self._layout = CacheLayout.from_kv_cache_config(KVCacheConfig(0, [], groups))
        requests = max(count for count, _ in STEPS.values())
        length = context + max(tokens for _, tokens in STEPS.values())
        self._blocks = [
            group.state.num_blocks if group.state else -(-length // group.block_size)
            for group in self._layout.groups
        ]
        caches = {}
        for name, spec in specs.items():
            page = spec.page_layout()
            num_blocks = 1 + requests * self._blocks[self._layout.group_of[name]]
            caches[name] = torch.zeros(num_blocks, page.rows, page.width, dtype=page.dtype)
        library = load_library()
        assert library is not None, "make native"
        context_of = NativeContext(library, num_threads)
        self._native = NativeDecoder(model, self._layout, caches, context_of)

    def time_step(self, num_requests: int, num_tokens: int) -> float:
        """Return the milliseconds of a step."""
        start = self._context if num_tokens == 1 else 0
        begin = self._clock()
        self._run(num_requests, start, num_tokens, 0)
        return 1e3 * (self._clock() - begin)

    def count_bytes(self, num_requests: int) -> int:
        """Return the bytes that a step cannot but read or write."""
        return self._weight_bytes + 2 * num_requests * self._state_bytes

    def time_recurrence(self, num_requests: int, num_tokens: int) -> float:
        """Return the milliseconds of the recurrence over as many rows."""
        start = self._context if num_tokens == 1 else 0
        slices = self._run(num_requests, start, num_tokens + 1, num_tokens)
        begin = self._clock()
        self._native.settle_drafts(slices, [num_tokens] * num_requests)
        return 1e3 * (self._clock() - begin)

    def _run(self, num_requests: int, start: int, count: int, drafts: int) -> list[RequestSlice]:
        slices = [self._make_slice(r, start, count, drafts) for r in range(num_requests)]
        ids = torch.randint(self._vocab_size, (num_requests * count,))
        positions = torch.arange(start, start + count).repeat(num_requests)
        stream = self._native(ids, positions, build_native_tables(slices, self._layout), {})
        self._native.compute_logits(stream[count - 1 :: count]).argmax(-1).tolist()
        return slices

    def _make_slice(self, request: int, start: int, count: int, drafts: int) -> RequestSlice:
        tables = []
        for group, blocks in zip(self._layout.groups, self._blocks, strict=True):
            ids = np.arange(blocks, dtype=np.int64) + 1 + request * blocks
            if group.state is not None:
                # One state serves all steps: what is read and what is left at the end.
                is_held = np.zeros((start + count - 1) // BLOCK_SIZE + 1, dtype=np.int64)
                for position in (start, start + count - drafts, start + count):
                    is_held[max(0, position - 1) // BLOCK_SIZE] = 1
                ids = np.outer(is_held, ids).ravel()
            tables.append(BlockTableView(0, ids))
        end = start + count - drafts
        return RequestSlice(start, count, tuple(tables), wanted_from=end - 1, num_drafts=drafts)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--context", type=int, default=600)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--clock", choices=tuple(CLOCKS), default="wall")
    args = parser.parse_args()
    clock, threads = CLOCKS[args.clock], torch.get_num_threads()
    runner = StepRunner(getattr(torch, args.dtype), args.context, threads, clock)
    rate = 1e6 * measure_bandwidth(clock)
    print("|  | step, ms | recurrence, ms | share | times reading |")
    print("| --- | --: | --: | --: | --: |")
    for name, size in STEPS.items():
        steps, parts = [], []
        for _ in range(args.repeats + 1):
            steps.append(runner.time_step(*size))
            parts.append(runner.time_recurrence(*size))
        step, part = min(steps[1:]), min(parts[1:])
        reading = runner.count_bytes(size[0]) / rate
        print(f"| {name} | {step:.1f} | {part:.2f} | {part / step:.1%} | {step / reading:.2f} |")
    print(f"reading at {rate / 1e6:.1f} GB/s")


if __name__ == "__main__":
    main()
