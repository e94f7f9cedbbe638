"""bf16 matrices, packed and with rounded inputs, against them as they lie.

``python -m benchmarks.bf16_products``: each build of the kernels multiplies by both forms in turn,
on one thread. A figure is the best rate by the thread's own processor time, in billions of
operations a second, which other programs on the machine disturb least; in brackets, its ratio to
the plain form of the same vectors.
"""

import argparse
import time

import torch

from vllm.exceptions import EngineError
from vllm.model_executor.layers.quantization.bf16_panels import PackedWeights
from vllm.native.library import NativeContext
from vllm.native.loader import load_library
from vllm.native.tensors import TensorBinder
from vllm.v1.attention.layout import CacheLayout

# What runs the packed form, and the build that its plain form is compared in.
FORMS = {"amx": "avx512", "avx512": "avx512", "avx2": "avx2"}


def find_contexts() -> dict[str, NativeContext]:
    """Returns the builds that run here."""
    library = load_library()
    if library is None:
        raise SystemExit("the native kernels are not built: make native")
    found = {}
    for name in FORMS:
        try:
            found[name] = NativeContext(library, 1, name)
        except EngineError:
            continue
    return found


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 64, 256, 1024])
    parser.add_argument("--outputs", type=int, default=6144)
    parser.add_argument("--inputs", type=int, default=1024)
    parser.add_argument("--matrices", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    contexts = find_contexts()
    plain = TensorBinder(CacheLayout((), {}), {})
    packing = TensorBinder(CacheLayout((), {}), {}, PackedWeights(releases=False))
    weights = [torch.randn(args.outputs, args.inputs).bfloat16() for _ in range(args.matrices)]
    forms = [
        (name, packed) for name in contexts for packed in (False, True) if packed or name != "amx"
    ]
    bound = {
        False: [plain.matrix(weight) for weight in weights],
        True: [packing.matrix(weight) for weight in weights],
    }
    heads = [f"{name}{', packed' if packed else ''}" for name, packed in forms]
    print("| rows of input | " + " | ".join(heads) + " |")
    print("| --- |" + " --: |" * len(forms))
    for rows in args.rows:
        x, output = torch.randn(rows, args.inputs), torch.empty(rows, args.outputs)
        # Where there is much to do, the first two matrices say enough.
        count = args.matrices if rows <= 16 else 2
        best = dict.fromkeys(forms, float("inf"))
        for _ in range(args.rounds):
            for name, packed in forms:
                for matrix in bound[packed][:count]:
                    start = time.thread_time()
                    contexts[name].matmul(matrix, x, output)
                    best[name, packed] = min(best[name, packed], time.thread_time() - start)
        work = 2e-9 * rows * args.outputs * args.inputs
        cells = [
            f"{work / own:.0f}" + (f" ({best[FORMS[name], False] / own:.2f}x)" if packed else "")
            for (name, packed), own in best.items()
        ]
        print(f"| {rows} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
