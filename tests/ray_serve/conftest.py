"""One Ray cluster for all tests here: it takes longest to start."""

import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.ray_cluster import ray_cluster
from vllm import LLM

# Ray reads it when it is imported, which modules here do before any fixture runs.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    """One engine, of this process: what it answers, others must."""
    with monkeypatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        llm = LLM("deepseek-v4", block_size=32, kv_cache_memory_bytes=64 << 20)
    with llm:
        yield llm


@pytest.fixture(scope="package")
def cluster() -> Iterator[Any]:
    """Two nodes of three CPUs by name, and this process as a driver; idle, Ray computes too."""
    with ray_cluster(3, 3) as cluster:
        import ray

        ray.init(cluster.address, log_to_driver=False, logging_level="error")
        yield cluster
