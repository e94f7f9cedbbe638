"""An installation without torch is told so before anything starts."""

import subprocess
import sys

import pytest

from vllm.entrypoints.cli.needed_packages import check_needed_packages

# Runs the command in an interpreter that finds no torch.
_WITHOUT_TORCH = """
import importlib.util, sys
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "torch" else find_spec(name, *rest)
from vllm.entrypoints.cli.main import main
sys.exit(main(["serve", "deepseek-v4", "--port", "0"]))
"""


def test_all_is_there() -> None:
    check_needed_packages()


@pytest.mark.slow
def test_serve_without_torch_says_so_and_starts_nothing() -> None:
    command = [sys.executable, "-c", _WITHOUT_TORCH]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    assert "error: torch cannot be found" in result.stderr
    assert "pip install torch" in result.stderr
    assert "Traceback" not in result.stderr
    assert "Starting vLLM server" not in result.stderr
