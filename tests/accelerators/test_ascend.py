"""The Ascend tree on the core's kernels: npu calls first, then Triton."""

import pytest
import torch

from tests.accelerators.comparing import assert_near
from tests.accelerators.test_elementwise import random
from vllm.platforms.cuda import CudaReferencePlatform
from vllm.v1.attention.ops import decoder
from vllm.v1.attention.ops.registry import REFERENCE_OPS
from vllm.v1.attention.ops.triton import attention, elementwise
from vllm_ascend.ops.registry import ASCEND_OPS
from vllm_ascend.platform import ReferencePlatform


def test_kernels_stand_in_for_plain_torch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ASCEND_TRITON", "1")
    platform = ReferencePlatform()
    assert platform.get_op("silu_and_mul") is elementwise.silu_and_mul
    assert platform.get_op("attend") is attention.attend
    for name, op in ASCEND_OPS.items():
        if op.npu_calls and not op.a5_only:
            assert platform.get_op(name) is op.run
    x = random(1, 5, 12)
    assert_near(platform.get_op("silu_and_mul")(x), decoder.silu_and_mul(x))
    monkeypatch.setenv("VLLM_ASCEND_TRITON", "0")
    assert platform.get_op("silu_and_mul") is REFERENCE_OPS["silu_and_mul"]


def test_the_reference_platform_runs_kernels_on_the_cpu() -> None:
    platform = CudaReferencePlatform()
    assert platform.get_op("rms_norm") is elementwise.rms_norm
    assert platform.make_device(0) == torch.device("cpu")
    assert platform.find_kernel_obstacle() == ""
