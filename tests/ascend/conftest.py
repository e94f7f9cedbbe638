"""Tests of this tree pretend to have devices; the process must not remember them."""

import importlib
import sys
from collections.abc import Iterator

import pytest

from vllm.platforms.resolve import get_current_platform


@pytest.fixture(autouse=True)
def forget_devices() -> Iterator[None]:
    """Drop a pretended torch_npu, and let the next access choose the platform anew."""
    yield
    sys.modules.pop("torch_npu", None)
    importlib.invalidate_caches()
    get_current_platform.cache_clear()
