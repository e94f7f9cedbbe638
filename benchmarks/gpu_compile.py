"""Compiles kernels for a card that this machine does not have: what launches would compile."""

from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

_TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int8: "i8",
    torch.uint8: "u8",
}
_WARP = 32
_ALIGNMENT = 16


class Compiler:
    """A ``Launcher`` that compiles instead of running; results are left as they were.

    Attributes:
        shared: Kernel and its constants -> shared memory, KiB.

    Args:
        capability: Compute capability without its dot, as 90.
    """

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, _WARP)
        self.shared: dict[str, float] = {}

    def launch(
        self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        """Compile a kernel for these arguments, once."""
        del grid
        names = kernel.arg_names
        signature = {name: _type_of(arg) for name, arg in zip(names, args, strict=False)}
        signature |= dict.fromkeys(options, "constexpr")
        described = " ".join(
            [kernel.__name__, *(f"{k}={v}" for k, v in options.items()), *signature.values()]
        )
        if described in self.shared:
            return
        aligned = {
            (index,): [["tt.divisibility", _ALIGNMENT]]
            for index, arg in enumerate(args)
            if isinstance(arg, torch.Tensor) or (isinstance(arg, int) and arg % _ALIGNMENT == 0)
        }
        constants = {(names.index(name),): value for name, value in options.items()}
        source = ASTSource(kernel, signature, constants, aligned)
        compiled = triton.compile(source, target=self._target)
        self.shared[described] = compiled.metadata.shared / 1024


def _type_of(arg: Any) -> str:
    if isinstance(arg, torch.Tensor):
        return "*" + _TYPES[arg.dtype]
    return "fp32" if isinstance(arg, float) else "i32"
