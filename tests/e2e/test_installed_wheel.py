"""The wheel alone, in an empty environment: it serves and answers."""

import os
import subprocess
import sys
import venv
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.e2e.server_process import ServerProcess


def _install(wheel: Path, environment: Path) -> None:
    """Install the wheel, and of what lies beside the tests only what it asks for."""
    # Our pip works on it from outside: one in there would only be copied to run once.
    venv.create(environment, with_pip=False)
    command = [sys.executable, "-m", "pip", "--python", environment / "bin" / "python", "install"]
    command += ["-q", "--no-compile", "--no-deps", "--no-index", wheel]
    # A checkout on the path would count as installed.
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=500, check=False, env=clean
    )
    assert result.returncode == 0, result.stderr[-3000:]
    (packages,) = environment.glob("lib/*/site-packages")
    (installed,) = distributions(path=[str(packages)])
    for needed in set(_find_needed(installed, frozenset(), set())):
        for name in {file.parts[0] for file in needed.files or ()} - {"..", "__pycache__"}:
            if not (packages / name).exists():
                (packages / name).symlink_to(Path(str(needed.locate_file(name))))


def _find_needed(
    package: Distribution, extras: frozenset[str], seen: set[tuple[str, frozenset[str]]]
) -> Iterator[Distribution]:
    """Yield what a package needs with extras, and what that needs; versions must suit."""
    for text in package.requires or ():
        need = Requirement(text)
        if need.marker and not any(need.marker.evaluate({"extra": e}) for e in extras | {""}):
            continue
        key = need.name.lower(), frozenset(need.extras)
        if key not in seen:
            seen.add(key)
            found = distribution(need.name)
            assert need.specifier.contains(found.version, prereleases=True), text
            yield found
            yield from _find_needed(found, key[1], seen)


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
