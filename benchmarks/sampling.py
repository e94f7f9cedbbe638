"""How long it takes to draw a batch's tokens from its logits, natively and by torch.

    python -m benchmarks.sampling [--vocab-size 151936] [--batch 32] [--threads 2] [--repeats 9]

Random logits of a spread that leaves a nucleus of some hundred tokens. Medians of wall time in
milliseconds, the two side by side, and how many of the drawn tokens are the same; one JSON line.
"""

import argparse
import time
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.result import print_result
from vllm.native.library import NativeContext
from vllm.native.loader import load_library
from vllm.native.sampling import draw_tokens as draw_natively
from vllm.platforms.host_cpus import count_usable_cores
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.counter_rng import make_key
from vllm.v1.sample.metadata import RowSampling, SamplingMetadata
from vllm.v1.sample.sampler import DrawTokens, draw_tokens, sample

SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 0.7, "top_k": 50},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    {"temperature": 1.0, "min_p": 0.05},
)
SPREAD = 3.0


def compare(
    args: argparse.Namespace, options: dict[str, Any], native: DrawTokens
) -> dict[str, Any]:
    """Return the medians of one setting."""
    rows = [RowSampling(SamplingParams(**options), make_key(i), 0) for i in range(args.batch)]
    metadata = SamplingMetadata.build(rows, args.vocab_size, "cpu")
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(args.batch, args.vocab_size, generator=generator) * SPREAD
    times: dict[str, list[float]] = {"native": [], "torch": []}
    num_equal = 0
    for repeat in range(args.repeats):
        drawn = []
        for name, draw in (("native", native), ("torch", draw_tokens)):
            fresh, positions = logits.clone(), np.full(args.batch, repeat)
            begin = time.perf_counter()
            drawn.append(sample(fresh, metadata, positions, draw=draw).token_ids)
            times[name].append(1000 * (time.perf_counter() - begin))
        num_equal += int((drawn[0] == drawn[1]).sum())
    medians = {name: float(np.median(values)) for name, values in times.items()}
    return {
        "setting": options,
        **{name: round(value, 3) for name, value in medians.items()},
        "torch_to_native": round(medians["torch"] / medians["native"], 1),
        "equal": f"{num_equal} of {args.batch * args.repeats}",
    }


def main() -> None:
    """Measure every setting and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab-size", type=int, default=151_936)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--threads", type=int, default=count_usable_cores())
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    library = load_library()
    if library is None:
        parser.error("the native library is not built: make native")
    native = partial(draw_natively, NativeContext(library, args.threads))
    print_result("sampling", vars(args), {"rows": [compare(args, o, native) for o in SETTINGS]})


if __name__ == "__main__":
    main()
