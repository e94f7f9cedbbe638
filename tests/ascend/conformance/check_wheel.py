"""Compares our table of NPU calls with the real torch-npu wheel: schemas, and shapes on Meta.

Run by ``make ascend-conformance``, in a virtual environment that has the wheel and the stubs of
``stub_cann``. Exits 1 if anything differs.
"""

import sys
from typing import Any

import torch
import torch_npu  # type: ignore[import-not-found,import-untyped,unused-ignore]

from vllm_ascend.ops.samples import sample_calls
from vllm_ascend.ops.schemas import NPU_OPS


def describe(results: Any) -> list[str]:
    """Return the type and shape of each result."""
    tensors = [results] if isinstance(results, torch.Tensor) else list(results)
    return [f"{str(r.dtype).removeprefix('torch.')}{list(r.shape)}" for r in tensors]


def main() -> int:
    """Compare every call; print a line each."""
    samples = {sample.name: sample for sample in sample_calls()}
    meta = torch.device("meta")
    num_different = num_without_meta = 0
    for op in NPU_OPS:
        theirs = getattr(torch.ops.npu, op.name).default._schema
        ours = torch._C.parse_schema(f"npu::{op.schema}")
        if theirs != ours:
            num_different += 1
            print(f"DIFFERENT schema {op.name}\n  wheel {theirs}\n  ours  {ours}")
            continue
        arguments, keywords = samples[op.name].make(meta)
        expected = describe(op.infer(*arguments, **keywords))
        try:
            found = describe(samples[op.name].results(meta))
        except NotImplementedError:
            num_without_meta += 1
            print(f"schema only      {op.name}: the wheel has no Meta kernel")
            continue
        if found != expected:
            num_different += 1
            print(f"DIFFERENT shapes {op.name}: wheel {found}, ours {expected}")
        else:
            print(f"same             {op.name}: {', '.join(found)}")
    print(
        f"torch_npu {torch_npu.__version__}: {len(NPU_OPS)} calls, {num_different} different, "
        f"{num_without_meta} without a Meta kernel in the wheel"
    )
    return 1 if num_different else 0


if __name__ == "__main__":
    sys.exit(main())
