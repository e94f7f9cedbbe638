"""Compares our table of NPU calls with the real torch-npu wheel.

Of every call: the schema. Of those whose Meta kernel the wheel has, with the arguments we give:
shapes and types on Meta tensors and on fake ones, and ``torch.library.opcheck`` (what the schema
says about aliases and mutation is true; fake tensors agree). Fake tensors stand on "cpu": on "npu"
some calls look for a device even then, and end the process.

Run by ``make ascend-conformance``, in a virtual environment that has the wheel and the stubs of
``stub_cann``. Exits 1 if anything differs.
"""

import sys
from collections.abc import Sequence

import torch
import torch_npu  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch._subclasses.fake_tensor import FakeTensorMode

from vllm_ascend.ops.samples import SampleCall, sample_calls
from vllm_ascend.ops.schemas import NPU_OPS, NpuOp

META = torch.device("meta")
OPCHECKS = ("test_schema", "test_faketensor")


def describe(results: Sequence[torch.Tensor]) -> str:
    """Return the type and shape of each result."""
    return ", ".join(f"{str(r.dtype).removeprefix('torch.')}{list(r.shape)}" for r in results)


def find_differences(op: NpuOp, sample: SampleCall) -> list[str]:
    """Compare a call whose schema is the same and whose Meta kernel the wheel has."""
    arguments, keywords = sample.make(META)
    inferred = op.infer(*arguments, **keywords)
    ours = describe([inferred] if isinstance(inferred, torch.Tensor) else list(inferred))
    found = {"Meta": describe(sample.results(META))}
    with FakeTensorMode():
        found["fake"] = describe(sample.results(torch.device("cpu")))
    differences = [
        f"{kind}: wheel {them}, ours {ours}" for kind, them in found.items() if them != ours
    ]
    overload = getattr(torch.ops.npu, op.name).default
    checked = torch.library.opcheck(
        overload, arguments, keywords, test_utils=OPCHECKS, raise_exception=False
    )
    differences += [
        f"opcheck {name}: {said}" for name, said in checked.items() if said != "SUCCESS"
    ]
    return differences


def has_meta_kernel(op: NpuOp) -> bool:
    """Whether the wheel can infer the call's results."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"npu::{op.name}", "Meta"))


def main() -> int:
    """Compare every call; print a line each."""
    samples = {sample.name: sample for sample in sample_calls()}
    num_different, without_meta = 0, []
    for op in NPU_OPS:
        theirs = getattr(torch.ops.npu, op.name).default._schema
        ours = torch._C.parse_schema(f"npu::{op.schema}")
        differences = [] if theirs == ours else [f"schema: wheel {theirs}, ours {ours}"]
        is_inferred = has_meta_kernel(op)
        if not is_inferred:
            without_meta.append(op.name)
        elif not differences:
            differences = find_differences(op, samples[op.name])
        num_different += bool(differences)
        verdict = "DIFFERENT" if differences else "same"
        compared = f"schema, Meta, fake, opcheck {', '.join(OPCHECKS)}" if is_inferred else "schema"
        print(f"{verdict:9} {op.name}: {'; '.join(differences) or compared}")
    print(
        f"torch_npu {torch_npu.__version__}: {len(NPU_OPS)} calls, {num_different} different; no "
        f"Meta kernel in the wheel, so schema only: {', '.join(without_meta) or 'none'}"
    )
    return 1 if num_different else 0


if __name__ == "__main__":
    sys.exit(main())
