"""One tiny checkpoint for all tests here, on one thread: its tensors are too small for two."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.v1.spec_decode.tiny_engine import write_tiny


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="package", autouse=True)
def on_one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OMP_NUM_THREADS", "1")
        environment.setenv("VLLM_CHECK_INVARIANTS", "1")
        yield
    torch.set_num_threads(before)
