"""Packed matrices against the products of plain ones: ``python -m benchmarks.packed_products``.

One process multiplies by each form in turn, round after round, so that what else the machine does
meets all of them; a figure is the best of a form's speeds and, beside it, the median of the rounds'
ratios to the first form. Each pass goes over several matrices, more than the caches hold.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from gguf import GGMLQuantizationType as Type

from tests.model_executor.model_loader.gguf_files import random_blocks
from vllm.model_executor.layers.quantization.gguf_blocks import read_blocks
from vllm.model_executor.layers.quantization.panels import CodedRows, GroupValues, PackedRows
from vllm.model_executor.layers.quantization.storages import PlainRows
from vllm.model_executor.model_loader.int8_weights import round_rows
from vllm.native.library import NativeContext
from vllm.native.loader import load_library
from vllm.native.structs import Matrix
from vllm.native.tensors import TensorBinder
from vllm.v1.attention.layout import CacheLayout
from vllm.v1.attention.ops.stored import Inputs, RowSource


def make_bf16(rows: int, columns: int) -> RowSource:
    return PlainRows(torch.randn(rows, columns).bfloat16())


def make_int8(inputs: Inputs) -> Callable[[int, int], RowSource]:
    def make(rows: int, columns: int) -> RowSource:
        return PackedRows(round_rows(torch.randn(rows, columns), "w"), "w", inputs)

    return make


def make_int4(group: int, inputs: Inputs = "whole") -> Callable[[int, int], RowSource]:
    def make(rows: int, columns: int) -> RowSource:
        words = torch.randint(-(2**31), 2**31, (rows, columns // 8)).int()
        scales = GroupValues(torch.rand(rows, columns // group).half())
        return PackedRows(CodedRows("int4", words, columns, group, scales), "w", inputs)

    return make


def make_blocks(name: str, inputs: Inputs = "whole") -> Callable[[int, int], RowSource]:
    def make(rows: int, columns: int) -> RowSource:
        blocks = random_blocks(Type[name], rows, columns, 0, columns**-0.5)
        return PackedRows(read_blocks(name, torch.from_numpy(blocks)), "w", inputs)

    return make


FORMS: dict[str, Callable[[int, int], RowSource]] = {
    "bf16": make_bf16,
    "int8": make_int8("whole"),
    "int4 g32": make_int4(32),
    "int4 g128": make_int4(128),
    "Q4_K": make_blocks("Q4_K"),
    "Q6_K": make_blocks("Q6_K"),
    "Q8_0": make_blocks("Q8_0"),
    "int8, int8 inputs": make_int8("bytes by row"),
    "int4 g32, int8 inputs": make_int4(32, "bytes by group"),
    "int4 g128, int8 inputs": make_int4(128, "bytes by group"),
    "Q4_K, int8 inputs": make_blocks("Q4_K", "bytes by group"),
    "Q8_0, int8 inputs": make_blocks("Q8_0", "bytes by group"),
    "int4 g32, int16 inputs": make_int4(32, "two bytes by group"),
    "Q4_K, int16 inputs": make_blocks("Q4_K", "two bytes by group"),
    "Q8_0, int16 inputs": make_blocks("Q8_0", "two bytes by group"),
}
for _name in ("Q6_K", "Q4_0", "Q3_K", "Q2_K", "IQ3_XXS", "IQ2_XXS"):
    FORMS[_name] = make_blocks(_name)
    FORMS[f"{_name}, int8 inputs"] = make_blocks(_name, "bytes by group")


def find_ratio(first: list[float], own: list[float]) -> float:
    """Returns how many times as fast as the first form another was, in the median round."""
    return statistics.median(a / b for a, b in zip(first, own, strict=True))


def main() -> None:
    """Prints a table: billions of operations a second at best, and the median ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 64, 256])
    parser.add_argument("--outputs", type=int, default=6144)
    parser.add_argument("--inputs", type=int, default=1024)
    parser.add_argument("--matrices", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=["cpu", "wall"], default="wall")
    parser.add_argument("--forms", nargs="+", choices=list(FORMS), default=list(FORMS))
    args = parser.parse_args()
    read_clock = time.process_time if args.clock == "cpu" else time.perf_counter
    library = load_library()
    if library is None:
        raise SystemExit("the native kernels are not built: make native")
    context = NativeContext(library, args.threads)
    binder = TensorBinder(CacheLayout((), {}), {})
    kept: list[RowSource] = []
    bound: dict[str, list[Matrix]] = {}
    for name in args.forms:
        sources = [FORMS[name](args.outputs, args.inputs) for _ in range(args.matrices)]
        kept += sources
        bound[name] = [binder.rows(source) for source in sources]
    print("| rows of input | " + " | ".join(args.forms) + " |")
    print("| --- |" + " --: |" * len(args.forms))
    for rows in args.rows:
        x, output = torch.randn(rows, args.inputs), torch.empty(rows, args.outputs)
        times: dict[str, list[float]] = {name: [] for name in args.forms}
        for _ in range(args.rounds):
            for name in args.forms:
                start = read_clock()
                for matrix in bound[name]:
                    context.matmul(matrix, x, output)
                times[name].append(read_clock() - start)
        first = times[args.forms[0]]
        work = 2e-9 * rows * args.outputs * args.inputs * args.matrices
        cells = [f"{work / min(own):.1f} ({find_ratio(first, own):.2f}x)" for own in times.values()]
        print(f"| {rows} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
