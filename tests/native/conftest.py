"""The native kernels' tests need the built library; a machine without a compiler has none.

One that lies built but does not fit these sources would leave all of them out, unseen, and have
every other test run on torch alone: it stops the run.
"""

from pathlib import Path

import pytest

from vllm import native
from vllm.native.loader import LIBRARY_NAME, load_library, open_library

_FOUND = open_library()
if isinstance(_FOUND, str) and (Path(str(native.__file__)).parent / LIBRARY_NAME).exists():
    raise pytest.UsageError(f"{_FOUND} (or: python csrc/compile.py --strict)")
if load_library() is None:
    found = Path(__file__).parent.glob("test_*.py")
    collect_ignore = [path.name for path in found if path.name != "test_loader.py"]


def pytest_report_header(config: pytest.Config) -> str:
    """Say whether these tests run."""
    del config
    return (
        "native kernels: built" if load_library() else "native kernels: NOT built, tests left out"
    )
