"""The native kernels' tests need the built library; a machine without a compiler has none."""

from pathlib import Path

import pytest

from vllm.native.loader import load_library

if load_library() is None:
    found = Path(__file__).parent.glob("test_*.py")
    collect_ignore = [path.name for path in found if path.name != "test_loader.py"]


def pytest_report_header(config: pytest.Config) -> str:
    """Say whether these tests run."""
    del config
    return (
        "native kernels: built" if load_library() else "native kernels: NOT built, tests left out"
    )
