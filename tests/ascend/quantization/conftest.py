"""Reference mode for the quantisation tests."""

import pytest

from vllm_ascend.ops.schemas import register_npu_ops


@pytest.fixture(scope="session", autouse=True)
def npu_ops() -> None:
    register_npu_ops()
