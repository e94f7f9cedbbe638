"""Reference mode for the op tests: the npu namespace with CPU and Meta implementations."""

import pytest

from vllm_ascend.ops.schemas import register_npu_ops


@pytest.fixture(scope="session", autouse=True)
def npu_ops() -> None:
    register_npu_ops()
