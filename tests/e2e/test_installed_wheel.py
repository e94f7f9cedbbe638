"""The wheel alone, in an empty environment: it serves and answers."""

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.building import read_pins
from tests.e2e.server_process import ServerProcess

# What pip says when the index cannot be reached; anything else is a fault of the package.
_OFFLINE = (
    "NewConnectionError",
    "ConnectTimeoutError",
    "ReadTimeoutError",
    "Temporary failure in name resolution",
    "Network is unreachable",
)


def _install(wheel: Path, environment: Path) -> None:
    """Install the wheel and, as pip resolves them, its dependencies."""
    # Our pip works on it from outside: one in there would only be copied to run once.
    venv.create(environment, with_pip=False)
    # The versions that the other tests run with; which packages are needed is the wheel's to say.
    pins = environment / "pins.txt"
    pins.write_text("".join(f"{name}=={version}\n" for name, version in read_pins().items()))
    command = [sys.executable, "-m", "pip", "--python", environment / "bin" / "python", "install"]
    command += ["-q", "--no-compile", "-c", pins, wheel]
    # A checkout on the path would count as installed.
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=500, check=False, env=clean
    )
    if result.returncode and any(words in result.stderr for words in _OFFLINE):
        pytest.skip(f"offline: pip cannot reach its index:\n{result.stderr[-500:]}")
    assert result.returncode == 0, result.stderr[-3000:]


@pytest.mark.timeout(1800)  # the library is compiled where none lies built
def test_a_wheel_in_an_empty_environment_serves(tmp_path: Path, distribution: Path) -> None:
    (wheel,) = distribution.glob("*.whl")
    environment = tmp_path / "venv"
    _install(wheel, environment)
    program = [str(environment / "bin" / "vllm")]
    with ServerProcess(
        tmp_path / "log.txt", environment={"PYTHONPATH": ""}, program=program
    ) as server:
        body = {"prompt": "The garden", "max_tokens": 4, "temperature": 0}
        answer = server.post("/v1/completions", body).json()
        assert answer["usage"]["completion_tokens"] == 4
        assert isinstance(answer["choices"][0]["text"], str)
        # Nothing of the checkout: the weights were the wheel's.
        assert f"file(s) of {environment}" in server.log
        assert "native kernels: " in server.log
    version = subprocess.run([*program, "--version"], capture_output=True, text=True, check=True)
    assert "not the vllm-project's engine" in version.stdout
