"""Packed matrices on a GPU: products against the CPU's, and the bytes they read a second.

Sections ``packed`` and ``packed_speed`` of ``benchmarks.gpu``.
"""

from collections.abc import Callable
from typing import Any

import torch

from vllm.model_executor.layers.quantization.panels import (
    CodedRows,
    GroupValues,
    PackedRows,
    scale_e4m3,
    unit_of,
)
from vllm.model_executor.layers.quantization.storages import Fp8Blocks
from vllm.v1.attention.ops import stored_products as by_torch
from vllm.v1.attention.ops.stored import CodeKind, Inputs, RowSource
from vllm.v1.attention.ops.triton.registry import get_triton_op

# Name -> codes, inputs under a scale (0: all), what stands beside the scales, rounded inputs.
_FORMS: dict[str, tuple[CodeKind, int, str, Inputs]] = {
    "gptq": ("int4", 128, "none", "whole"),
    "awq": ("int4", 128, "zeros", "whole"),
    "q4_0": ("int4", 32, "none", "whole"),
    "q4_k": ("uint4", 32, "offsets", "whole"),
    "iq4_nl": ("iq4", 32, "none", "whole"),
    "nf4": ("nf4", 64, "none", "whole"),
    "mxfp4 (GGUF)": ("e2m1", 32, "none", "whole"),
    "w8a16": ("int8", 0, "none", "whole"),
    "w8a8": ("int8", 0, "none", "bytes by row"),
    "w4a8": ("int4", 32, "none", "bytes by group"),
}


def make_source(name: str, rows: int, width: int, device: torch.device) -> RowSource:
    """Returns random codes of a form; the same on every device."""
    generator = torch.Generator().manual_seed(rows)

    def draw_bytes(*shape: int, high: int = 256) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=generator, dtype=torch.uint8)

    def scales(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator) + 0.5

    if name == "fp8":
        fp8 = Fp8Blocks(
            rows, width, (128, 128), scales(-(-rows // 128), -(-width // 128)).to(device)
        )
        fp8.codes.copy_(draw_bytes(rows, width, high=126))
        return fp8
    if name == "nvfp4":
        words = draw_bytes(rows, width // 2).view(torch.int32).to(device)
        stored = draw_bytes(rows, width // 16, high=127).view(torch.float8_e4m3fn).to(device)
        whole = torch.tensor(300.0, device=device)
        numbers = scale_e4m3(stored, whole, divides=True)
        return PackedRows(CodedRows("e2m1", words, width, 16, numbers), name)
    kind, group, beside, inputs = _FORMS[name]
    group = group or width
    words = draw_bytes(rows, 4 * -(-width // unit_of(kind).num_codes)).view(torch.int32).to(device)
    num_groups = -(-width // group)
    values = GroupValues(scales(rows, num_groups).half().to(device))
    offsets = None
    if beside == "zeros":
        zeros = draw_bytes(rows, num_groups, high=16).to(torch.int8) - 8
        offsets = GroupValues(zeros.to(device))
    elif beside == "offsets":
        offsets = GroupValues(-scales(rows, num_groups).half().to(device))
    return PackedRows(CodedRows(kind, words, width, group, values, offsets), name, inputs)


FORMS = (*_FORMS, "fp8", "nvfp4")


def check_packed(
    device: torch.device,
    rows: int,
    bounds: dict[torch.dtype, float],
    say: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Compares products with the CPU's by the decoded matrix.

    Args:
        device: The GPU, or the CPU where kernels are interpreted.
        rows: Outputs of the matrices.
        bounds: Type of the inputs -> relative distance that is right.
        say: Takes what is known after each form.
    """
    found: dict[str, Any] = {}
    wrong: dict[str, str] = {}
    linear = get_triton_op("stored_linear")
    for name in FORMS:
        sources = [
            make_source(name, rows, 2 * rows, where) for where in (device, torch.device("cpu"))
        ]
        for dtype, bound in bounds.items():
            for count in (1, 40):
                case = f"{name} {str(dtype).removeprefix('torch.')} {count}"
                generator = torch.Generator().manual_seed(count)
                x = torch.randn(count, 2 * rows, generator=generator).to(dtype)
                try:
                    got = linear(x.to(device), sources[0]).cpu().double()
                except Exception as error:  # one kernel must not hide what the others do
                    wrong[case] = f"{type(error).__name__}: {error}"
                    continue
                expected = by_torch.stored_linear(x.float(), sources[1]).double()
                found[case] = distance = float((got - expected).norm() / expected.norm())
                if not distance <= bound:
                    wrong[case] = f"off by {distance}"
        say({**found, "wrong": wrong})
    return {**found, "wrong": wrong}


def bench_packed(
    device: torch.device,
    size: int,
    measure: Callable[[Callable[[], Any]], float],
    say: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Measures products of size x size; returns GB/s of codes, or TFLOP/s of many rows."""
    linear = get_triton_op("stored_linear")
    found: dict[str, Any] = {}
    for name in FORMS:
        source = make_source(name, size, size, device)
        num_bytes = size * size * (1 if name in ("fp8", "w8a16", "w8a8") else 0.5)
        for count in (1, 16, 64, size // 2):
            x = torch.randn(count, size, device=device, dtype=torch.bfloat16)
            seconds = measure(lambda x=x, source=source: linear(x, source))  # type: ignore[misc]
            found[f"{name} {count}"] = (
                {"tflops": 2e-12 * count * size * size / seconds}
                if count > 64
                else {"gb_per_s": 1e-9 * num_bytes / seconds}
            )
        say(found)
    return found
