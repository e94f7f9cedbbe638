"""The native kernels' tests need the built library; a machine without a compiler has none."""

import pytest

from vllm.native.loader import load_library

if load_library() is None:
    collect_ignore_glob = ["test_*.py"]


def pytest_report_header(config: pytest.Config) -> str:
    """Say whether these tests run."""
    del config
    return (
        "native kernels: built" if load_library() else "native kernels: NOT built, tests left out"
    )
